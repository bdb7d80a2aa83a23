"""Tool calls at the token limit, in every tool style, wire format and translation.

A complete call appears once, a truncated one with the arguments so far, and neither appears in the text.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted_engine import WorkerHarness

from emberline.api.tool_styles.registry import HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS
from emberline.api.tool_styles.style import ToolStyle
from emberline.gateway.dialects.translate import ReplyContext, StreamTranslator, translate_reply
from emberline.wire.deltas import ChatDialect

PROSE = "Let me see. "
FIRST, SECOND = ("weather", '{"city": "Oslo"}'), ("weather", '{"city": "Rome"}')
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
QUESTION = [{"role": "user", "content": "why"}]
DIALECTS: list[ChatDialect] = ["openai-chat", "anthropic", "openai-responses"]
REQUESTS: dict[ChatDialect, tuple[str, str, dict[str, Any]]] = {  # path, field of the token limit, body
    "openai-chat": (
        "/v1/chat/completions",
        "max_tokens",
        {"messages": QUESTION, "tools": [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]},
    ),
    "anthropic": (
        "/v1/messages",
        "max_tokens",
        {"messages": QUESTION, "tools": [{"name": "weather", "input_schema": WEATHER}]},
    ),
    "openai-responses": (
        "/v1/responses",
        "max_output_tokens",
        {"input": "why", "tools": [{"type": "function", "name": "weather", "parameters": WEATHER}]},
    ),
}
STYLES = [HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS]


def reply_text(style: ToolStyle) -> str:
    """Return the model's output: prose and two calls of the same tool."""
    return PROSE + (style.begin if style.markerless_starts else "") + style.format_calls([FIRST, SECOND])


@dataclass
class ParsedReply:
    """A reply as a client reads it."""

    text: str = ""
    calls: list[list[str]] = field(default_factory=list)  # id, name, arguments
    reason: str | None = None


def parse_reply(dialect: ChatDialect, reply: dict[str, Any]) -> ParsedReply:
    parsed = ParsedReply()
    match dialect:
        case "openai-chat":
            (choice,) = reply["choices"]
            parsed.text, parsed.reason = choice["message"]["content"] or "", choice["finish_reason"]
            for call in choice["message"].get("tool_calls") or ():
                parsed.calls.append([call["id"], call["function"]["name"], call["function"]["arguments"]])
        case "anthropic":
            parsed.reason = reply["stop_reason"]
            for block in reply["content"]:
                if block["type"] == "tool_use":
                    parsed.calls.append([block["id"], block["name"], json.dumps(block["input"])])
                else:
                    parsed.text += block["text"]
        case _:
            parsed.reason = (reply["incomplete_details"] or {}).get("reason")
            for item in reply["output"]:
                if item["type"] == "function_call":
                    parsed.calls.append([item["call_id"], item["name"], item["arguments"]])
                elif item["type"] == "message":
                    parsed.text += "".join(part["text"] for part in item["content"])
    return parsed


def parse_stream(dialect: ChatDialect, stream: bytes) -> list[ParsedReply]:
    """Return the parsed choices, ordered by index."""
    parsed: dict[int, ParsedReply] = {}
    blocks: dict[int, list[str]] = {}
    for line in stream.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if dialect == "openai-chat":
            for choice in event["choices"]:
                one = parsed.setdefault(choice["index"], ParsedReply())
                one.text += choice["delta"].get("content") or ""
                one.reason = choice.get("finish_reason") or one.reason
                for piece in choice["delta"].get("tool_calls") or ():
                    if piece["index"] == len(one.calls):
                        one.calls.append([piece["id"], piece["function"]["name"], ""])
                    one.calls[piece["index"]][2] += piece["function"].get("arguments") or ""
            continue
        one = parsed.setdefault(0, ParsedReply())
        match event["type"]:
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                blocks[event["index"]] = [event["content_block"]["id"], event["content_block"]["name"], ""]
                one.calls.append(blocks[event["index"]])
            case "content_block_delta":
                one.text += event["delta"].get("text", "")
                if "partial_json" in event["delta"]:
                    blocks[event["index"]][2] += event["delta"]["partial_json"]
            case "message_delta":
                one.reason = event["delta"]["stop_reason"]
            case "response.output_text.delta":
                one.text += event["delta"]
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                item = event["item"]
                blocks[event["output_index"]] = [item["call_id"], item["name"], ""]
                one.calls.append(blocks[event["output_index"]])
            case "response.function_call_arguments.delta":
                blocks[event["output_index"]][2] += event["delta"]
            case "response.completed" | "response.incomplete":
                last = parse_reply("openai-responses", event["response"])
                assert last.calls == one.calls and last.text == one.text, "the closing event repeats what was streamed"
                one.reason = last.reason
    return [parsed[index] for index in sorted(parsed)]


