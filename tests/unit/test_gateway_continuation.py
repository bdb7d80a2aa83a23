"""Continuing a broken stream: the repetition filter, the request, and the joined stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from emberline.gateway.core.assistant_prefill import AssistantPrefill, prefill_fields
from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.core.guardrail_policy import Guardrails, PatternRule
from emberline.gateway.core.identity import ANONYMOUS
from emberline.gateway.core.options import NO_OPTIONS, RequestOptions
from emberline.gateway.core.request import GatewayReply, GatewayRequest, RequestStep
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.dialects.translate import CODECS, read_reply_context
from emberline.gateway.layers.continuation import ContinuationLayer
from emberline.gateway.providers.registry import ProviderRegistry
from emberline.gateway.streams.continuation import (
    CONTINUE_INSTRUCTION,
    build_continuation,
    claude_accepts_prefill,
    parse_continuable_request,
)
from emberline.gateway.streams.continued_stream import ContinuedStream
from emberline.gateway.streams.repetition_filter import MIN_REPEATED_CHARACTERS, RepetitionFilter
from emberline.wire import deltas, sse
from emberline.wire.deltas import ChatDialect
from emberline.wire.event_splitter import EventSplitter, read_event_data
from emberline.wire.reply_context import ReplyContext
from emberline.wire.usage import Usage

DIALECTS: tuple[ChatDialect, ...] = get_args(ChatDialect)
ASKED: dict[ChatDialect, dict[str, Any]] = {
    "openai-chat": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 100,
        "stream_options": {"include_usage": True},
    },
    "anthropic": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100},
    "openai-responses": {"input": "hi", "max_output_tokens": 100},
    "gemini": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}], "generationConfig": {"maxOutputTokens": 100}},
}

# -- repetition filter -------------------------------------------------------------------------------------------------


def filter_repetition(sent: str, new: str, prefill: AssistantPrefill, cut: int = 1) -> str:
    repetition_filter = RepetitionFilter(sent, prefill)
    pieces = [new[at : at + cut] for at in range(0, len(new), cut)]
    return sent + "".join(map(repetition_filter.push, pieces)) + repetition_filter.end()


@pytest.mark.parametrize("cut", [1, 3, 1000])
@pytest.mark.parametrize(
    ("sent", "new", "prefill", "want"),
    [
        ("One two ", "three", "", "One two three"),
        ("One two ", "two three", "", "One two three"),
        ("One two", "One two three", "", "One two three"),
        ("One two ", "One two\nthree", "", "One two \nthree"),
        ("unbeliev", "unbelievable", "", "unbelievable"),
        ("a list of a", "apples", "", "a list of aapples"),  # one letter is not a repetition
        ("One two ", " three", "", "One two three"),
        (
            "One two three",
            "two",
            "",
            "One two three",
        ),  # "two" starts "two three": the continuation ended within the repetition
        ("One two three", "One", "", "One two three"),
        ("ha ha ", "ha ha!", "flag", "ha ha ha ha!"),  # a prefilled provider does not repeat
        ("ha ha ", " ha!", "bare", "ha ha ha!"),
        ("One\n\n", "\nTwo", "bare", "One\n\nTwo"),
        ("One two ", "One two three", "prefix", "One two three"),
        ("One two ", " three", "prefix", "One two three"),
        ("", "One", "", "One"),
    ],
)
def test_repeated_text_is_removed(sent: str, new: str, prefill: AssistantPrefill, want: str, cut: int) -> None:
    assert filter_repetition(sent, new, prefill, cut) == want


@given(st.integers(2, 30), st.data())
@settings(deadline=None)
def test_restart_at_any_word_is_removed(count: int, data: st.DataObject) -> None:
    text = " ".join(f"<{i}th-word>" for i in range(count))  # no word ends like another starts
    at = data.draw(st.integers(1, len(text) - 1))
    begins = [i for i in range(at) if (i == 0 or text[i - 1] == " ") and at - i >= MIN_REPEATED_CHARACTERS + 1]
    begin = data.draw(st.sampled_from([*begins, at]))
    assert filter_repetition(text[:at], text[begin:], "", data.draw(st.integers(1, 9))) == text


# -- request -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("prefill", ["", "bare"])
def test_sent_text_is_last_message(dialect: ChatDialect, prefill: AssistantPrefill) -> None:
    body = json.dumps({"model": "m", **ASKED[dialect]}).encode()
    request = parse_continuable_request(body, dialect)
    assert request is not None
    again = build_continuation(body, request, "x" * 40 + " ", prefill)
    read = CODECS[dialect].parse_request(json.loads(again))
    turns = [(message.role, getattr(message.parts[0], "text", None)) for message in read.messages]
    assert turns == [("user", "hi"), ("assistant", "x" * 40), *([] if prefill else [("user", CONTINUE_INSTRUCTION)])]
    assert read.max_output == 100 - 11
    assert build_continuation(body, request, " ", prefill) == body, "nothing was sent"
    short = CODECS[dialect].parse_request(json.loads(build_continuation(body, request, "x" * 4000, prefill)))
    assert short.max_output == 1


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_object"}},
        {"n": 2},
        {"logprobs": True},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}]},
        {"tools": [{"type": "custom", "custom": {"name": "sql"}}]},
        {"modalities": ["audio"]},
        {"messages": "none"},
    ],
    ids=str,
)
def test_requests_that_cannot_be_continued(more: dict[str, Any]) -> None:
    assert (
        parse_continuable_request(json.dumps({"model": "m", **ASKED["openai-chat"], **more}).encode(), "openai-chat")
        is None
    )


def test_reasoning_budget_is_kept() -> None:
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 90}}
    body = json.dumps({"model": "m", **ASKED["anthropic"], **thinking}).encode()
    request = parse_continuable_request(body, "anthropic")
    assert request is not None and not claude_accepts_prefill("claude-sonnet-4-5", request)
    assert json.loads(build_continuation(body, request, "x" * 400, ""))["max_tokens"] == 91


def test_claude_versions_that_accept_prefill() -> None:
    request = parse_continuable_request(json.dumps({"model": "m", **ASKED["anthropic"]}).encode(), "anthropic")
    assert request is not None
    accepts = {
        model: claude_accepts_prefill(model, request) for model in ("claude-3-5-haiku", "claude-sonnet-4-5-20250929")
    }
    assert all(accepts.values())
    assert not any(claude_accepts_prefill(model, request) for model in ("claude-opus-4-6", "claude-next", "some-model"))


def test_prefill_fields() -> None:
    body = b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}'
    assert prefill_fields(body, "flag") == {"continue_final_message": True, "add_generation_prompt": False}
    assert prefill_fields(body, "prefix")["messages"][-1] == {"role": "assistant", "content": "b", "prefix": True}
    assert prefill_fields(body, "bare") == {}


# -- stream ------------------------------------------------------------------------------------------------------------


class BrokenReply:
    """A reply whose stream ends with `error`, or completes without one."""

    def __init__(self, chunks: list[bytes], error: Exception | None = None) -> None:
        self._chunks = chunks
        self._error = error
        self.closed = False
        self.reply = GatewayReply(200, {}, self, usage=Usage(input=10, output=5), micros=7, estimated=error is not None)
        self.reply.provider, self.reply.model, self.reply.ended = "p", "m", "cut" if error else "complete"

    def __aiter__(self) -> BrokenReply:
        return self

    async def __anext__(self) -> bytes:
        if self._chunks:
            return self._chunks.pop(0)
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed = True


def events(dialect: ChatDialect, reply: list[deltas.Delta]) -> list[bytes]:
    writer = CODECS[dialect].make_writer(ReplyContext())
    return [event for delta in reply if (event := writer.write(delta))]


def answer(id: str, *content: deltas.Delta) -> list[deltas.Delta]:
    return [
        deltas.StreamStart(id, "m"),
        *content,
        deltas.Finish("stop"),
        deltas.UsageUpdate(Usage(input=20, output=3)),
        deltas.StreamEnd(),
    ]


def gateway_request(dialect: ChatDialect, settings: GatewaySettings | None = None) -> GatewayRequest:
    body = json.dumps({"model": "m", **ASKED[dialect]}).encode()
    head = ("id", "a", "g", "p", "", dialect, "POST", {}, "", body, "m", True, None)
    return GatewayRequest(*head, NO_OPTIONS, ANONYMOUS, settings or GatewaySettings(), 0.0, 60.0)  # type: ignore[arg-type]


def run_continued_stream(dialect: ChatDialect, *replies: BrokenReply) -> tuple[bytes, GatewayReply, list[str]]:
    """Return the client's bytes, the reply, and the text sent before each continuation."""
    sent_texts: list[str] = []
    rest = list(replies[1:])

    async def find_continuation(sent: str, broken: GatewayReply) -> tuple[GatewayReply, RepetitionFilter] | None:
        sent_texts.append(sent)
        return (rest.pop(0).reply, RepetitionFilter(sent, "")) if rest else None

    call = gateway_request(dialect)

    async def run() -> tuple[bytes, GatewayReply]:
        context = read_reply_context(call.body, dialect, id=call.id)
        reply = ContinuedStream(call, dialect, context, replies[0].reply, find_continuation).reply
        assert not isinstance(reply.body, bytes)
        got = b"".join([chunk async for chunk in reply.body])
        await reply.close()
        return got, reply

    got, reply = asyncio.run(run())
    assert all(each.closed for each in replies[: len(sent_texts) + 1] if each not in rest)
    return got, reply, sent_texts


