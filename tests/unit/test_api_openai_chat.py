"""Chat requests: valid bodies become calls, invalid ones a 400 that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from emberline.api.call import Tool, ToolChoice
from emberline.api.openai.chat import ChatRequest, OpenAIChatCall, parse
from emberline.core.errors import InvalidRequest
from emberline.core.params import GrammarSpec
from emberline.core.request import Priority

USER = {"role": "user", "content": "hi"}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
TIME = {"type": "function", "function": {"name": "time", "strict": True}}


def chat(**fields: Any) -> OpenAIChatCall:
    return parse(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def rejected_param(**fields: Any) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    return caught.value.param


def test_minimal_request() -> None:
    call = chat()
    assert (call.common.model, call.messages, call.stream) == ("m", [USER], False)
    assert call.params.max_tokens is None
    assert call.params.temperature == 1.0
    assert call.adds_generation_prompt
    assert not call.continues_last_message


def test_null_equals_absent() -> None:
    optional = {name: None for name in ChatRequest.__struct_fields__ if name not in ("model", "messages")}
    assert chat(**optional) == chat()


SAMPLING = [
    ("temperature", 0.3, "temperature", 0.3),
    ("temperature", 0, "temperature", 0.0),
    ("top_p", 0.5, "top_p", 0.5),
    ("top_k", 7, "top_k", 7),
    ("top_k", -1, "top_k", 0),
    ("min_p", 0.1, "min_p", 0.1),
    ("n", 3, "n", 3),
    ("seed", -5, "seed", -5),
    ("max_tokens", 9, "max_tokens", 9),
    ("max_completion_tokens", 9, "max_tokens", 9),
    ("min_tokens", 2, "min_tokens", 2),
    ("repetition_penalty", 1.1, "repetition_penalty", 1.1),
    ("presence_penalty", -1, "presence_penalty", -1.0),
    ("frequency_penalty", 1.5, "frequency_penalty", 1.5),
    ("logit_bias", {"50": -100, "3": 2.5}, "logit_bias", {50: -100.0, 3: 2.5}),
    ("stop", "end", "stop", ("end",)),
    ("stop", "", "stop", ()),
    ("stop", ["", "a"], "stop", ("a",)),
    ("top_p", 0, "temperature", 0.0),
    ("repeat_penalty", 1.2, "repetition_penalty", 1.2),
    ("allowed_token_ids", [3, 4], "allowed_token_ids", (3, 4)),
    ("stop", ["a", "b"], "stop", ("a", "b")),
    ("stop_token_ids", [1, 2], "stop_token_ids", (1, 2)),
    ("ignore_eos", True, "ignore_eos", True),
    ("skip_special_tokens", False, "skip_special_tokens", False),
    ("include_stop_str_in_output", True, "include_stop", True),
    ("logprobs", True, "logprobs", 0),
    ("prompt_logprobs", 2, "prompt_logprobs", 2),
    ("response_format", {"type": "text"}, "grammar", None),
    ("response_format", {"type": "json_object"}, "grammar", GrammarSpec("json_object")),
    ("guided_json", {"type": "object"}, "grammar", GrammarSpec("json_schema", '{"type":"object"}')),
    ("guided_json", '{"type": "object"}', "grammar", GrammarSpec("json_schema", '{"type":"object"}')),
    ("guided_regex", "a+", "grammar", GrammarSpec("regex", "a+")),
    ("guided_choice", ["a", "é"], "grammar", GrammarSpec("choice", '["a","é"]')),
    ("guided_grammar", "start: A", "grammar", GrammarSpec("grammar", "start: A")),
    ("structured_outputs", {"json": {}}, "grammar", GrammarSpec("json_schema", "{}")),
    ("structured_outputs", {"regex": "a"}, "grammar", GrammarSpec("regex", "a")),
    ("structured_outputs", {"choice": ["a"]}, "grammar", GrammarSpec("choice", '["a"]')),
    ("structured_outputs", {"grammar": "g"}, "grammar", GrammarSpec("grammar", "g")),
    ("structured_outputs", {"json_object": True}, "grammar", GrammarSpec("json_object")),
]


@pytest.mark.parametrize(("field", "value", "param", "expected"), SAMPLING)
def test_sampling_fields(field: str, value: Any, param: str, expected: Any) -> None:
    assert getattr(chat(**{field: value}).params, param) == expected


def test_json_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 10**30}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "description": "d", "strict": True, "schema": schema}}
    grammar = chat(response_format=form).params.grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.text)) == ("json_schema", schema)
    assert chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}).params.grammar == GrammarSpec(
        "json_object"
    )


COMMON = [
    ({"user": "u"}, "user", "u"),
    ({"safety_identifier": "s"}, "user", "s"),
    ({"safety_identifier": "s", "user": "u"}, "user", "s u"),
    ({"cache_salt": "k"}, "cache_salt", "k"),
    ({"cache_salt": "k", "prompt_cache_key": "other"}, "cache_salt", "k"),
    ({"service_tier": "auto"}, "priority", Priority.INTERACTIVE),
    ({"service_tier": "flex"}, "priority", Priority.BATCH),
    ({"priority": 0}, "priority", Priority.INTERACTIVE),
    ({"priority": 3}, "priority", Priority.BATCH),
]


@pytest.mark.parametrize(("fields", "name", "expected"), COMMON)
def test_common_fields(fields: dict[str, Any], name: str, expected: Any) -> None:
    assert getattr(chat(**fields).common, name) == expected


CALLS = [
    ({"stream": True}, "stream", True),
    ({"stream": True, "stream_options": {"include_usage": True}}, "includes_usage", True),
    (
        {"stream": True, "stream_options": {"include_usage": False, "include_obfuscation": False}},
        "includes_usage",
        False,
    ),
    (
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        "running_usage",
        True,
    ),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", False),
    ({"chat_template_kwargs": {"x": [1]}}, "template_args", {"x": [1]}),
    ({"reasoning_effort": "none"}, "template_args", {"reasoning_effort": "none", "enable_thinking": False}),
    ({"reasoning_effort": "low"}, "template_args", {"reasoning_effort": "low", "enable_thinking": True}),
    ({"add_generation_prompt": False}, "adds_generation_prompt", False),
    ({"add_special_tokens": True}, "add_special_tokens", True),
    ({"metadata": {"a": "b"}}, "metadata", {"a": "b"}),
    ({"logprobs": False, "top_logprobs": 0, "store": False, "modalities": ["text"]}, "metadata", {}),
    ({"verbosity": "medium", "prompt_cache_retention": "in_memory"}, "metadata", {}),
    ({"tools": [], "tool_choice": "auto"}, "tools", ()),
]


@pytest.mark.parametrize(("fields", "name", "expected"), CALLS)
def test_call_fields(fields: dict[str, Any], name: str, expected: Any) -> None:
    assert getattr(chat(**fields), name) == expected


def test_top_logprobs() -> None:
    assert chat(logprobs=True, top_logprobs=5).params.logprobs == 5


def test_continuing_the_last_message() -> None:
    call = chat(messages=[USER, {"role": "assistant", "content": "He"}], continue_final_message=True)
    assert call.continues_last_message
    assert not call.adds_generation_prompt


MESSAGES = [
    ({"role": "system", "content": "s"}, {"role": "system", "content": "s"}),
    ({"role": "developer", "content": "s"}, {"role": "system", "content": "s"}),
    ({"role": "user", "content": "s", "name": "bo"}, {"role": "user", "content": "s", "name": "bo"}),
    (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "a\nb"},
    ),
    ({"role": "assistant", "content": "a", "refusal": None}, {"role": "assistant", "content": "a"}),
    ({"role": "assistant", "refusal": "no"}, {"role": "assistant", "content": "no"}),
    (
        {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "no"}],
            "annotations": [{"type": "url_citation"}],
        },
        {"role": "assistant", "content": "no"},
    ),
    (
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
    ),
    (
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ),
    (
        {"role": "function", "name": "f", "content": "42"},
        {"role": "tool", "content": "42", "tool_call_id": "call_f", "name": "f"},
    ),
]


@pytest.mark.parametrize(("wire", "expected"), MESSAGES)
def test_messages(wire: dict[str, Any], expected: dict[str, Any]) -> None:
    assert chat(messages=[wire]).messages == [expected]


@pytest.mark.parametrize(("text", "expected"), [('{"a": [1, "x"]}', {"a": [1, "x"]}), ("{}", {}), ("", {}), (" ", {})])
def test_tool_call_arguments_become_objects(text: str, expected: dict[str, Any]) -> None:
    function = {"name": "f", "arguments": text}
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    [converted] = chat(messages=[message]).messages
    assert converted["content"] == ""
    assert converted["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": expected}}
    ]
    [legacy] = chat(messages=[{"role": "assistant", "function_call": function}]).messages
    assert legacy["tool_calls"] == [
        {"id": "call_f", "type": "function", "function": {"name": "f", "arguments": expected}}
    ]


TOOL_CHOICES = [
    (None, ToolChoice()),
    ("none", ToolChoice("none")),
    ("required", ToolChoice("required")),
    ({"type": "function", "function": {"name": "time"}}, ToolChoice("named", "time")),
]


@pytest.mark.parametrize(("wire", "expected"), TOOL_CHOICES)
def test_tools(wire: Any, expected: ToolChoice) -> None:
    call = chat(tools=[WEATHER, TIME], tool_choice=wire)
    assert call.tools == (Tool("weather", "d", {"type": "object"}), Tool("time", "", {}, strict=True))
    assert call.tool_choice == expected
    assert call.parallel_tool_calls


def test_allowed_tools_restrict_the_tools() -> None:
    refs = [{"type": "function", "function": {"name": "time"}}]
    call = chat(
        tools=[WEATHER, TIME],
        tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": refs}},
    )
    assert [tool.name for tool in call.tools] == ["time"]
    assert call.tool_choice == ToolChoice("required")


def test_legacy_functions() -> None:
    call = chat(functions=[WEATHER["function"]], function_call={"name": "weather"})
    assert [tool.name for tool in call.tools] == ["weather"]
    assert call.tool_choice == ToolChoice("named", "weather")
    assert call.uses_legacy_functions
    assert not call.parallel_tool_calls
    assert chat(functions=[WEATHER["function"]]).tool_choice == ToolChoice()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": 3}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": "a", "refusal": "b"}]}, "messages[0].refusal"),
    ({"messages": [{"role": "assistant", "content": "a", "audio": {"id": "x"}}]}, "messages[0].audio"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{"}}]},
        "messages[0].function_call.arguments",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1]"}}],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"max_tokens": 1, "min_tokens": 2}, "min_tokens"),
    ({"seed": 10**30}, "seed"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"2147483648": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"logprobs": True, "logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"metadata": {"a": 1}}, "metadata[...]"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"tools": [{"type": "custom", "custom": {}}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
    ({"tools": [WEATHER], "functions": []}, "functions"),
    ({"functions": [WEATHER["function"]], "function_call": {"name": "x"}}, "function_call.name"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_errors_name_the_field(fields: dict[str, Any], param: str) -> None:
    assert rejected_param(**fields) == param


def test_logit_bias_error_names_invalid_keys() -> None:
    with pytest.raises(InvalidRequest, match="'bad1', 'bad2'"):
        chat(logit_bias={"bad1": 1, "5": 1, "bad2": 1})


def test_image_is_rejected_with_a_hint() -> None:
    with pytest.raises(InvalidRequest, match="text parts only"):
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_every_field_of_official_client_is_known() -> None:
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase

    official = {*CompletionCreateParamsBase.__annotations__, "stream"}
    assert official <= set(ChatRequest.__struct_fields__)
