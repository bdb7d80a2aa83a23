"""Replies of the Responses API: golden bytes, and the results of the official client."""

from __future__ import annotations

import json
import math
from typing import Any

import goldens
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from replies import Answering, events, play, replies, token

from emberline.api.responses import request as responses
from emberline.api.responses import stream as responses_stream
from emberline.core.errors import EngineFailed, InvalidRequest, Overloaded
from emberline.wire import deltas, sse
from emberline.wire.usage import Usage

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
TOOL: Any = {"type": "function", "name": "tool", "parameters": {"type": "object"}, "strict": False}
REPLY: list[deltas.Delta] = [
    deltas.ReplyStart(9, 4),
    deltas.ReasoningDelta("hm"),
    deltas.ReasoningDelta("m"),
    deltas.TextDelta("Hé", 0, [token("Hé", -0.25, [token("Hé", -0.25), token("Hi", -math.inf)])]),
    deltas.TextDelta(""),
    deltas.TextDelta("llo", 0, [token("llo")]),
    deltas.ToolCallStart(0, "call_1", "tool"),
    deltas.ToolCallArguments(0, '{"city":'),
    deltas.ToolCallArguments(0, '"Oslo"}'),
    deltas.Finish("tool_calls"),
    deltas.UsageUpdate(Usage(input=9, output=20, cached_read=4, reasoning=2)),
]
SERVER = Answering(responses.parse, responses_stream.ResponsesReplyWriter, "resp_1")
CLIENT = openai.OpenAI(api_key="none", base_url="http://test", http_client=SERVER.http)


def make_writer(**fields: Any) -> responses_stream.ResponsesReplyWriter:
    call = responses.parse(json.dumps({"model": "m", "input": "hi", **fields}).encode())
    return responses_stream.ResponsesReplyWriter(call, "resp_1", 1700000000, "fp_1")


def plain_reply(sent: list[deltas.Delta], **fields: Any) -> dict[str, Any]:
    reply = make_writer(**fields)
    assert play(reply, sent) == b""
    return reply.body()