def is_continuable(call: GatewayRequest) -> bool:
    async def inner(call: GatewayRequest) -> GatewayReply:
        return BrokenReply([]).reply

    return isinstance(asyncio.run(ContinuationLayer(inner, ProviderRegistry()).wrap(inner)(call)).body, ContinuedStream)  # type: ignore[arg-type]


def test_which_streams_are_continued() -> None:
    on = GatewaySettings(continuation=True)
    rule = PatternRule(name="mail", find=("email",), on="prompt")
    guarded = structs.replace(on, guardrails=Guardrails(patterns=(rule,)))
    assert not is_continuable(gateway_request("anthropic")) and is_continuable(gateway_request("anthropic", on))
    assert is_continuable(gateway_request("gemini").with_changes(options=RequestOptions(continuation=True)))
    assert not is_continuable(gateway_request("gemini", on).with_changes(options=RequestOptions(continuation=False)))
    assert not is_continuable(gateway_request("anthropic", guarded)), "guardrails would not see the sent text"
    assert not is_continuable(
        gateway_request("anthropic", on).with_changes(steps=(RequestStep("p", "m", body=b"{}"),))
    ), "the step sends another request"
    assert not is_continuable(gateway_request("openai-chat", on).with_changes(dialect="raw"))
    assert not is_continuable(gateway_request("openai-chat", on).with_changes(stream=False))