def check_reply(parsed: ParsedReply, end: int, style: ToolStyle) -> None:
    """Check a reply that was truncated after `end` bytes."""
    reply = reply_text(style)
    begun = reply.index(FIRST[1]), reply.index(SECOND[1])
    assert PROSE.startswith(parsed.text.rstrip()) or end < begun[0], "the text is only prose"
    if end >= begun[0]:
        assert parsed.text.rstrip() == PROSE.rstrip() and parsed.reason in ("length", "max_tokens", "max_output_tokens")
    ids = [id_ for id_, _, _ in parsed.calls]
    assert len(set(ids)) == len(ids) <= sum(at < end for at in begun), "no call is repeated"
    for (_, name, arguments), (expected, complete), at in zip(parsed.calls, (FIRST, SECOND), begun, strict=False):
        assert name == expected
        if end >= at + len(complete):
            assert json.loads(arguments) == json.loads(complete)
        else:
            assert complete.startswith(arguments) or arguments == "{}"
    assert end <= begun[0] + len(FIRST[1]) or parsed.calls, "a complete call is present"


def cut_positions(style: ToolStyle) -> list[int]:
    """Return positions around the starts and ends of calls and arguments; the last is the full length."""
    reply = reply_text(style)
    places = {len(PROSE) + 5, len(reply)}
    for _, arguments in (FIRST, SECOND):
        at = reply.index(arguments)
        places |= {at, at + len(arguments), at + len(arguments + style.tail)}
    near = {place + by for place in places for by in (-1, 0, 1)}
    return sorted(at for at in near | set(range(len(PROSE), len(reply), 11)) if len(PROSE) < at <= len(reply))


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_tool_calls_at_token_limit(dialect: ChatDialect, style: ToolStyle) -> None:
    server = WorkerHarness(lambda before, index: before + reply_text(style), style)
    path, limit, body = REQUESTS[dialect]
    for end in cut_positions(style):
        request = {"model": "m", limit: end, **body}
        stream = server.post(path, request | {"stream": True}).body
        (one,) = parse_stream(dialect, stream)
        check_reply(one, end, style)
        check_reply(parse_reply(dialect, server.post(path, request).json), end, style)


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_tool_calls_of_several_choices_at_token_limit(style: ToolStyle) -> None:
    server = WorkerHarness(lambda before, index: before + reply_text(style), style)
    path, limit, body = REQUESTS["openai-chat"]
    for end in cut_positions(style)[::4]:
        request = {"model": "m", limit: end, "n": 2, **body}
        several = parse_stream("openai-chat", server.post(path, request | {"stream": True}).body)
        assert len(several) == 2 and len({id_ for one in several for id_, _, _ in one.calls}) == sum(
            len(one.calls) for one in several
        )
        for one in several:
            check_reply(one, end, style)


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(DIALECTS, 2)))
def test_tool_calls_at_token_limit_are_translated(source: ChatDialect, target: ChatDialect) -> None:
    server = WorkerHarness(lambda before, index: before + reply_text(HERMES), HERMES)
    path, limit, body = REQUESTS[source]
    to = ReplyContext(model="m", created=1700000000, id="made-1")
    for end in cut_positions(HERMES)[::2]:
        request = {"model": "m", limit: end, **body}
        translator = StreamTranslator(source, target, to)
        translated = translator.push(server.post(path, request | {"stream": True}).body) + translator.end()
        (one,) = parse_stream(target, translated)
        check_reply(one, end, HERMES)
        reply, _ = translate_reply(server.post(path, request).body, source, target, to)
        check_reply(parse_reply(target, json.loads(reply)), end, HERMES)
