"""Replies of a worker with each tool call format, when all markers are special tokens of the tokenizer."""

from __future__ import annotations

import json

import pytest
from scripted_engine import WorkerHarness
from test_truncated_tool_calls import FIRST, PROSE, QUESTION, SECOND, parse_reply, parse_stream

from emberline.api.reasoning import COHERE_THINKING, GEMMA_THOUGHT, HARMONY_ANALYSIS, THINK, ReasoningStyle
from emberline.api.tool_styles.registry import TOOL_STYLES
from emberline.api.tool_styles.style import ToolStyle

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
REQUEST = {
    "model": "m",
    "messages": QUESTION,
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
}
REASONING = {"cohere": COHERE_THINKING, "gemma4": GEMMA_THOUGHT, "harmony": HARMONY_ANALYSIS}


def make_server(style: ToolStyle, reasoning: ReasoningStyle) -> WorkerHarness:
    before, after = reasoning.answer_frame
    prose = "" if style.markerless_starts else before + PROSE + after
    if style.uses_channels:
        prose = f"<|channel|>commentary<|message|>{PROSE}<|end|><|start|>assistant"
    calls = style.format_calls([FIRST, SECOND] if style.allows_several_calls else [FIRST])
    reply = f"{reasoning.begin}Hm.{reasoning.end}{prose}{calls}"
    markers = dict.fromkeys((*style.markers, *reasoning.markers))
    return WorkerHarness(lambda so_far, index: so_far + reply, style, reasoning=reasoning, special_tokens=list(markers))


@pytest.mark.parametrize("style", TOOL_STYLES.values(), ids=lambda style: style.name)
def test_markers_reach_the_parser(style: ToolStyle) -> None:
    server = make_server(style, REASONING.get(style.name, THINK))
    whole = server.post("/v1/chat/completions", REQUEST).json
    message = whole["choices"][0]["message"]
    parsed = parse_reply("openai-chat", whole)
    assert message["reasoning_content"] == "Hm."
    assert parsed.text.strip() == ("" if style.markerless_starts else PROSE.strip()) and parsed.reason == "tool_calls"
    expected = [FIRST, SECOND] if style.allows_several_calls else [FIRST]
    assert [(name, json.loads(args)) for _, name, args in parsed.calls] == [(n, json.loads(a)) for n, a in expected]
    (streamed,) = parse_stream("openai-chat", server.post("/v1/chat/completions", REQUEST | {"stream": True}).body)
    assert [call[1:] for call in streamed.calls] == [call[1:] for call in parsed.calls]
    assert streamed.text == parsed.text and streamed.reason == "tool_calls"


def test_calls_without_markers_are_calls_unless_a_grammar_binds_the_output() -> None:
    name, arguments = FIRST
    reply = f'{{"name": "{name}", "arguments": {arguments}}}'
    server = WorkerHarness(lambda so_far, index: so_far + reply, TOOL_STYLES["hermes"])
    free = parse_reply("openai-chat", server.post("/v1/chat/completions", REQUEST).json)
    assert [tuple(call[1:]) for call in free.calls] == [FIRST] and free.text == "" and free.reason == "tool_calls"
    strict = {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}}
    for bound in ({"tools": [strict]}, {"parallel_tool_calls": False}):
        message = server.post("/v1/chat/completions", REQUEST | bound).json["choices"][0]["message"]
        assert message["content"] == reply and not message.get("tool_calls")