@pytest.mark.parametrize(("sent", "prefill"), [("a ", "flag"), ("", ""), (" ", "")])
def test_continuation_at_same_provider(sent: str, prefill: AssistantPrefill) -> None:
    first = [deltas.StreamStart("one", "m"), deltas.ReasoningDelta("hm"), *([deltas.TextDelta(sent)] if sent else [])]
    replies = [
        BrokenReply(events("openai-chat", first), UpstreamBroken("cut")),
        BrokenReply(events("openai-chat", answer("two", deltas.TextDelta("b")))),
    ]
    requests: list[GatewayRequest] = []

    async def attempts(call: GatewayRequest) -> GatewayReply:
        requests.append(call)
        return replies[len(requests) - 1].reply

    async def run() -> bytes:
        call = gateway_request("openai-chat", GatewaySettings(continuation=True)).with_changes(provider="emberline")
        reply = await ContinuationLayer(attempts, ProviderRegistry()).wrap(attempts)(call)
        assert not isinstance(reply.body, bytes)
        return b"".join([chunk async for chunk in reply.body])

    assert text_of(read("openai-chat", asyncio.run(run()))) == sent + "b"
    assert requests[1].prefill == prefill and (requests[1].body == requests[0].body) == (prefill == "")


def read(dialect: ChatDialect, data: bytes) -> list[deltas.Delta]:
    reader = CODECS[dialect].make_reader()
    deltas_read = [
        delta for event in EventSplitter(UpstreamBroken).push(data) for delta in reader.read(read_event_data(event))
    ]
    return [*deltas_read, *reader.end()]


