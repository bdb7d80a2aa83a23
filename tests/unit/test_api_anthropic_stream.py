"""Replies in Anthropic's protocol: golden bytes, and the results of the official client."""

from __future__ import annotations

import json
from typing import Any

import anthropic as vendor
import goldens
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from replies import Answering, events, play, replies

from emberline.api.anthropic import reply as anthropic_reply
from emberline.api.anthropic import request as anthropic
from emberline.core.errors import EngineFailed, Overloaded
from emberline.wire import sse
from emberline.wire.anthropic import AnthropicWriter
from emberline.wire.deltas import (
    Delta,
    Finish,
    ReasoningDelta,
    ReplyStart,
    StreamStart,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    UsageUpdate,
)
from emberline.wire.usage import Usage

EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
ASKED: dict[str, Any] = {"model": "m", "max_tokens": 2048, "messages": [{"role": "user", "content": "hi"}]}
REPLY: list[Delta] = [
    ReplyStart(9, 4),
    ReasoningDelta("hm"),
    ReasoningDelta("m"),
    TextDelta("Hé"),
    TextDelta(""),
    TextDelta("llo"),
    ToolCallStart(0, "toolu_1", "weather"),
    ToolCallArguments(0, '{"city":'),
    ToolCallArguments(0, '"Oslo"}'),
    ToolCallStart(1, "toolu_2", "time"),
    ToolCallArguments(1, "{}"),
    Finish("tool_calls"),
    UsageUpdate(Usage(input=9, output=20, cached_read=4, reasoning=2)),
]
SERVER = Answering(anthropic.parse, anthropic_reply.make_writer, "msg_1")
CLIENT = vendor.Anthropic(api_key="none", base_url="http://test", http_client=SERVER.http)


def make_writer(**fields: Any) -> AnthropicWriter:
    call = anthropic.parse(json.dumps({**ASKED, **fields}).encode())
    return anthropic_reply.make_writer(call, "msg_1", 1700000000, "fp_1")


def plain_reply(deltas: list[Delta], **fields: Any) -> dict[str, Any]:
    reply = make_writer(**fields)
    play(reply, deltas)
    return reply.body()


def test_golden_replies() -> None:
    goldens.check("anthropic_stream.sse", play(make_writer(stream=True), REPLY))
    goldens.check("anthropic_body.json", sse.dumps(plain_reply(REPLY)))


def test_event_order() -> None:
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thinking = [block[0], block[1], block[1], block[1], block[2]]  # two pieces and the signature
    two_pieces = [block[0], block[1], block[1], block[2]]
    assert [event["type"] for event in events(play(make_writer(stream=True), REPLY))] == [
        "message_start", *thinking, *two_pieces, *two_pieces, *block, "message_delta", "message_stop"
    ]  # fmt: skip


def test_message_start_has_prompt_tokens() -> None:
    writer = make_writer(stream=True)
    start = writer.write(StreamStart()) + writer.write(ReplyStart(9, 4))
    usage = events(start)[0]["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (5, 4, 0)
    assert plain_reply(REPLY)["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 20,
        "output_tokens_details": {"thinking_tokens": 2},
        "service_tier": "standard",
    }


ENDINGS = [
    (Finish("stop"), "end_turn", None),
    (Finish("stop", "END"), "stop_sequence", "END"),
    (Finish("length"), "max_tokens", None),
    (Finish("tool_calls"), "tool_use", None),
    (Finish("tool_calls", "END"), "tool_use", None),
    (Finish("abort"), "pause_turn", None),
]


@pytest.mark.parametrize(("finish", "reason", "sequence"), ENDINGS)
def test_stop_reasons(finish: Finish, reason: str, sequence: str | None) -> None:
    deltas: list[Delta] = [ReplyStart(1), TextDelta("a"), finish, UsageUpdate(Usage(input=1, output=1))]
    body = plain_reply(deltas)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    [end] = [event for event in events(play(make_writer(stream=True), deltas)) if event["type"] == "message_delta"]
    assert end["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_empty_output() -> None:
    deltas: list[Delta] = [ReplyStart(1), Finish("stop"), UsageUpdate(Usage(input=1, output=1))]
    assert plain_reply(deltas)["content"] == []
    assert [e["type"] for e in events(play(make_writer(stream=True), deltas))] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]


def test_omitted_thinking() -> None:
    body = plain_reply(REPLY, thinking={"type": "adaptive", "display": "omitted"})
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert body["content"][0]["thinking"] == ""
    given_back = [*ASKED["messages"], {"role": "assistant", "content": body["content"][:2]}]
    assert anthropic.parse(json.dumps({**ASKED, "messages": given_back}).encode()).messages[-1]["content"] == "Héllo"


@pytest.mark.parametrize("cut", ['{"city":', "[1]", "", '{"a":' * 100_000])
def test_incomplete_arguments_become_empty_object(cut: str) -> None:
    deltas: list[Delta] = [
        ReplyStart(1),
        ToolCallStart(0, "toolu_1", "t"),
        ToolCallArguments(0, cut),
        Finish("length"),
    ]
    assert plain_reply([*deltas, UsageUpdate(Usage(input=1, output=1))])["content"][0]["input"] == {}


def test_failed_stream_ends_with_error_event() -> None:
    reply = make_writer(stream=True)
    for delta in (StreamStart(), *REPLY[:3]):
        reply.write(delta)
    [event] = events(reply.write_error(EngineFailed("the engine died")))
    assert event == {"type": "error", "error": {"type": "api_error", "message": "the engine died"}}
    [event] = events(make_writer(stream=True).write_error(Overloaded("full")))
    assert event["error"]["type"] == "rate_limit_error"
    [event] = events(make_writer(stream=True).write_error(KeyError("secret")))
    assert "secret" not in json.dumps(event)


@settings(deadline=None, max_examples=50)
@given(replies(), st.booleans())
def test_official_client_accumulates_stream_to_plain_reply(deltas: list[Delta], omit: bool) -> None:
    SERVER.deltas = deltas
    request = {**ASKED, "thinking": {"type": "adaptive", "display": "omitted" if omit else "summarized"}}
    message = CLIENT.messages.create(**request)
    with CLIENT.messages.stream(**request) as stream:
        folded = stream.get_final_message()
    assert Message.model_validate(folded.to_dict()) == message
    for event in events(play(make_writer(stream=True), deltas)):
        EVENT.validate_python(event)


def test_conversation_with_official_client() -> None:
    SERVER.deltas = REPLY
    with CLIENT.messages.stream(**ASKED) as stream:
        reply = stream.get_final_message()
    results = [{"type": "tool_result", "tool_use_id": f"toolu_{i}", "content": "5"} for i in (1, 2)]
    history: list[Any] = [*ASKED["messages"], reply.to_param(), {"role": "user", "content": results}]
    CLIENT.messages.create(**{**ASKED, "messages": history})
    assert [message["role"] for message in SERVER.calls[-1].messages] == ["user", "assistant", "tool", "tool"]
    assert SERVER.calls[-1].messages[1]["reasoning_content"] == "hmm"
