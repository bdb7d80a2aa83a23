"""Requests of Anthropic's protocol: valid bodies become calls, invalid ones a 400 that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_engine import WorkerHarness

from emberline.api.anthropic.request import (
    CountTokensRequest,
    MessagesCall,
    MessagesRequest,
    parse,
    parse_count_tokens,
    render_token_count,
)
from emberline.api.call import Tool, ToolChoice
from emberline.core.errors import InvalidRequest
from emberline.core.params import GrammarSpec
from emberline.wire.anthropic import sign_thinking

USER = {"role": "user", "content": "hi"}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
WEATHER = {"name": "weather", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}


def parse_request(**fields: Any) -> MessagesCall:
    return parse(json.dumps({"model": "m", "max_tokens": 2048, "messages": [USER], **fields}).encode())


def rejected_param(body: dict[str, Any] | bytes) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        parse(body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value.param


def test_minimal_request() -> None:
    call = parse_request()
    assert (call.common.model, call.messages, call.stream) == ("m", [USER], False)
    assert (call.params.max_tokens, call.params.temperature, call.params.top_k) == (2048, 1.0, 0)
    assert (call.adds_generation_prompt, call.continues_last_message, call.shows_thinking) == (True, False, True)
    assert call.template_args == {}


def test_null_equals_absent() -> None:
    required = ("model", "messages", "max_tokens")
    assert (
        parse_request(**{name: None for name in MessagesRequest.__struct_fields__ if name not in required})
        == parse_request()
    )


PARAMS = [
    ("temperature", 0, "temperature", 0.0),
    ("top_p", 0.5, "top_p", 0.5),
    ("top_k", 7, "top_k", 7),
    ("max_tokens", 9, "max_tokens", 9),
    ("stop_sequences", ["a", "b"], "stop", ("a", "b")),
    (
        "output_config",
        {"format": {"type": "json_schema", "schema": {"maximum": 10**20}}},
        "grammar",
        GrammarSpec("json_schema", '{"maximum":100000000000000000000}'),
    ),
]


@pytest.mark.parametrize(("field", "value", "param", "expected"), PARAMS)
def test_sampling_fields(field: str, value: Any, param: str, expected: Any) -> None:
    assert getattr(parse_request(**{field: value}).params, param) == expected


CALLS = [
    ({"stream": True}, "stream", True),
    ({"thinking": {"type": "disabled"}}, "template_args", {"enable_thinking": False}),
    ({"thinking": {"type": "adaptive"}}, "template_args", {"enable_thinking": True}),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        "template_args",
        {"enable_thinking": True, "thinking_budget": 1024},
    ),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking_budget", 1024),
    ({"thinking": {"type": "adaptive"}}, "thinking_budget", None),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "shows_thinking", False),
    ({"thinking": {"type": "adaptive", "display": "summarized"}}, "shows_thinking", True),
    ({"output_config": {"effort": "low"}}, "template_args", {"reasoning_effort": "low"}),
    ({"tools": [WEATHER]}, "tool_choice", ToolChoice("auto")),
    ({"tools": [WEATHER], "tool_choice": {"type": "auto"}}, "tool_choice", ToolChoice("auto")),
    ({"tools": [WEATHER], "tool_choice": {"type": "any"}}, "tool_choice", ToolChoice("required")),
    ({"tools": [WEATHER], "tool_choice": {"type": "none"}}, "tool_choice", ToolChoice("none")),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}},
        "tool_choice",
        ToolChoice("named", "weather"),
    ),
    ({"tools": [WEATHER], "tool_choice": {"type": "any"}}, "parallel_tool_calls", True),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        "parallel_tool_calls",
        False,
    ),
]


@pytest.mark.parametrize(("fields", "name", "expected"), CALLS)
def test_call_fields(fields: dict[str, Any], name: str, expected: Any) -> None:
    assert getattr(parse_request(**fields), name) == expected


def test_user_and_cache_salt() -> None:
    call = parse_request(metadata={"user_id": "u"}, cache_salt="s", service_tier="auto", speed="standard")
    assert (call.common.user, call.common.cache_salt) == ("u", "s")


def test_tools() -> None:
    described = {**WEATHER, "type": "custom", "description": "d", "strict": True, "defer_loading": False, **CACHED}
    assert parse_request(tools=[WEATHER]).tools == [Tool("weather", "", {"type": "object"})]
    assert parse_request(tools=[described]).tools == [Tool("weather", "d", {"type": "object"}, strict=True)]


def messages_of(*messages: Any, system: Any = None) -> list[dict[str, Any]]:
    return list(parse_request(messages=list(messages), system=system).messages)


def test_system() -> None:
    assert messages_of(USER, system="s") == [{"role": "system", "content": "s"}, USER]
    assert messages_of(USER, system=[{"type": "text", "text": "a", **CACHED}, {"type": "text", "text": "b"}]) == [
        {"role": "system", "content": "a\nb"},
        USER,
    ]


def test_adjacent_messages_of_one_role_are_merged() -> None:
    blocks = {
        "role": "user",
        "content": [
            {"type": "text", "text": "b", "citations": [{"type": "char_location"}]},
            {"type": "text", "text": "c"},
        ],
    }
    assert messages_of({"role": "user", "content": "a"}, blocks) == [{"role": "user", "content": "a\nb\nc"}]


def test_tool_use_and_its_result() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": sign_thinking("hm")}
    text = {"type": "text", "text": "I look."}
    after = {"type": "text", "text": "so?"}
    assert messages_of(
        USER, {"role": "assistant", "content": [thinking, text, CALL]}, {"role": "user", "content": [RESULT, after]}
    ) == [
        USER,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "toolu_1", "name": "weather"},
        {"role": "user", "content": "so?"},
    ]


RESULTS = [
    ({}, "rain"),
    ({"is_error": False}, "rain"),
    ({"is_error": True}, "Error: rain"),
    ({"content": None}, ""),
    ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
]


@pytest.mark.parametrize(("fields", "text"), RESULTS)
def test_tool_results(fields: dict[str, Any], text: str) -> None:
    result = {**RESULT, **fields}
    assert (
        messages_of({"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]})[-1]["content"]
        == text
    )


def test_last_assistant_message_is_continued() -> None:
    call = parse_request(messages=[USER, {"role": "assistant", "content": "The answer is ("}])
    assert (call.continues_last_message, call.adds_generation_prompt) == (True, False)
    assert call.messages[-1] == {"role": "assistant", "content": "The answer is ("}
    empty = parse_request(messages=[USER, {"role": "assistant", "content": []}])  # an empty reply, sent back
    assert (empty.continues_last_message, empty.adds_generation_prompt, empty.messages) == (False, True, [USER])


def test_count_tokens() -> None:
    fields = {"model": "m", "messages": [USER], "system": "s", "tools": [WEATHER], "thinking": {"type": "disabled"}}
    counted, request = parse_count_tokens(json.dumps(fields).encode()), parse_request(**fields)
    for name in ("messages", "tools", "tool_choice", "template_args", "adds_generation_prompt"):
        assert getattr(counted, name) == getattr(request, name)
    assert "max_tokens" not in CountTokensRequest.__struct_fields__
    assert render_token_count(7) == {"input_tokens": 7}


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


BAD = [
    ({"model": 3}, "model"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [USER, {"role": "assistant", "content": [CALL]}]}, "messages"),
    (block(type="image", source={"type": "url", "url": "x"}), "messages[0].content[0].type"),
    (block(type="document", source={}), "messages[0].content[0].type"),
    (block(type="redacted_thinking", data="x"), "messages[0].content[0].type"),
    (block(**CALL), "messages[0].content[0].type"),
    (block(**RESULT), "messages[0].content[0].tool_use_id"),
    (block(type="text"), "messages[0].content[0].text"),
    (block(type="text", text="a", citations=[5]), "messages[0].content[0].citations[0]"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"system": [{"text": "a"}]}, "system[0].type"),
    ({"messages": [{"role": "system", "content": [{"text": "a"}]}, USER]}, "messages[0].content[0].type"),
    (block(**{**RESULT, "content": [{"text": "a"}]}), "messages[0].content[0].content[0].type"),
    ({"output_config": {"format": {"schema": {}}}}, "output_config.format.type"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": [3]}, "stop_sequences[0]"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"stream": "yes"}, "stream"),
    ({"compaction": {"type": "summary"}}, "compaction"),
    ({"thread": {"type": "fork"}}, "thread.type"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking.budget_tokens"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "time"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": "auto"}, "tool_choice"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}}, "tool_choice"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_errors_name_the_field(fields: dict[str, Any], param: str) -> None:
    assert rejected_param({"model": "m", "max_tokens": 2048, "messages": [USER], **fields}) == param


def test_continued_thread_is_not_found() -> None:
    """Clients recognise the error code, and send all messages again."""
    body = {"max_tokens": 9, "messages": [USER], "thread": {"type": "continue", "previous_message_id": "msg_1"}}
    reply = WorkerHarness(lambda before, _: before).post("/v1/messages", body)
    assert reply.status == 404 and reply.json["error"]["type"] == "not_found_error"
    assert reply.json["error"]["details"] == {"error_code": "thread_not_found"}


def test_foreign_thinking_is_passed_to_the_model() -> None:
    thinking = {"type": "thinking", "thinking": "a", "signature": "theirs"}
    messages = [USER, {"role": "assistant", "content": [thinking]}, USER]
    assert parse_request(model="m", messages=messages).messages[1]["reasoning_content"] == "a"


def test_tool_reference_names_the_tool() -> None:
    found = {**RESULT, "content": [{"type": "tool_reference", "tool_name": "weather"}]}
    messages = [USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [found]}]
    assert parse_request(model="m", messages=messages).messages[-1]["content"] == "weather"


DEEP = b'{"tools":[{"input_schema":' + b'{"a":' * 100_000


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b'{"model":"\xff"}', b"[" * 100_000, DEEP])
def test_invalid_json_body(body: bytes) -> None:
    assert rejected_param(body) is None


def test_deep_schema_is_rejected() -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"properties": deep}
    assert (
        rejected_param(
            {"model": "m", "max_tokens": 1, "messages": [USER], "tools": [{"name": "a", "input_schema": deep}]}
        )
        is None
    )


def test_many_small_blocks_parse_in_linear_time() -> None:
    blocks = [{"type": "text", "text": "x"}] * 50_000
    [message] = messages_of({"role": "user", "content": blocks})
    assert len(message["content"]) == 99_999


def test_only_omitted_thinking_is_left_out() -> None:
    """Claude Code asks for displays that other servers do not have yet."""
    for display, shown in (("omitted", False), ("summarized", True), ("updates", True)):
        call = parse_request(model="m", thinking={"type": "adaptive", "display": display})
        assert call.shows_thinking is shown and call.ignored.to_header_value() == ""