def text_of(reply: list[deltas.Delta]) -> str:
    return "".join(delta.text for delta in reply if isinstance(delta, deltas.TextDelta))


WORDS = [f"word{i} " for i in range(14)]  # more than three broken replies send


def cut_reply(dialect: ChatDialect, sent: int, more: int, restart: bool) -> tuple[BrokenReply, int]:
    """Return a reply that continues after `sent` words, or restarts, and the words sent with it.

    It is cut `more` events after its first word, because a stream is passed on only from its first content.
    """
    begin = 0 if restart else sent
    whole = events(dialect, answer(f"after-{sent}", *map(deltas.TextDelta, WORDS[begin:])))
    first = next(at for at, event in enumerate(whole) if b"word" in event)
    kept = whole[: min(first + 1 + more, len(whole) - 1)]
    reader = CODECS[dialect].make_reader()
    deltas_read = [
        delta
        for event in EventSplitter(UpstreamBroken).push(b"".join(kept))
        for delta in reader.read(read_event_data(event))
    ]
    return BrokenReply(kept, UpstreamBroken("cut")), max(sent, begin + len(text_of(deltas_read).split()))


@given(st.sampled_from(DIALECTS), st.lists(st.integers(0, 3), max_size=3), st.booleans())
@settings(deadline=None, max_examples=150)
def test_continued_stream_is_one_stream(dialect: ChatDialect, cuts: list[int], restart: bool) -> None:
    sent, replies = 0, []
    for more in cuts:
        broken, sent = cut_reply(dialect, sent, more, restart)
        replies.append(broken)
    replies.append(
        BrokenReply(events(dialect, answer("last", *map(deltas.TextDelta, WORDS[0 if restart else sent :]))))
    )
    data, reply, request = run_continued_stream(dialect, *replies)
    deltas_read = read(dialect, data)
    assert text_of(deltas_read) == "".join(WORDS) and len(request) == len(cuts)
    kinds = [type(delta) for delta in deltas_read]
    assert (
        kinds.count(deltas.StreamStart) == kinds.count(deltas.Finish) == kinds.count(deltas.StreamEnd) == 1
        and kinds[-1] is deltas.StreamEnd
    )
    assert reply.ended == "complete" and reply.error == "" and reply.micros == 7 * len(replies)
    assert reply.usage == Usage(input=10 * len(replies), output=5 * len(replies))
    counted = [delta.usage for delta in deltas_read if isinstance(delta, deltas.UsageUpdate)]
    assert counted[-1] == Usage(input=20 + 10 * len(cuts), output=3 + 5 * len(cuts))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_continued_stream_keeps_first_id(dialect: ChatDialect) -> None:
    first = events(dialect, [deltas.StreamStart("one", "m"), deltas.TextDelta("a ")])
    data, reply, request = run_continued_stream(
        dialect,
        BrokenReply(first, UpstreamBroken("cut")),
        BrokenReply(events(dialect, answer("two", deltas.TextDelta("b")))),
    )
    opened = [delta for delta in read(dialect, data) if isinstance(delta, deltas.StreamStart)]
    assert [delta.id for delta in opened] == ["one"] and b"two" not in data
    assert request == ["a "] and reply.continued_by == "p/m" and reply.estimated


