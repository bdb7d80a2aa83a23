"""Parsers return a call or raise an InvalidRequest for any body, and nothing else."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.api.anthropic import reply as anthropic_reply
from emberline.api.anthropic import request as anthropic
from emberline.api.responses import request as responses
from emberline.api.responses import stream as responses_stream
from emberline.core.errors import InvalidRequest
from emberline.wire import sse
from emberline.wire.deltas import StreamStart

TOOL = {"name": "f", "description": "d", "strict": True}
MESSAGES = {
    "model": "m", "max_tokens": 2048, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "stop_sequences": ["x"],
    "stream": True, "metadata": {"user_id": "u"}, "service_tier": "auto",
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "5m"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": ""},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "is_error": True, "content": [{"type": "text", "text": "r"}]},
        ]},
    ],
    "tools": [{**TOOL, "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
}  # fmt: skip
RESPONSES = {
    "model": "m", "instructions": "i", "max_output_tokens": 5, "temperature": 0.5, "top_logprobs": 1, "stream": True,
    "input": [
        {"role": "developer", "content": "d"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "r"}]},
    ],
    "tools": [{**TOOL, "type": "function", "parameters": {"type": "object"}}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"},
    "stream_options": {"include_obfuscation": False},
}  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["text", "user"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def damage(draw: st.DrawFn, node: Any) -> Any:
    """Remove, add or replace one value somewhere in the node."""
    inside = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
    if not inside or draw(st.integers(0, 4)) == 0:
        return draw(VALUES)
    key = draw(st.sampled_from(inside))
    match draw(st.sampled_from(["deeper", "deeper", "deeper", "remove", "add"])):
        case "remove":
            del node[key]
        case "add" if isinstance(node, dict):
            node[draw(st.text(max_size=5))] = draw(VALUES)
        case "add":
            node.insert(key, draw(VALUES | st.just(node[key])))
        case _:
            node[key] = damage(draw, node[key])
    return node


@st.composite
def damaged_bodies(draw: st.DrawFn, body: dict[str, Any]) -> bytes:
    text = json.dumps(damage(draw, copy.deepcopy(body)))
    return text.encode("utf-8", "surrogatepass")[: draw(st.none() | st.integers(0, len(text)))]


PROTOCOLS = [
    (anthropic.parse, anthropic_reply.make_writer, MESSAGES),
    (responses.parse, responses_stream.ResponsesReplyWriter, RESPONSES),
]


@pytest.mark.parametrize(("parse", "make_writer", "body"), PROTOCOLS)
def test_undamaged_body_is_valid(parse: Any, make_writer: Any, body: dict[str, Any]) -> None:
    parse(json.dumps(body).encode())


@pytest.mark.parametrize(("parse", "make_writer", "body"), PROTOCOLS)
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_damaged_body_parses_or_is_rejected(
    parse: Any, make_writer: Any, body: dict[str, Any], data: st.DataObject
) -> None:
    try:
        call = parse(data.draw(damaged_bodies(body)))
    except InvalidRequest as error:
        assert error.message
    else:
        assert call.messages
        writer = make_writer(call, "id_1", 0, "fp_1")
        writer.write(StreamStart())
        assert sse.dumps(writer.body())
