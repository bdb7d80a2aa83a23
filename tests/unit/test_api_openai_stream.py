"""Replies of chat and text completions: golden bytes, and equality of plain replies and accumulated streams."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import goldens
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from replies import play

from emberline.api.openai import chat as openai_chat
from emberline.api.openai import chat_reply
from emberline.api.openai import completions as openai_completions
from emberline.api.openai import completions_stream as completions_stream
from emberline.core.errors import EngineFailed
from emberline.wire import sse
from emberline.wire.chat import ChatWriter
from emberline.wire.deltas import (
    Delta,
    Finish,
    PromptDelta,
    ReasoningDelta,
    ReplyStart,
    ReplyWriter,
    StreamStart,
    TextDelta,
    TokenInfo,
    ToolCallArguments,
    ToolCallStart,
    UsageUpdate,
)
from emberline.wire.usage import EngineUsage, Usage

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "weather"}}


def chat(**fields: Any) -> ChatWriter:
    body = json.dumps({"model": "m", "messages": [USER], **fields}).encode()
    return chat_reply.make_writer(openai_chat.parse(body), "chatcmpl-1", 1700000000, "fp_1")


def complete(**fields: Any) -> completions_stream.CompletionReplyWriter:
    body = json.dumps({"model": "m", "prompt": "ab", **fields}).encode()
    return completions_stream.CompletionReplyWriter(openai_completions.parse(body), "cmpl-1", 1700000000, "fp_1")


def chunks(stream: bytes) -> Iterator[dict[str, Any]]:
    events = stream.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    for event in events[:-2]:
        assert event.startswith(b"data: ")
        yield json.loads(event[6:])


def fold(stream: bytes) -> dict[str, Any]:
    """Accumulate the stream with the official client."""
    state: Any = ChatCompletionStreamState()
    for chunk in chunks(stream):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    return state.current_completion_snapshot.model_dump()  # type: ignore[no-any-return]


def comparable(completion: dict[str, Any]) -> dict[str, Any]:
    """Return the fields to compare: an accumulated stream has no stop_reason, and its tool calls have an index."""
    comparable_fields = {
        key: completion[key] for key in ("id", "created", "model", "system_fingerprint", "service_tier", "usage")
    }
    comparable_fields["choices"] = [
        {
            "index": choice["index"],
            "finish_reason": choice["finish_reason"],
            "content": choice["message"]["content"],
            "reasoning": choice["message"].get("reasoning_content"),
            "function_call": choice["message"].get("function_call"),
            "tool_calls": [
                (call["id"], call["function"]["name"], call["function"]["arguments"])
                for call in choice["message"].get("tool_calls") or []
            ],
            "logprobs": [token["token"] for token in (choice["logprobs"] or {}).get("content") or []],
        }
        for choice in completion["choices"]
    ]
    return comparable_fields


def token(text: str, logprob: float | None = -0.5, offset: int = 0, top: Sequence[TokenInfo] = ()) -> TokenInfo:
    return TokenInfo(len(text), text, text.encode(), logprob, top, offset)


TALK: list[Delta] = [
    ReplyStart(5, 2),
    ReasoningDelta("hm"),
    TextDelta("Hé", 0, [token("Hé", -0.25, top=[token("Hé", -0.25), token("Hi", -math.inf)])]),
    TextDelta("llo", 0, [token("llo", -0.5, 2)]),
    Finish("stop", "END"),
    UsageUpdate(Usage(input=5, output=4, cached_read=2, reasoning=1)),
]
CALLING: list[Delta] = [
    ReplyStart(5),
    ToolCallStart(0, "call_a", "weather"),
    ToolCallArguments(0, '{"city":'),
    ToolCallArguments(0, '"Oslo"}'),
    ToolCallStart(1, "call_b", "weather"),
    ToolCallArguments(1, "{}"),
    Finish("tool_calls"),
    UsageUpdate(Usage(input=5, output=9)),
]
LOGPROBS = {"logprobs": True, "top_logprobs": 2}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def test_golden_chat_stream() -> None:
    goldens.check("openai_chat_stream.sse", play(chat(**USAGE, **LOGPROBS), TALK))


def test_golden_chat_body() -> None:
    writer = chat(**LOGPROBS, metadata={"k": "v"})
    assert play(writer, TALK) == b""
    goldens.check("openai_chat_body.json", sse.dumps(writer.body()))


def test_logprobs_with_token_ids() -> None:
    writer = chat(**LOGPROBS, **USAGE, return_tokens_as_token_ids=True)
    streamed = fold(play(writer, TALK))
    assert comparable(streamed)["choices"] == comparable(writer.body())["choices"]
    first, second = writer.body()["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["bytes"], second["token"]) == ("token_id:2", list("Hé".encode()), "token_id:3")
    assert [other["token"] for other in first["top_logprobs"]] == ["token_id:2", "token_id:2"]
    text = complete(logprobs=1, return_tokens_as_token_ids=True)
    play(text, COMPLETION)
    [choice] = text.body()["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:2", "token_id:1"]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)


def test_include_reasoning_false_omits_reasoning() -> None:
    for fields in ({}, USAGE):
        writer = chat(include_reasoning=False, **fields)
        stream = play(writer, TALK)
        assert b"hm" not in stream
        body = fold(stream) if fields else writer.body()
        assert not body["choices"][0]["message"].get("reasoning_content")
        assert body["choices"][0]["message"]["content"] == "Héllo"
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1


def test_echo_repeats_continued_message() -> None:
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    fields = {"echo": True, "continue_final_message": True, "messages": begun}
    for more in ({}, USAGE):
        writer = chat(**fields, **more)
        stream = play(writer, TALK)
        body = fold(stream) if more else writer.body()
        assert body["choices"][0]["message"]["content"] == "Well, Héllo"
    unanswered = chat(echo=True)
    play(unanswered, TALK)
    assert unanswered.body()["choices"][0]["message"]["content"] == "Héllo"


def test_golden_chat_tools() -> None:
    goldens.check("openai_chat_tools_stream.sse", play(chat(stream=True, tools=[TOOL]), CALLING))
    writer = chat(tools=[TOOL])
    play(writer, CALLING)
    goldens.check("openai_chat_tools_body.json", sse.dumps(writer.body()))


def test_legacy_functions_get_function_call_reply() -> None:
    writer = chat(stream=True, functions=[{"name": "weather"}])
    got = list(chunks(play(writer, CALLING[:4] + CALLING[6:])))
    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "function_call": {"name": "weather", "arguments": ""}}
    assert got[-1]["choices"][0]["finish_reason"] == "function_call"
    [choice] = writer.body()["choices"]
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": '{"city":"Oslo"}'}
    assert "tool_calls" not in choice["message"]


def test_usage_is_null_until_the_last_chunk() -> None:
    got = list(chunks(play(chat(**USAGE), TALK)))
    assert [chunk["usage"] for chunk in got[:-1]] == [None] * (len(got) - 1)
    assert got[-1]["choices"] == []
    assert got[-1]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    assert all("usage" not in chunk for chunk in chunks(play(chat(stream=True), TALK)))


def test_usage_of_the_engine_has_accepted_and_rejected_drafts() -> None:
    usage = EngineUsage(input=5, output=9, reasoning=1, accepted_drafts=6, rejected_drafts=2)
    expected = {"reasoning_tokens": 1, "accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2}
    deltas = [ReplyStart(5), TextDelta("a"), Finish("stop"), UsageUpdate(usage)]
    for writer in (chat(), complete()):
        play(writer, deltas)
        assert writer.body()["usage"]["completion_tokens_details"] == expected
    for writer in (chat(**USAGE), complete(**USAGE)):
        assert list(chunks(play(writer, deltas)))[-1]["usage"]["completion_tokens_details"] == expected
    assert usage.plus(usage) == Usage(input=10, output=18, reasoning=2)


def test_running_usage_is_in_every_chunk() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    deltas: list[Delta] = [
        ReplyStart(5, 2),
        UsageUpdate(Usage(input=5, cached_read=2, output=1)),
        TextDelta("a"),
        UsageUpdate(Usage(input=5, cached_read=2, output=3, reasoning=1)),
        TextDelta("b"),
        Finish("stop"),
        UsageUpdate(Usage(input=5, output=3, cached_read=2, reasoning=1)),
    ]
    for writer in (chat(**options), complete(**options)):
        got = [chunk["usage"] for chunk in chunks(play(writer, deltas))]
        assert [usage["completion_tokens"] for usage in got] == [1, 3, 3, 3]
        assert {usage["prompt_tokens"] for usage in got} == {5}
        assert got[-1] == got[-2]


def test_choices_open_in_order() -> None:
    deltas: list[Delta] = [
        TextDelta("c", 2),
        TextDelta("a"),
        Finish("stop", choice=2),
        Finish("length"),
        Finish("stop", choice=1),
        UsageUpdate(Usage(input=1, output=2)),
    ]
    stream = play(chat(stream=True, n=3), deltas)
    assert [choice["content"] for choice in comparable(fold(stream))["choices"]] == ["a", "", "c"]


def test_service_tier_shows_priority() -> None:
    for requested, expected in ((None, "default"), ("priority", "default"), ("flex", "flex")):
        writer = chat(service_tier=requested)
        play(writer, TALK)
        assert writer.body()["service_tier"] == expected


def test_prompt_logprobs() -> None:
    writer = chat(prompt_logprobs=1)
    prompt = [token("a", None), token("bb", -2.0, 1, [token("ccc", -0.1)])]
    play(writer, [ReplyStart(2), PromptDelta(0, "abb", prompt), Finish("stop"), UsageUpdate(Usage(input=2, output=0))])
    best = {"logprob": -0.1, "rank": 1, "decoded_token": "ccc"}
    assert writer.body()["prompt_logprobs"] == [
        None,
        {"3": best, "2": {"logprob": -2.0, "rank": None, "decoded_token": "bb"}},
    ]


def test_failed_stream_ends_with_error_event() -> None:
    for writer in (chat(stream=True), complete(stream=True)):
        writer.write(StreamStart())
        writer.write(TextDelta("a"))
        event, done = writer.write_error(EngineFailed("the engine died")).split(b"\n\n", 1)
        assert json.loads(event[6:])["error"]["code"] == "engine_failed"
        assert done == sse.DONE_EVENT


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def random_replies(draw: st.DrawFn) -> tuple[int, list[Delta]]:
    n = draw(st.integers(1, 3))
    queues = []
    for index in range(n):
        deltas_of_choice: list[Delta] = [
            ReasoningDelta(text, index) for text in draw(st.lists(TEXTS.filter(bool), max_size=3))
        ]
        deltas_of_choice += [TextDelta(text, index, [token(text)]) for text in draw(st.lists(TEXTS, max_size=4))]
        for slot in range(draw(st.integers(0, 2))):
            deltas_of_choice.append(ToolCallStart(slot, f"call_{index}{slot}", "weather", index))
            deltas_of_choice += [ToolCallArguments(slot, text, index) for text in draw(st.lists(TEXTS, max_size=3))]
        queues.append(
            [*deltas_of_choice, Finish(draw(st.sampled_from(["stop", "length", "tool_calls"])), choice=index)]
        )
    mixed: list[Delta] = []
    while any(queues):
        mixed.append(draw(st.sampled_from([queue for queue in queues if queue])).pop(0))
    return n, [ReplyStart(3, 1), *mixed, UsageUpdate(Usage(input=3, output=7, cached_read=1, reasoning=2))]


@settings(deadline=None)
@given(random_replies(), st.booleans())
def test_plain_reply_equals_accumulated_stream(talk: tuple[int, list[Delta]], legacy: bool) -> None:
    n, deltas = talk
    tools: dict[str, Any] = {"functions": [TOOL["function"]]} if legacy else {"tools": [TOOL]}
    if legacy:
        deltas = [delta for delta in deltas if getattr(delta, "slot", 0) == 0]
    plain, streamed = chat(n=n, **LOGPROBS, **tools), chat(n=n, **LOGPROBS, **tools, **USAGE)
    play(plain, deltas)
    typed = ChatCompletion.model_validate(plain.body()).model_dump()
    stream = play(streamed, deltas)
    folded = fold(stream)
    folded["usage"] = next(chunk["usage"] for chunk in chunks(stream) if chunk["usage"])
    typed["usage"] = plain.body()["usage"]
    assert comparable(folded) == comparable(typed)
    assert streamed.body() == plain.body()


COMPLETION: list[Delta] = [
    ReplyStart(2),
    PromptDelta(0, "ab", [token("a", None), token("b", -1.0, 1, [token("x", -0.2), token("b", -1.0)])]),
    TextDelta(" c", 0, [token(" c", -0.1, 0, [token(" c", -0.1)])]),
    TextDelta("d", 0, [token("d", -3.0, 2, [token("e", -0.3)])]),
    Finish("length"),
    UsageUpdate(Usage(input=2, output=2)),
]


def test_golden_completion() -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": 2}
    goldens.check("openai_completion_stream.sse", play(complete(**fields, **USAGE), COMPLETION))
    writer = complete(**fields)
    play(writer, COMPLETION)
    goldens.check("openai_completion_body.json", sse.dumps(writer.body()))


def test_official_client_parses_completion() -> None:
    writer = complete(logprobs=1)
    play(writer, COMPLETION)
    typed = Completion.model_validate(writer.body())
    assert typed.choices[0].text == " cd"


def test_plain_completion_equals_accumulated_stream() -> None:
    writer = complete(echo=True, logprobs=1, **USAGE)
    got = list(chunks(play(writer, COMPLETION)))
    [choice] = writer.body()["choices"]
    pieces = [chunk["choices"][0] for chunk in got if chunk["choices"]]
    assert "".join(piece["text"] for piece in pieces) == choice["text"] == "ab cd"
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [item for piece in pieces if piece["logprobs"] for item in piece["logprobs"][name]]
        assert joined == choice["logprobs"][name]
    assert got[-1]["usage"] == writer.body()["usage"]


def test_max_tokens_zero_returns_echo_only() -> None:
    writer = complete(echo=True, logprobs=1, max_tokens=0)
    play(writer, [*COMPLETION[:3], Finish("stop"), UsageUpdate(Usage(input=2, output=1))])
    [choice] = writer.body()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0]
    assert choice["logprobs"]["top_logprobs"] == [None, {"x": -0.2, "b": -1.0}]
    assert writer.body()["usage"]["completion_tokens"] == 0


def test_each_prompt_has_n_choices() -> None:
    writer = complete(prompt=["a", "b"], n=2)
    deltas: list[Delta] = [TextDelta(str(index), index) for index in (3, 1, 0, 2)]
    play(
        writer,
        [
            ReplyStart(2),
            *deltas,
            *(Finish("stop", choice=index) for index in range(4)),
            UsageUpdate(Usage(input=2, output=4)),
        ],
    )
    assert [choice["text"] for choice in writer.body()["choices"]] == ["0", "1", "2", "3"]


def test_prompt_is_not_returned_without_echo() -> None:
    writer = complete(prompt_logprobs=1)
    play(writer, COMPLETION)
    [choice] = writer.body()["choices"]
    assert choice["text"] == " cd"
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["1"]["decoded_token"] == "b"


@pytest.mark.parametrize("writer", [chat(), complete()])
def test_plain_reply_writes_no_chunks(writer: ReplyWriter) -> None:
    usage = UsageUpdate(Usage(input=1, output=1))
    assert play(writer, [ReplyStart(1), TextDelta("a"), Finish("stop"), usage]) == b""