@pytest.mark.parametrize("dialect", DIALECTS)
def test_continuation_adds_no_reasoning(dialect: ChatDialect) -> None:
    first = events(dialect, [deltas.StreamStart("one", "m"), deltas.ReasoningDelta("hm"), deltas.TextDelta("a ")])
    second = answer(
        "two", deltas.ReasoningDelta("once more"), deltas.SignatureDelta("s", "anthropic"), deltas.TextDelta("b")
    )
    data, _, request = run_continued_stream(
        dialect, BrokenReply(first, UpstreamBroken("cut")), BrokenReply(events(dialect, second))
    )
    deltas_read = read(dialect, data)
    assert request == ["a "] and text_of(deltas_read) == "a b"
    assert "".join(delta.text for delta in deltas_read if isinstance(delta, deltas.ReasoningDelta)) == "hm"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_continuation_citations_are_dropped(dialect: ChatDialect) -> None:
    """A continuation's citation offsets count from its own start."""
    first = events(dialect, [deltas.StreamStart("one", "m"), deltas.TextDelta("a ")])
    second = answer("two", deltas.TextDelta("b"), deltas.CitationDelta(deltas.Citation("https://x", start=0, end=1)))
    assert b"https://x" in b"".join(events(dialect, second))
    data, _, _ = run_continued_stream(
        dialect, BrokenReply(first, UpstreamBroken("cut")), BrokenReply(events(dialect, second))
    )
    assert text_of(read(dialect, data)) == "a b" and b"https://x" not in data


@pytest.mark.parametrize("dialect", ["openai-chat", "anthropic", "openai-responses"])  # Gemini sends calls in one piece
def test_incomplete_tool_call_is_not_continued(dialect: ChatDialect) -> None:
    half = events(
        dialect,
        [
            deltas.StreamStart("one", "m"),
            deltas.TextDelta("a"),
            deltas.ToolCallStart(0, "c1", "weather"),
            deltas.ToolCallArguments(0, '{"ci'),
        ],
    )
    data, reply, request = run_continued_stream(
        dialect,
        BrokenReply(half, UpstreamBroken("cut")),
        BrokenReply(events(dialect, answer("two", deltas.TextDelta("b")))),
    )
    assert not request and (reply.ended, reply.error) == ("cut", "upstream_broken") and reply.continued_by == ""
    assert b"cut" in data.splitlines()[-2] and sse.DONE_EVENT not in data, "the stream must not look complete"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_continuation_may_call_tools(dialect: ChatDialect) -> None:
    first = events(dialect, [deltas.StreamStart("one", "m"), deltas.TextDelta("I look ")])
    call = answer(
        "two",
        deltas.TextDelta("I look it up"),
        deltas.ToolCallStart(0, "c1", "weather"),
        deltas.ToolCallArguments(0, '{"city":"Paris"}'),
    )
    data, _, _ = run_continued_stream(
        dialect, BrokenReply(first, UpstreamBroken("cut")), BrokenReply(events(dialect, call))
    )
    deltas_read = read(dialect, data)
    assert text_of(deltas_read) == "I look it up"
    assert [delta.name for delta in deltas_read if isinstance(delta, deltas.ToolCallStart)] == ["weather"]
    assert (
        "".join(delta.text for delta in deltas_read if isinstance(delta, deltas.ToolCallArguments))
        == '{"city":"Paris"}'
    )


def test_stream_with_finish_reason_is_completed() -> None:
    done = events("openai-chat", answer("one", deltas.TextDelta("a")))[:-1]
    data, reply, request = run_continued_stream("openai-chat", BrokenReply(done, UpstreamBroken("cut")))
    assert not request and data.endswith(sse.DONE_EVENT) and text_of(read("openai-chat", data)) == "a"
    assert reply.ended == "complete" and reply.continued_by == "ended here" and reply.estimated


def test_stream_without_continuation_ends_with_error() -> None:
    first = events("anthropic", [deltas.StreamStart("one", "m"), deltas.TextDelta("a")])
    data, reply, request = run_continued_stream("anthropic", BrokenReply(first, UpstreamBroken("it was cut")))
    assert request == ["a"] and data.count(b"it was cut") == 1 and b"message_stop" not in data
    assert (reply.ended, reply.error, reply.micros) == ("cut", "upstream_broken", 7)
