"""Responses requests: valid bodies become calls, invalid ones a 400 that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_engine import WorkerHarness

from emberline.api.call import Tool, ToolChoice
from emberline.api.responses.items import encode_reasoning
from emberline.api.responses.request import ResponsesCall, ResponsesRequest, parse
from emberline.core.errors import InvalidRequest
from emberline.core.params import GrammarSpec
from emberline.core.request import Priority

USER = {"role": "user", "content": "hi"}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}
TIME = {"type": "function", "name": "time", "parameters": None, "strict": True, "description": "d"}
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}


def parse_request(**fields: Any) -> ResponsesCall:
    return parse(json.dumps({"model": "m", "input": "hi", **fields}).encode())


def rejection(body: dict[str, Any] | bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value


def test_minimal_request() -> None:
    call = parse_request()
    assert (call.common.model, call.messages, call.stream) == ("m", [USER], False)
    assert (call.params.max_tokens, call.params.temperature, call.params.logprobs) == (None, 1.0, None)
    assert (call.adds_generation_prompt, call.continues_last_message, call.parallel_tool_calls) == (True, False, True)
    assert call.template_args == {}


def test_null_equals_absent() -> None:
    optional = {name: None for name in ResponsesRequest.__struct_fields__ if name not in ("model", "input")}
    assert parse_request(**optional) == parse_request()


SCHEMA = {"type": "object", "maximum": 10**30}
PARAMS = [
    ({"temperature": 0}, "temperature", 0.0),
    ({"top_p": 0.5}, "top_p", 0.5),
    ({"max_output_tokens": 9}, "max_tokens", 9),
    ({"include": ["message.output_text.logprobs"]}, "logprobs", 0),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, "logprobs", 3),
    ({"top_logprobs": 3}, "logprobs", 3),
    ({"top_logprobs": 0}, "logprobs", None),
    ({"text": {"format": {"type": "text"}}}, "grammar", None),
    ({"text": {"format": {"type": "json_object"}}}, "grammar", GrammarSpec("json_object")),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
        "grammar",
        GrammarSpec("json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
    ),
    ({"structured_outputs": {"regex": "a+"}}, "grammar", GrammarSpec("regex", "a+")),
    ({"top_k": 5}, "top_k", 5),
    ({"seed": 5}, "seed", 5),
    ({"stop": "x"}, "stop", ("x",)),
]


@pytest.mark.parametrize(("fields", "name", "expected"), PARAMS)
def test_sampling_fields(fields: dict[str, Any], name: str, expected: Any) -> None:
    assert getattr(parse_request(**fields).params, name) == expected


CALLS = [
    ({"stream": True}, "stream", True),
    ({"stream": True, "stream_options": {"include_obfuscation": False}}, "stream", True),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", False),
    ({"reasoning": {"effort": "none"}}, "template_args", {"reasoning_effort": "none", "enable_thinking": False}),
    ({"reasoning": {"effort": "low"}}, "template_args", {"reasoning_effort": "low", "enable_thinking": True}),
    ({"reasoning": {"summary": "auto"}}, "template_args", {}),
    ({"chat_template_kwargs": {"a": 1}}, "template_args", {"a": 1}),
    ({"include": ["reasoning.encrypted_content"]}, "includes_encrypted_reasoning", True),
    ({"include": []}, "includes_encrypted_reasoning", False),
    ({"add_special_tokens": True}, "add_special_tokens", True),
    ({"tools": [WEATHER]}, "tool_choice", ToolChoice("auto")),
    ({"tools": [WEATHER], "tool_choice": "none"}, "tool_choice", ToolChoice("none")),
    ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice", ToolChoice("required")),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}},
        "tool_choice",
        ToolChoice("named", "weather"),
    ),
    ({"tools": [WEATHER]}, "tools", [Tool("weather", "", {"type": "object"})]),
    ({"tools": [TIME]}, "tools", [Tool("time", "d", {}, strict=True)]),
]


@pytest.mark.parametrize(("fields", "name", "expected"), CALLS)
def test_call_fields(fields: dict[str, Any], name: str, expected: Any) -> None:
    assert getattr(parse_request(**fields), name) == expected


def test_allowed_tools_restrict_the_tools() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]}
    call = parse_request(tools=[WEATHER, TIME], tool_choice=allowed)
    assert ([tool.name for tool in call.tools], call.tool_choice) == (["time"], ToolChoice("required"))
    assert (call.echoed_fields["tool_choice"], len(call.echoed_fields["tools"])) == (allowed, 2)


CALLER = [
    ({"user": "u"}, "user", "u"),
    ({"safety_identifier": "s"}, "user", "s"),
    ({"cache_salt": "k"}, "cache_salt", "k"),
    ({"service_tier": "default"}, "priority", Priority.INTERACTIVE),
    ({"service_tier": "flex"}, "priority", Priority.BATCH),
]


@pytest.mark.parametrize(("fields", "name", "expected"), CALLER)
def test_common_fields(fields: dict[str, Any], name: str, expected: Any) -> None:
    assert getattr(parse_request(**fields).common, name) == expected


ECHO = [
    ({"metadata": {"a": "b"}}, "metadata", {"a": "b"}),
    ({"instructions": "i"}, "instructions", "i"),
    ({"max_output_tokens": 5}, "max_output_tokens", 5),
    ({"max_tool_calls": 5}, "max_tool_calls", 5),
    ({"top_logprobs": 2}, "top_logprobs", 2),
    ({"service_tier": "flex"}, "service_tier", "flex"),
    ({"service_tier": "auto"}, "service_tier", "default"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", False),
    ({"prompt_cache_key": "k"}, "prompt_cache_key", "k"),
    ({"safety_identifier": "s"}, "safety_identifier", "s"),
    ({"user": "u"}, "user", "u"),
    ({"reasoning": {"effort": "low"}}, "reasoning", {"effort": "low", "summary": None}),
    ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice", "required"),
    ({"background": False, "truncation": "disabled"}, "background", False),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "resp_1"),
]


@pytest.mark.parametrize(("fields", "name", "expected"), ECHO)
def test_reply_repeats_request_fields(fields: dict[str, Any], name: str, expected: Any) -> None:
    assert parse_request(**fields).echoed_fields[name] == expected


def messages_of(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return list(parse_request(input=list(items), **fields).messages)


MESSAGES = [
    (USER, "user", "hi"),
    ({**USER, "type": "message"}, "user", "hi"),
    ({"role": "developer", "content": "d"}, "system", "d"),
    ({"role": "system", "content": "s"}, "system", "s"),
    ({"role": "assistant", "content": "a"}, "assistant", "a"),
    ({"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}, "user", "a\nb"),
    (
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [
                {
                    "type": "output_text",
                    "text": "a",
                    "annotations": [{"type": "url_citation"}],
                    "logprobs": [{"token": "a"}],
                }
            ],
        },
        "assistant",
        "a",
    ),
    ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "assistant", "no"),
]


@pytest.mark.parametrize(("item", "role", "text"), MESSAGES)
def test_messages(item: dict[str, Any], role: str, text: str) -> None:
    assert messages_of(item) == [{"role": role, "content": text}]


def test_instructions_come_first() -> None:
    assert messages_of({"role": "developer", "content": "d"}, USER, instructions="i") == [
        {"role": "system", "content": "i\nd"},
        USER,
    ]


def test_tool_call_and_its_output() -> None:
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    text = {"role": "assistant", "content": "I look."}
    assert messages_of(USER, reasoning, text, CALL, OUTPUT) == [
        USER,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "call_1", "name": "weather"},
    ]
    assert messages_of(CALL, {**OUTPUT, "output": [{"type": "input_text", "text": "sun"}]})[-1]["content"] == "sun"
    assert messages_of({**CALL, "arguments": ""}, OUTPUT)[0]["tool_calls"][0]["function"]["arguments"] == {}


REASONING = [
    ({"content": [{"type": "reasoning_text", "text": "a"}], "summary": [{"type": "summary_text", "text": "b"}]}, "a"),
    ({"summary": [{"type": "summary_text", "text": "b"}]}, "b"),
    ({"encrypted_content": encode_reasoning("hé"), "summary": [{"type": "summary_text", "text": "b"}]}, "hé"),
    ({"summary": []}, None),
]


@pytest.mark.parametrize(("fields", "text"), REASONING)
def test_returned_reasoning_item(fields: dict[str, Any], text: str | None) -> None:
    item = {"type": "reasoning", "id": "rs_1", **fields}
    assert messages_of(USER, item, {"role": "assistant", "content": "x"})[-1].get("reasoning_content") == text


def test_incomplete_message_is_continued() -> None:
    for status, continued in (("incomplete", True), ("in_progress", True), ("completed", False)):
        call = parse_request(input=[USER, {"role": "assistant", "content": "a", "status": status}])
        assert (call.continues_last_message, call.adds_generation_prompt) == (continued, not continued)
    assert not parse_request(input=[{**USER, "status": "incomplete"}]).continues_last_message


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


FORMAT = {"type": "json_schema", "name": "n", "schema": {}}
BAD = [
    ({"model": 3}, "model"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    ({"input": [USER, CALL]}, "input"),
    (item(role="robot", content="a"), "input[0].role"),
    (item(role="user"), "input[0].content"),
    (item(role="user", content=[{"type": "input_image", "image_url": "x"}]), "input[0].content[0].type"),
    (item(role="user", content=[{"type": "input_file", "file_id": "x"}]), "input[0].content[0].type"),
    (item(id="msg_1"), "input[0].type"),
    (item(type="item_reference", id="msg_1"), "input[0].type"),
    (item(type="web_search_call", id="x"), "input"),
    (item(**OUTPUT), "input[0].call_id"),
    (item(**{**CALL, "arguments": "{"}), "input[0].arguments"),
    (item(**{**CALL, "arguments": "[]"}), "input[0].arguments"),
    (item(**{**CALL, "arguments": "[" * 100_000}), "input[0].arguments"),
    ({"instructions": ["i"]}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"metadata": {"a": 5}}, "metadata[...]"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"background": True}, "background"),
    ({"previous_response_id": 1}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"n": 2}, "n"),
    ({"response_format": {"type": "text"}}, "response_format"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": FORMAT}, "guided_regex": "a"}, "text.format"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"name": "f"}]}, "tools[0].type"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "weather"}]}},
        "tool_choice.tools[0].type",
    ),
    ({"input": [{"type": "reasoning", "summary": [{"text": "a"}]}]}, "input[0].summary[0].type"),
    ({"input": [{"type": "reasoning", "content": [{"text": "a"}]}]}, "input[0].content[0].type"),
    (
        {"input": [{"type": "function_call_output", "call_id": "1", "output": [{"text": "a"}]}]},
        "input[0].output[0].type",
    ),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "time"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    (
        {
            "tools": [WEATHER],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]},
        },
        "tool_choice",
    ),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_errors_name_the_field(fields: dict[str, Any], param: str) -> None:
    assert rejection({"model": "m", "input": "hi", **fields}).param == param


STATEFUL = [{"conversation": "c"}, item(id="msg_1")]


@pytest.mark.parametrize("fields", STATEFUL)
def test_stateful_items_are_rejected_with_a_hint(fields: dict[str, Any]) -> None:
    assert "whole conversation" in str(rejection({"model": "m", "input": "hi", **fields}))


DEEP = b'{"model":"m","input":"a","tools":[{"type":"function","name":"a","parameters":' + b'{"a":' * 100_000


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b'{"model":"\xff"}', b"[" * 100_000, DEEP])
def test_invalid_json_body(body: bytes) -> None:
    assert rejection(body).param is None


NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False}],
}


def test_namespace_is_flattened_and_calls_keep_their_namespace() -> None:
    """A tool of the same name in another namespace is a different tool."""
    other = {**NAMESPACE, "name": "mcp__docs__"}
    call = {**CALL, "name": "spawn", "namespace": "agents"}
    worker = WorkerHarness(lambda before, _: f'<tool_call>{{"name": "{wanted}", "arguments": {{}}}}</tool_call>')
    for wanted, namespace in (("agents__spawn", "agents"), ("mcp__docs__spawn", "mcp__docs__"), ("weather", None)):
        reply = worker.post("/v1/responses", {"input": "hi", "tools": [NAMESPACE, other, WEATHER]}).json
        assert [(item["name"], item.get("namespace")) for item in reply["output"]] == [
            (wanted.removeprefix("agents__").removeprefix("mcp__docs__"), namespace)
        ]
        assert [tool["type"] for tool in reply["tools"]] == ["namespace", "namespace", "function"]
    request = parse_request(input=[USER, call, OUTPUT], tools=[NAMESPACE, other, WEATHER])
    assert [tool.name for tool in request.tools] == ["agents__spawn", "mcp__docs__spawn", "weather"]
    assert request.messages[1]["tool_calls"][0]["function"]["name"] == "agents__spawn"


def test_reasoning_that_another_server_encrypted_is_listed() -> None:
    for encrypted in ("theirs!", "\u00b4 no letters", "gAAA/w=="):
        item = {"type": "reasoning", "encrypted_content": encrypted, "summary": [{"type": "summary_text", "text": "s"}]}
        call = parse_request(input=[USER, item, item])
        assert call.ignored.known == ("input[].encrypted_content",)
        assert call.messages[-1]["reasoning_content"] == "s\ns"
