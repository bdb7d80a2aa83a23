"""Tool calls at the token limit: a complete call is there once, one that was cut is there with what came of it, and
nothing of either is text. In every style, protocol and translation, streamed or not."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted_engine import House

from emberline.api.toolstyle import HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, ToolStyle
from emberline.gateway.dialects.inner import Spoken
from emberline.gateway.dialects.translate import Asked, StreamTranslator, translate_reply

PROSE = "Let me see. "
FIRST, SECOND = ("weather", '{"city": "Oslo"}'), ("weather", '{"city": "Rome"}')
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
QUESTION = [{"role": "user", "content": "why"}]
DIALECTS: list[Spoken] = ["openai-chat", "anthropic", "openai-responses"]
ASKS: dict[Spoken, tuple[str, str, dict[str, Any]]] = {  # path, name of the limit, body
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


def written(style: ToolStyle) -> str:
    """The reply: prose, where the style allows it, and two calls to the same tool."""
    calls = [style.head % name + arguments + style.tail for name, arguments in (FIRST, SECOND)]
    if style.listed is None:
        return PROSE + style.joint.join(style.begin + call for call in calls)
    return PROSE + style.begin + style.listed[0] + style.joint.join(calls) + style.listed[1]


@dataclass
class Heard:
    """What a client makes of a reply."""

    text: str = ""
    calls: list[list[str]] = field(default_factory=list)  # id, name, arguments
    reason: str | None = None


def whole(dialect: Spoken, reply: dict[str, Any]) -> Heard:
    heard = Heard()
    match dialect:
        case "openai-chat":
            (choice,) = reply["choices"]
            heard.text, heard.reason = choice["message"]["content"] or "", choice["finish_reason"]
            for call in choice["message"].get("tool_calls") or ():
                heard.calls.append([call["id"], call["function"]["name"], call["function"]["arguments"]])
        case "anthropic":
            heard.reason = reply["stop_reason"]
            for block in reply["content"]:
                if block["type"] == "tool_use":
                    heard.calls.append([block["id"], block["name"], json.dumps(block["input"])])
                else:
                    heard.text += block["text"]
        case _:
            heard.reason = (reply["incomplete_details"] or {}).get("reason")
            for item in reply["output"]:
                if item["type"] == "function_call":
                    heard.calls.append([item["call_id"], item["name"], item["arguments"]])
                elif item["type"] == "message":
                    heard.text += "".join(part["text"] for part in item["content"])
    return heard


def streamed(dialect: Spoken, stream: bytes) -> list[Heard]:
    """By choice."""
    heard: dict[int, Heard] = {}
    blocks: dict[int, list[str]] = {}
    for line in stream.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if dialect == "openai-chat":
            for choice in event["choices"]:
                one = heard.setdefault(choice["index"], Heard())
                one.text += choice["delta"].get("content") or ""
                one.reason = choice.get("finish_reason") or one.reason
                for piece in choice["delta"].get("tool_calls") or ():
                    if piece["index"] == len(one.calls):
                        one.calls.append([piece["id"], piece["function"]["name"], ""])
                    one.calls[piece["index"]][2] += piece["function"].get("arguments") or ""
            continue
        one = heard.setdefault(0, Heard())
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
                last = whole("openai-responses", event["response"])
                assert last.calls == one.calls and last.text == one.text, "the closing event repeats what was streamed"
                one.reason = last.reason
    return [heard[index] for index in sorted(heard)]


def is_right(heard: Heard, end: int, style: ToolStyle) -> None:
    """Of the first `end` bytes of the reply."""
    reply = written(style)
    begun = reply.index(FIRST[1]), reply.index(SECOND[1])
    assert PROSE.startswith(heard.text.rstrip()) or end < begun[0], "text is prose alone"
    if end >= begun[0]:
        assert heard.text.rstrip() == PROSE.rstrip() and heard.reason in ("length", "max_tokens", "max_output_tokens")
    ids = [id_ for id_, _, _ in heard.calls]
    assert len(set(ids)) == len(ids) <= sum(at < end for at in begun), "no call is repeated"
    for (_, name, arguments), (expected, complete), at in zip(heard.calls, (FIRST, SECOND), begun, strict=False):
        assert name == expected
        if end >= at + len(complete):
            assert json.loads(arguments) == json.loads(complete)
        else:
            assert complete.startswith(arguments) or arguments == "{}"
    assert end <= begun[0] + len(FIRST[1]) or heard.calls, "a complete call is there"


def cuts(style: ToolStyle) -> list[int]:
    """Around every place where arguments or a call begin or end, and some others; the last is the whole reply."""
    reply = written(style)
    places = {len(PROSE) + 5, len(reply)}
    for _, arguments in (FIRST, SECOND):
        at = reply.index(arguments)
        places |= {at, at + len(arguments), at + len(arguments + style.tail)}
    near = {place + by for place in places for by in (-1, 0, 1)}
    return sorted(at for at in near | set(range(len(PROSE), len(reply), 11)) if len(PROSE) < at <= len(reply))


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_calls_at_the_limit(dialect: Spoken, style: ToolStyle) -> None:
    house = House(lambda before, index: before + written(style), style)
    path, limit, body = ASKS[dialect]
    for end in cuts(style):
        asked = {"model": "m", limit: end, **body}
        stream = house.post(path, asked | {"stream": True}).body
        (one,) = streamed(dialect, stream)
        is_right(one, end, style)
        is_right(whole(dialect, house.post(path, asked).json), end, style)


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_calls_of_several_choices(style: ToolStyle) -> None:
    house = House(lambda before, index: before + written(style), style)
    path, limit, body = ASKS["openai-chat"]
    for end in cuts(style)[::4]:
        asked = {"model": "m", limit: end, "n": 2, **body}
        several = streamed("openai-chat", house.post(path, asked | {"stream": True}).body)
        assert len(several) == 2 and len({id_ for one in several for id_, _, _ in one.calls}) == sum(
            len(one.calls) for one in several
        )
        for one in several:
            is_right(one, end, style)


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(DIALECTS, 2)))
def test_calls_at_the_limit_are_translated_as_they_are(source: Spoken, target: Spoken) -> None:
    house = House(lambda before, index: before + written(HERMES), HERMES)
    path, limit, body = ASKS[source]
    to = Asked(model="m", created=1700000000, id="made-1")
    for end in cuts(HERMES)[::2]:
        asked = {"model": "m", limit: end, **body}
        translator = StreamTranslator(source, target, to)
        made = translator.push(house.post(path, asked | {"stream": True}).body) + translator.end()
        (one,) = streamed(target, made)
        is_right(one, end, HERMES)
        reply, _ = translate_reply(house.post(path, asked).body, source, target, to)
        is_right(whole(target, json.loads(reply)), end, HERMES)