def test_golden_replies() -> None:
    options = {"top_logprobs": 2, "tools": [TOOL], "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}}
    goldens.check("responses_stream.sse", play(make_writer(stream=True, **options), REPLY))
    goldens.check("responses_body.json", sse.dumps(plain_reply(REPLY, **options)))


def test_event_order() -> None:
    added, part = "output_item.added", "content_part.added"
    part_done, done = "content_part.done", "output_item.done"
    got = events(play(make_writer(stream=True), REPLY))
    assert [event["type"].removeprefix("response.") for event in got] == [
        "created", "in_progress",
        added, part, "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", part_done, done,
        added, part, "output_text.delta", "output_text.delta", "output_text.done", part_done, done,
        added, *["function_call_arguments.delta"] * 2, "function_call_arguments.done", done,
        "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in got] == list(range(len(got)))


def test_usage() -> None:
    assert plain_reply(REPLY)["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 20,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 29,
    }


ENDINGS = [
    (deltas.Finish("stop"), "completed", None),
    (deltas.Finish("stop", "END"), "completed", None),
    (deltas.Finish("tool_calls"), "completed", None),
    (deltas.Finish("length"), "incomplete", {"reason": "max_output_tokens"}),
    (deltas.Finish("abort"), "incomplete", None),
]


@pytest.mark.parametrize(("finish", "status", "details"), ENDINGS)
def test_final_status(finish: deltas.Finish, status: str, details: dict[str, str] | None) -> None:
    sent: list[deltas.Delta] = [
        deltas.ReplyStart(1),
        deltas.ReasoningDelta("a"),
        deltas.TextDelta("b"),
        finish,
        deltas.UsageUpdate(Usage(input=1, output=1)),
    ]
    body = plain_reply(sent)
    assert (body["status"], body["incomplete_details"]) == (status, details)
    assert [item["status"] for item in body["output"]] == ["completed", status]
    last = events(play(make_writer(stream=True), sent))[-1]
    assert (last["type"], last["response"]) == (f"response.{status}", body)


def test_empty_output() -> None:
    body = plain_reply([deltas.ReplyStart(1), deltas.Finish("stop"), deltas.UsageUpdate(Usage(input=1, output=0))])
    assert (body["status"], body["output"]) == ("completed", [])


def test_logprobs_of_token_without_text_are_kept() -> None:
    half = deltas.TextDelta("", 0, [token("\ufffd")])
    rest: list[deltas.Delta] = [
        deltas.TextDelta("é", 0, [token("é")]),
        deltas.Finish("stop"),
        deltas.UsageUpdate(Usage(input=1, output=2)),
    ]
    [item] = plain_reply([deltas.ReplyStart(1), half, *rest], top_logprobs=1)["output"]
    assert [entry["token"] for entry in item["content"][0]["logprobs"]] == ["\ufffd", "é"]


def test_encrypted_reasoning_round_trip() -> None:
    [reasoning, *_] = plain_reply(REPLY, include=["reasoning.encrypted_content"])["output"]
    given_back = {
        "type": "reasoning",
        "id": reasoning["id"],
        "summary": [],
        "encrypted_content": reasoning["encrypted_content"],
    }
    body = {"model": "m", "input": [given_back, {"role": "assistant", "content": "x"}]}
    assert responses.parse(json.dumps(body).encode()).messages[0]["reasoning_content"] == "hmm"
    assert plain_reply(REPLY)["output"][0]["encrypted_content"] is None


FAULTS = [
    (EngineFailed("the engine died"), "server_error", "the engine died"),
    (Overloaded("full", hint="wait"), "rate_limit_exceeded", "full (hint: wait)"),
    (InvalidRequest("no", param="input"), "invalid_prompt", "no"),
]


@pytest.mark.parametrize(("error", "code", "message"), FAULTS)
def test_failed_stream_ends_with_response_failed(error: Exception, code: str, message: str) -> None:
    reply = make_writer(stream=True)
    reply.write(deltas.StreamStart())
    for delta in REPLY[:5]:
        reply.write(delta)
    [event] = events(reply.write_error(error))
    EVENT.validate_python(event)
    assert event["type"] == "response.failed"
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"] == {"code": code, "message": message}
    assert [item["status"] for item in event["response"]["output"]] == ["completed", "incomplete"]


def test_internal_error_has_no_details() -> None:
    assert b"secret" not in make_writer(stream=True).write_error(KeyError("secret"))


@settings(deadline=None, max_examples=50)
@given(replies(), st.booleans())
def test_official_client_accumulates_stream_to_plain_reply(sent: list[deltas.Delta], sealed: bool) -> None:
    SERVER.deltas = sent
    options: dict[str, Any] = {"model": "m", "input": "hi", "tools": [TOOL], "top_logprobs": 1}
    if sealed:
        options["include"] = ["reasoning.encrypted_content"]
    response = CLIENT.responses.create(**options)
    Response.model_validate(response.to_dict())
    got = list(CLIENT.responses.create(**options, stream=True))
    for event in got:
        EVENT.validate_python(event.to_dict())
    assert got[-1].type in ("response.completed", "response.incomplete")
    assert got[-1].response == response
    assert fold([event.to_dict() for event in got]) == [item.to_dict() for item in response.output]


def fold(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Build the output from the deltas and check it against every done event."""
    output: list[dict[str, Any]] = []
    for event in stream:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(output)
                output.append(event["item"])
            case "content_part.added":
                output[-1]["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                part = output[-1]["content"][event["content_index"]]
                part["text"] += event["delta"]
                part.get("logprobs", []).extend(event.get("logprobs", []))
            case "function_call_arguments.delta":
                output[-1]["arguments"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == output[-1]["content"][-1]["text"]
            case "content_part.done":
                assert event["part"] == output[-1]["content"][-1]
            case "function_call_arguments.done":
                assert event["arguments"] == output[-1]["arguments"]
            case "output_item.done":
                settled = ("status", "encrypted_content")
                output[-1] |= {key: event["item"][key] for key in settled if key in event["item"]}
                assert event["item"] == output[-1]
    return output


def test_conversation_with_official_client() -> None:
    SERVER.deltas = REPLY
    with CLIENT.responses.stream(model="m", input="hi", tools=[TOOL], top_logprobs=2) as stream:
        reply = stream.get_final_response()
    assert reply.output_text == "Héllo"
    result = {"type": "function_call_output", "call_id": "call_1", "output": "5"}
    history: Any = [{"role": "user", "content": "hi"}, *reply.output, result]
    CLIENT.responses.create(model="m", input=history, tools=[TOOL])
    assert [message["role"] for message in SERVER.calls[-1].messages] == ["user", "assistant", "tool"]
    assert SERVER.calls[-1].messages[1]["reasoning_content"] == "hmm"
