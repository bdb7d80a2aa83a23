"""Translation of requests: a golden file for every pair of wire formats, and each rule by itself."""

from __future__ import annotations

import json
from typing import Any

import goldens
import pytest
from dialect_cases import ANTHROPIC, CHAT, DIALECTS, GEMINI, MODELS, PAIRS, PIXEL, REQUESTS, RESPONSES

from emberline.core.errors import InvalidRequest, ThreadNotFound
from emberline.gateway.dialects.gemini import request as gemini_request
from emberline.gateway.dialects.gemini.camel_case import to_camel_case
from emberline.gateway.dialects.translate import (
    StreamTranslator,
    TargetModel,
    read_reply_context,
    translate_reply,
    translate_request,
)
from emberline.wire.deltas import ChatDialect

HI: dict[ChatDialect, dict[str, Any]] = {
    "openai-chat": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "openai-responses": {"model": "m", "input": "hi"},
    "anthropic": {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]},
    "gemini": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
}


def translate(
    request: dict[str, Any], source: ChatDialect, target: ChatDialect, to: TargetModel | str | None = None, **more: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    to = TargetModel(to or MODELS[target]) if not isinstance(to, TargetModel) else to
    body, changed = translate_request(json.dumps(request).encode(), source, target, to, **more)
    return json.loads(body), {change.field: change.reason for change in changed}


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_translated_requests_match_goldens(source: ChatDialect, target: ChatDialect) -> None:
    body, changed = translate(REQUESTS[source], source, target)
    text = json.dumps({"body": body, "changed": changed}, indent=1, ensure_ascii=False) + "\n"
    goldens.check(f"dialects/{source}_to_{target}.json", text.encode())


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_minimal_request(source: ChatDialect, target: ChatDialect) -> None:
    body, changed = translate(HI[source], source, target, "m")
    want = HI[target] | ({"store": False} if target == "openai-responses" else {})
    if source == "anthropic":
        limits = {"openai-chat": "max_completion_tokens", "openai-responses": "max_output_tokens"}
        want |= {limits[target]: 50} if target in limits else {"generationConfig": {"maxOutputTokens": 50}}
    if target == "openai-responses":
        want["input"] = [{"role": "user", "content": "hi"}]
    if target == "anthropic":
        want["max_tokens"] = 4096
        assert "4096" in changed.popitem()[1]
    assert body == want and not changed


def test_gemini_body_is_converted_to_camel_case_once(monkeypatch: pytest.MonkeyPatch) -> None:
    converted = []

    def count(body: Any) -> Any:
        converted.append(body)
        return to_camel_case(body)

    monkeypatch.setattr(gemini_request, "to_camel_case", count)
    request = gemini_request.parse({"model": "models/g", "generation_config": {"top_k": 3}, **HI["gemini"]})
    assert request.source_fields["model"] == "models/g" and request.top_k == 3
    assert len(converted) == 1


def test_anthropic_max_tokens_from_catalogue() -> None:
    body, changed = translate(HI["openai-chat"], "openai-chat", "anthropic", TargetModel("m", max_output=64000))
    assert body["max_tokens"] == 64000 and "64000" in changed["max_completion_tokens"]
    assert translate({**HI["openai-chat"], "max_tokens": 9}, "openai-chat", "anthropic")[0]["max_tokens"] == 9


def test_older_chat_providers_get_max_tokens() -> None:
    body, _ = translate(HI["anthropic"], "anthropic", "openai-chat", TargetModel("m", max_tokens_field="max_tokens"))
    assert body["max_tokens"] == 50 and "max_completion_tokens" not in body


@pytest.mark.parametrize(
    ("model", "effort", "thinking", "output"),
    [
        ("claude-opus-5", "high", {"type": "adaptive"}, {"effort": "high"}),
        ("claude-opus-5", "minimal", {"type": "adaptive"}, {"effort": "low"}),
        ("claude-opus-5", "none", {"type": "disabled"}, None),
        ("claude-opus-5", "xhigh", {"type": "adaptive"}, {"effort": "xhigh"}),
        ("claude-sonnet-4-6", "xhigh", {"type": "adaptive"}, {"effort": "high"}),
        ("claude-sonnet-4-6", "max", {"type": "adaptive"}, {"effort": "max"}),
        ("claude-fable-5", "none", {"type": "adaptive"}, {"effort": "low"}),
        ("claude-opus-5-5", "none", {"type": "adaptive"}, {"effort": "low"}),
        ("claude-sonnet-5-5", "none", {"type": "between_tools"}, None),
        ("claude-haiku-5-5", "none", {"type": "disabled"}, None),
        ("claude-sonnet-4-6", "low", {"type": "adaptive"}, {"effort": "low"}),
        ("claude-sonnet-4-5-20250929", "low", {"type": "enabled", "budget_tokens": 2048}, None),
        ("claude-3-7-sonnet-20250219", "max", {"type": "enabled", "budget_tokens": 22500}, None),
        ("anthropic.claude-opus-4-1-20250805-v1:0", "medium", {"type": "enabled", "budget_tokens": 8192}, None),
        ("qwen3-8b", "medium", {"type": "adaptive"}, {"effort": "medium"}),
    ],
)
def test_claude_effort(model: str, effort: str, thinking: Any, output: Any) -> None:
    request = {**HI["openai-chat"], "reasoning_effort": effort, "max_tokens": 30000}
    body, changed = translate(request, "openai-chat", "anthropic", model)
    assert body.get("thinking") == thinking and body.get("output_config") == output
    exact = thinking["type"] == "disabled" or (output or {}).get("effort") == effort
    assert ("reasoning_effort" in changed) == (not exact)


@pytest.mark.parametrize(
    ("model", "asked", "got"),
    [
        ("gpt-6.1-sol", "none", "low"),
        ("gpt-6-luna", "none", "none"),
        ("gpt-5.6", "max", "max"),
        ("gpt-5.2", "max", "xhigh"),
        ("gpt-5.1", "xhigh", "high"),
        ("gpt-5.1", "minimal", "low"),
        ("gpt-5-mini", "none", "minimal"),
        ("openai/o3", "none", "low"),
        ("gpt-4o", "high", None),
        ("gpt-5.2-codex", "max", "max"),
        ("qwen3-8b", "max", "max"),
    ],
)
def test_gpt_effort_is_nearest_supported(model: str, asked: str, got: str | None) -> None:
    """An effort level that the model would reject is replaced by the nearest supported one."""
    thinking = {"thinking": {"type": "disabled"}} if asked == "none" else {"output_config": {"effort": asked}}
    sources: list[tuple[ChatDialect, dict[str, Any]]] = [("anthropic", thinking)]
    if asked == "minimal":
        sources = [("gemini", {"generationConfig": {"thinkingConfig": {"thinkingLevel": "MINIMAL"}}})]
    for source, reasoning in sources:
        body, changed = translate(HI[source] | reasoning, source, "openai-chat", model)
        assert body.get("reasoning_effort") == got and bool(changed) == (got != asked)
        body, changed = translate(HI[source] | reasoning, source, "openai-responses", model)
        assert body.get("reasoning") == (got and {"effort": got}) and bool(changed) == (got != asked)


def test_thinking_dropped_if_max_tokens_too_small() -> None:
    request = {**HI["openai-chat"], "reasoning_effort": "high", "max_tokens": 800}
    body, changed = translate(request, "openai-chat", "anthropic", "claude-sonnet-4-5")
    assert "thinking" not in body and "no room" in changed["reasoning_effort"]


@pytest.mark.parametrize("model", ["claude-opus-5-5", "claude-sonnet-5-5", "claude-fable-5-1"])
def test_claude_that_rejects_forced_tools_gets_auto(model: str) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        body, changed = translate({**CHAT, "tool_choice": choice}, "openai-chat", "anthropic", model)
        assert body["tool_choice"] == {"type": "auto"} and "tool_choice" in changed
        assert body["thinking"] == {"type": "adaptive"} and [tool["name"] for tool in body["tools"]] == ["weather"]


def test_forced_tool_call_drops_thinking() -> None:
    request = {**CHAT, "tool_choice": "required"}
    body, changed = translate(request, "openai-chat", "anthropic")
    assert "thinking" not in body and body["tool_choice"] == {"type": "any"} and "reasoning_effort" in changed


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        ("claude-opus-5", set()),
        ("claude-opus-4-7", set()),
        ("claude-sonnet-4-6", {"temperature", "top_k"}),
        ("claude-3-5-haiku-20241022", {"temperature", "top_p", "top_k"}),
        ("smollm2", {"temperature", "top_p", "top_k"}),
    ],
)
def test_claude_gets_only_accepted_sampling_fields(model: str, kept: set[str]) -> None:
    request = {"contents": HI["gemini"]["contents"], "generationConfig": {"temperature": 0.5, "topP": 0.9, "topK": 4}}
    body, changed = translate(request, "gemini", "anthropic", model)
    assert body.keys() & {"temperature", "top_p", "top_k"} == kept
    assert len(changed) == 1 + 3 - len(kept)  # the added limit, and each dropped field


def test_claude_temperature_is_capped_at_1() -> None:
    request = {**HI["openai-chat"], "temperature": 1.7, "max_tokens": 5}
    assert translate(request, "openai-chat", "anthropic", "claude-3-5-haiku")[0]["temperature"] == 1.0
    assert translate(request, "openai-chat", "anthropic", "smollm2")[0]["temperature"] == 1.7


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("gemini-3-pro", {"includeThoughts": True, "thinkingLevel": "high"}),
        ("gemini-2.5-flash", {"includeThoughts": True, "thinkingBudget": 24576}),
    ],
)
def test_gemini_effort(model: str, config: Any) -> None:
    body, _ = translate({**HI["openai-chat"], "reasoning_effort": "high"}, "openai-chat", "gemini", model)
    assert body["generationConfig"]["thinkingConfig"] == config


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("gemini-3-flash", {"thinkingLevel": "minimal"}),
        ("gemini-3.1-pro-preview", {"thinkingLevel": "low"}),
        ("gemini-2.5-flash", {"thinkingBudget": 0}),
        ("gemini-2.5-pro", {"thinkingBudget": 128}),
    ],
)
def test_gemini_reasoning_effort_none(model: str, config: Any) -> None:
    body, changed = translate({**HI["openai-chat"], "reasoning_effort": "none"}, "openai-chat", "gemini", model)
    assert body["generationConfig"]["thinkingConfig"] == config
    assert ("reasoning_effort" in changed) == (config != {"thinkingBudget": 0})


def test_budget_translates_to_effort() -> None:
    request = {**HI["anthropic"], "thinking": {"type": "enabled", "budget_tokens": 10000}}
    body, changed = translate(request, "anthropic", "openai-chat")
    assert body["reasoning_effort"] == "medium" and "10000" in changed["thinking"]
    body, _ = translate(request, "anthropic", "gemini", "gemini-2.5-pro")
    assert body["generationConfig"]["thinkingConfig"] == {"includeThoughts": True, "thinkingBudget": 10000}
    off = {**HI["anthropic"], "thinking": {"type": "disabled"}}
    assert translate(off, "anthropic", "openai-responses")[0]["reasoning"] == {"effort": "none"}
    assert translate(off, "anthropic", "gemini", "gemini-2.5-flash")[0]["generationConfig"]["thinkingConfig"] == {
        "thinkingBudget": 0
    }


def test_n_is_rejected_without_support() -> None:
    request = {**HI["openai-chat"], "n": 3}
    assert translate(request, "openai-chat", "gemini")[0]["generationConfig"] == {"candidateCount": 3}
    for target in ("anthropic", "openai-responses"):
        with pytest.raises(InvalidRequest, match="one choice per request") as raised:
            translate(request, "openai-chat", target)  # type: ignore[arg-type]
        assert raised.value.param == "n"


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ("openai-responses", {"previous_response_id": "resp_1"}),
        ("openai-responses", {"background": True}),
        ("openai-chat", {"functions": [{"name": "f"}]}),
        ("gemini", {"cachedContent": "cachedContents/1"}),
        ("anthropic", {"compaction": {"type": "summary"}}),
    ],
)
def test_essential_fields_are_rejected(source: ChatDialect, field: dict[str, Any]) -> None:
    for target in DIALECTS:
        if target != source:
            with pytest.raises(InvalidRequest) as raised:
                translate(HI[source] | field, source, target)
            assert raised.value.param == next(iter(field)) and raised.value.hint


def test_only_a_continued_thread_is_rejected() -> None:
    """It stands for messages that the request does not have. Clients send all of them after this error."""
    for target in DIALECTS:
        if target != "anthropic":
            _, changed = translate(HI["anthropic"] | {"thread": {"type": "create"}}, "anthropic", target)
            assert "thread" not in changed
            continued = {"thread": {"type": "continue", "previous_message_id": "msg_1"}}
            with pytest.raises(ThreadNotFound):
                translate(HI["anthropic"] | continued, "anthropic", target)


def test_hosted_tools_and_unknown_efforts_are_dropped() -> None:
    hosted = {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "mcp_servers": [{}], "container": "c"}
    _, changed = translate(HI["anthropic"] | hosted, "anthropic", "openai-chat")
    assert changed.keys() == {"tools[].web_search_20250305", "mcp_servers", "container"}
    body, changed = translate(HI["openai-chat"] | {"reasoning_effort": "galactic"}, "openai-chat", "openai-responses")
    assert "reasoning" not in body and changed.keys() == {"reasoning_effort"}
    body, changed = translate(
        HI["openai-responses"] | {"reasoning": {"effort": "galactic"}}, "openai-responses", "openai-chat"
    )
    assert "reasoning_effort" not in body and "reasoning.effort" in changed


def test_found_tool_is_named_in_the_result() -> None:
    found = [{"type": "tool_reference", "tool_name": "weather"}]
    call = {"type": "tool_use", "id": "1", "name": "search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": found}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    request = {**HI["anthropic"], "messages": [*HI["anthropic"]["messages"], *turns]}
    body, _ = translate(request, "anthropic", "openai-chat")
    assert body["messages"][-1] == {"role": "tool", "tool_call_id": "1", "content": "weather"}


def test_namespaces_become_functions() -> None:
    spawn = {"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False}
    namespace = {"type": "namespace", "name": "agents", "tools": [spawn, {"type": "custom", "name": "x"}]}
    call = {"type": "function_call", "call_id": "1", "name": "spawn", "namespace": "agents", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": "done"}
    request = {"input": [{"role": "user", "content": "hi"}, call, output], "tools": [namespace]}
    body, changed = translate(request, "openai-responses", "openai-chat")
    assert [tool["function"]["name"] for tool in body["tools"]] == ["agents__spawn"]
    assert body["messages"][1]["tool_calls"][0]["function"]["name"] == "agents__spawn"
    assert changed.keys() == {"tools[].custom"}
    function = {"id": "1", "type": "function", "function": {"name": "agents__spawn", "arguments": "{}"}}
    reply = {"id": "c", "choices": [{"message": {"tool_calls": [function]}, "finish_reason": "tool_calls"}]}
    context = read_reply_context(json.dumps(request).encode(), "openai-responses")
    rendered, _ = translate_reply(json.dumps(reply).encode(), "openai-chat", "openai-responses", context)
    item = json.loads(rendered)["output"][0]
    assert (item["namespace"], item["name"]) == ("agents", "spawn")
    context = read_reply_context(json.dumps(request).encode(), "openai-responses")
    stream = StreamTranslator("openai-chat", "openai-responses", context)
    delta = {"tool_calls": [{"index": 0, **function}]}
    chunks = [
        {"id": "c", "choices": [{"delta": delta}]},
        {"id": "c", "choices": [{"delta": {}, "finish_reason": "stop"}]},
    ]
    data = b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"
    assert b'"namespace":"agents","name":"spawn"' in stream.push(data) + stream.end()


def test_provider_bound_items_are_rejected() -> None:
    reference = {"input": [{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "hi"}]}
    block = {"role": "assistant", "content": [{"type": "compaction", "content": "so far"}]}
    summary = {**HI["anthropic"], "messages": [block, *HI["anthropic"]["messages"]]}
    with pytest.raises(InvalidRequest, match="item_reference"):
        translate(reference, "openai-responses", "openai-chat")
    with pytest.raises(InvalidRequest, match="compaction"):
        translate(summary, "anthropic", "gemini")


def test_late_system_messages() -> None:
    messages = [
        {"role": "developer", "content": "one"},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "two"},
    ]
    request = {"model": "m", "messages": messages, "max_tokens": 5}
    body, changed = translate(request, "openai-chat", "anthropic", "claude-opus-5")
    assert body["system"] == "one" and body["messages"][1] == {"role": "system", "content": "two"} and not changed
    body, changed = translate(request, "openai-chat", "anthropic", "claude-sonnet-4-5")
    assert body["system"] == [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "moved" in changed["messages[].role"] and len(body["messages"]) == 1
    body, changed = translate(request, "openai-chat", "gemini")
    assert body["systemInstruction"]["parts"] == [{"text": "one"}, {"text": "two"}] and "moved" in str(changed)
    body, _ = translate(request, "openai-chat", "openai-responses")
    assert [item["role"] for item in body["input"]] == ["developer", "user", "system"]


def test_response_formats() -> None:
    schema = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 1},
            "k": {"const": "x"},
            "s": {"type": "string", "maxLength": 3},
        },
        "required": ["n"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "out", "schema": schema, "strict": True}}
    request = {**HI["openai-chat"], "response_format": form}
    body, changed = translate(request, "openai-chat", "anthropic")
    result = body["output_config"]["format"]["schema"]
    assert result["additionalProperties"] is False and result["properties"]["n"] == {"type": "integer"}
    assert {
        "response_format.minimum",
        "response_format.maxLength",
        "response_format.additionalProperties",
    } <= changed.keys()
    body, changed = translate(request, "openai-chat", "gemini")
    config = body["generationConfig"]
    assert config["responseMimeType"] == "application/json"
    assert config["responseJsonSchema"]["properties"] == {
        "n": {"type": "integer", "minimum": 1},
        "k": {"enum": ["x"]},
        "s": {"type": "string"},
    }
    assert changed.keys() == {"response_format.maxLength"}
    body, _ = translate(request, "openai-chat", "openai-responses")
    assert body["text"]["format"] == {"type": "json_schema", "name": "out", "schema": schema, "strict": True}
    loose = {**HI["openai-chat"], "response_format": {"type": "json_object"}}
    assert "schema" in translate(loose, "openai-chat", "anthropic")[1]["response_format"]
    assert translate(loose, "openai-chat", "gemini")[0]["generationConfig"] == {"responseMimeType": "application/json"}


def test_gemini_schema_becomes_json_schema() -> None:
    own = {
        "type": "OBJECT",
        "properties": {
            "a": {"type": "STRING", "nullable": True},
            "type": {"type": "ARRAY", "items": {"type": "INTEGER"}, "minItems": "2"},
        },
        "propertyOrdering": ["a"],
    }
    tools = [{"functionDeclarations": [{"name": "f", "parameters": own}]}]
    body, changed = translate({**HI["gemini"], "tools": tools}, "gemini", "openai-chat")
    assert body["tools"][0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": ["string", "null"]},
            "type": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
        },
    }
    assert not changed


def test_gemini_accepts_snake_case() -> None:
    request = {
        "system_instruction": {"parts": [{"text": "s"}]},
        "contents": [{"parts": [{"inline_data": {"mime_type": "image/png", "data": PIXEL}}]}],
        "generation_config": {"max_output_tokens": 7, "stop_sequences": ["x"]},
    }
    body, changed = translate(request, "gemini", "anthropic", "m")
    assert (body["system"], body["max_tokens"], body["stop_sequences"]) == ("s", 7, ["x"]) and not changed
    assert body["messages"][0]["content"][0]["source"]["data"] == PIXEL


def test_gemini_calls_get_generated_ids() -> None:
    body, _ = translate(GEMINI, "gemini", "openai-chat")
    calls = body["messages"][2]["tool_calls"]
    results = [row["tool_call_id"] for row in body["messages"] if row["role"] == "tool"]
    assert [call["id"] for call in calls] == results and len(set(results)) == 2
    assert translate(GEMINI, "gemini", "openai-chat")[0] == body  # the same each time
    back, _ = translate(body, "openai-chat", "gemini", "gemini-2.5-pro")
    assert "id" not in json.dumps(back["contents"])
    assert [part["functionResponse"]["name"] for part in back["contents"][2]["parts"][:2]] == ["weather", "weather"]


def test_gemini_results_match_calls_by_name() -> None:
    """A result without an id is matched to the first open call of its name."""
    contents = [
        {
            "role": "model",
            "parts": [{"functionCall": {"name": "a", "args": {}}}, {"functionCall": {"name": "b", "args": {}}}],
        },
        {
            "role": "user",
            "parts": [{"functionResponse": {"name": name, "response": {"output": name}}} for name in "ba"],
        },
    ]
    body, _ = translate({"contents": contents}, "gemini", "openai-chat")
    names = {call["id"]: call["function"]["name"] for call in body["messages"][0]["tool_calls"]}
    assert [(names[row["tool_call_id"]], row["content"]) for row in body["messages"][1:]] == [("b", "b"), ("a", "a")]


def test_tool_results_precede_user_text() -> None:
    contents = [
        {"role": "model", "parts": [{"functionCall": {"name": "a", "args": {}}}]},
        {
            "role": "user",
            "parts": [{"text": "well?"}, {"functionResponse": {"name": "a", "response": {"output": "x"}}}],
        },
    ]
    body, _ = translate({"contents": contents}, "gemini", "anthropic")
    assert [block["type"] for block in body["messages"][1]["content"]] == ["tool_result", "text"]
    body, _ = translate({"contents": contents}, "gemini", "openai-chat")
    assert [row["role"] for row in body["messages"]] == ["assistant", "tool", "user"]


def test_tool_ids_are_made_valid_for_anthropic() -> None:
    request = json.loads(json.dumps(CHAT).replace("call_1", "functions.weather:0"))
    body, changed = translate(request, "openai-chat", "anthropic")
    assert body["messages"][1]["content"][-2]["id"] == "functions_weather_0"
    assert body["messages"][2]["content"][0]["tool_use_id"] == "functions_weather_0"
    assert "characters" in changed["messages[].tool_call_id"]


def test_reasoning_is_sent_only_to_its_origin() -> None:
    for source, request in REQUESTS.items():
        for target in DIALECTS:
            if source == target:
                continue
            body, changed = translate(request, source, target)
            assert "A city." not in json.dumps(body) and any(
                "only the provider that produced" in why for why in changed.values()
            )
            welcome, changed = translate(request, source, target, TargetModel("qwen3", accepts_reasoning=True))
            assert "A city." in json.dumps(welcome) and not any(
                "only the provider that produced" in why for why in changed.values()
            )


def test_signature_returns_to_its_origin() -> None:
    """A client in Anthropic's format returns signatures of Gemini, OpenAI and Claude."""
    blocks = [
        {"type": "thinking", "thinking": "", "signature": "gemini:Z2Vt"},
        {"type": "thinking", "thinking": "so", "signature": "openai-responses:b3A="},
        {"type": "tool_use", "id": "x", "name": "f", "input": {}},
    ]
    request = {**HI["anthropic"], "messages": [{"role": "assistant", "content": blocks}]}
    body, _ = translate(request, "anthropic", "gemini")
    assert body["contents"][0]["parts"] == [
        {"functionCall": {"id": "x", "name": "f", "args": {}}, "thoughtSignature": "Z2Vt"}
    ]
    body, _ = translate(request, "anthropic", "openai-responses")
    sealed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}], "encrypted_content": "b3A="}
    assert body["input"][0] == sealed
    own = {**HI["anthropic"], "messages": [{"role": "assistant", "content": ANTHROPIC["messages"][1]["content"]}]}
    through, _ = translate(RESPONSES, "openai-responses", "anthropic")
    assert "thinking" not in json.dumps(through["messages"])  # Claude cannot read OpenAI's signature
    assert translate(own, "anthropic", "anthropic", "m")[0] == own


def test_chat_returns_google_signature() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    signed = call | {"extra_content": {"google": {"thought_signature": "Z2Vt"}}}
    request = {"model": "m", "messages": [{"role": "assistant", "content": None, "tool_calls": [signed]}]}
    body, changed = translate(request, "openai-chat", "gemini")
    assert body["contents"][0]["parts"][0]["thoughtSignature"] == "Z2Vt" and not changed
    assert "extra_content" in str(translate(request, "openai-chat", "anthropic")[1])


def test_images_in_tool_results() -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    blocks = [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "see"}, picture]}]
    request = {**HI["anthropic"], "messages": [{"role": "user", "content": blocks}]}
    body, changed = translate(request, "anthropic", "openai-chat")
    assert body["messages"][0] == {"role": "tool", "tool_call_id": "toolu_1", "content": "see"}
    assert body["messages"][1]["content"][0]["type"] == "image_url" and "moved to a user message" in str(changed)
    body, changed = translate(request, "anthropic", "openai-responses")
    assert [part["type"] for part in body["input"][0]["output"]] == ["input_text", "input_image"] and not changed
    body, _ = translate(request, "anthropic", "gemini")
    assert body["contents"][0]["parts"][0]["functionResponse"]["parts"][0]["inlineData"]["data"] == PIXEL


MEDIA = [  # part of a chat message, and the wire formats that accept it
    ({"type": "file", "file": {"file_id": "file-1"}}, {"openai-responses"}),
    ({"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA", "filename": "a.pdf"}}, set(DIALECTS)),
    ({"type": "file", "file": {"file_data": "data:text/csv;base64,YSxi", "filename": "a.csv"}}, set(DIALECTS)),
    ({"type": "file", "file": {"file_data": "data:application/zip;base64,AAAA"}}, {"openai-responses", "gemini"}),
    ({"type": "image_url", "image_url": {"url": "https://x/y.png"}}, set(DIALECTS)),
    ({"type": "image_url", "image_url": {"url": "data:image/heic;base64,AAAA"}}, {"openai-responses", "gemini"}),
]


@pytest.mark.parametrize(("part", "takers"), MEDIA)
def test_media_is_translated_or_dropped(part: Any, takers: set[ChatDialect]) -> None:
    request = {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, part]}],
        "max_tokens": 5,
    }
    for target in DIALECTS[1:]:
        body, changed = translate(request, "openai-chat", target)
        message = next(value[0] for name, value in body.items() if name in ("messages", "input", "contents"))
        got = message.get("parts") or message["content"]
        assert (len(got) == 2 and not changed) if target in takers else (changed and got in ("hi", [{"text": "hi"}]))


def test_unsupported_audio_is_rejected() -> None:
    part = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    request = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, part]}]}
    body, changed = translate(request, "openai-chat", "gemini")
    assert len(body["contents"][0]["parts"]) == 2 and not changed
    for target in ("anthropic", "openai-responses"):
        with pytest.raises(
            InvalidRequest, match=r"input_audio part \(audio/wav\).*, but .* does not accept audio"
        ) as refused:
            translate(request, "openai-chat", target)
        assert refused.value.param == "messages"


def test_allowed_tools() -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "a"}}]}
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    request = {
        **HI["openai-chat"],
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 5,
    }
    body, changed = translate(request, "openai-chat", "anthropic")
    assert [tool["name"] for tool in body["tools"]] == ["a"] and changed.keys() == {"tool_choice"}
    assert body["tool_choice"] == {"type": "any", "disable_parallel_tool_use": True}
    body, changed = translate(request, "openai-chat", "gemini")
    assert body["toolConfig"]["functionCallingConfig"] == {"mode": "ANY", "allowedFunctionNames": ["a"]}
    assert changed.keys() == {"parallel_tool_calls"}
    body, _ = translate(request, "openai-chat", "openai-responses")
    assert body["tool_choice"] == {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "a"}],
    }
    named = {**request, "tool_choice": {"type": "function", "function": {"name": "b"}}}
    assert translate(named, "openai-chat", "anthropic")[0]["tool_choice"]["name"] == "b"
    back, _ = translate(translate(named, "openai-chat", "gemini")[0], "gemini", "openai-chat")
    assert back["tool_choice"] == named["tool_choice"]


def test_openai_fields_survive_between_chat_and_responses() -> None:
    own = {"service_tier": "flex", "prompt_cache_key": "k", "safety_identifier": "s", "verbosity": "low", "store": True}
    body, changed = translate(HI["openai-chat"] | own, "openai-chat", "openai-responses")
    assert body["text"] == {"verbosity": "low"} and body["store"] is True and not changed
    assert (body["service_tier"], body["prompt_cache_key"], body["safety_identifier"]) == ("flex", "k", "s")
    body, changed = translate(HI["openai-chat"] | own | {"max_tokens": 5}, "openai-chat", "anthropic")
    assert body["metadata"] == {"user_id": "s"}
    assert changed.keys() == {"service_tier", "prompt_cache_key", "verbosity", "store"}


def test_cache_control_is_dropped_and_reported() -> None:
    body, changed = translate(ANTHROPIC, "anthropic", "openai-chat")
    assert "cache_control" not in json.dumps(body) and changed["system[].cache_control"]


def test_every_dropped_field_is_reported() -> None:
    """An unknown field is reported wherever it stands in the request."""
    unknown_places: dict[ChatDialect, list[tuple[list[Any], str]]] = {
        "openai-chat": [
            ([], ""),
            (["messages", 1, "content", 0], "messages[].content[]."),
            (["tools", 0], "tools[]."),
            (["stream_options"], "stream_options."),
        ],
        "openai-responses": [([], ""), (["input", 0, "content", 0], "input[].content[]."), (["text"], "text.")],
        "anthropic": [
            ([], ""),
            (["messages", 1, "content", 1], "messages[].content[]."),
            (["output_config"], "output_config."),
            (["metadata"], "metadata."),
        ],
        "gemini": [
            ([], ""),
            (["contents", 0, "parts", 0], "contents[].parts[]."),
            (["generationConfig"], "generationConfig."),
            (["toolConfig"], "toolConfig."),
            (["toolConfig", "functionCallingConfig"], "toolConfig.functionCallingConfig."),
        ],
    }
    for source, places in unknown_places.items():
        for path, prefix in places:
            empty: dict[str, Any] = {"openai-responses": {"text": {}}, "anthropic": {"metadata": {}}}.get(source, {})
            request = json.loads(json.dumps(empty | REQUESTS[source]))
            place = request
            for step in path:
                place = place[step]
            place["strangeThing"] = 1
            for target in DIALECTS:
                if target != source:
                    body, changed = translate(request, source, target)
                    assert f"{prefix}strangeThing" in changed and "strange" not in json.dumps(body)


@pytest.mark.parametrize(
    ("source", "request_", "param"),
    [
        ("openai-chat", {"model": "m"}, "messages"),
        ("openai-chat", {"messages": "hi"}, "messages"),
        ("openai-chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("openai-chat", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ("openai-chat", {**HI["openai-chat"], "temperature": "hot"}, "temperature"),
        ("openai-chat", {**HI["openai-chat"], "tool_choice": "maybe"}, "tool_choice"),
        ("openai-chat", {**HI["openai-chat"], "stop": 5}, "stop"),
        ("anthropic", {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ("anthropic", {**HI["anthropic"], "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ("openai-responses", {"input": [{"role": "x", "content": "y"}]}, "input[0].role"),
        ("openai-responses", {"input": 5}, "input"),
        (
            "gemini",
            {"contents": [{"parts": [{"functionCall": {"args": {}}}]}]},
            "contents[0].parts[0].functionCall.name",
        ),
        ("gemini", {"contents": [5]}, "contents[0]"),
    ],
)
def test_invalid_request_names_field(source: ChatDialect, request_: dict[str, Any], param: str) -> None:
    target: ChatDialect = "anthropic" if source != "anthropic" else "gemini"
    with pytest.raises(InvalidRequest) as raised:
        translate(request_, source, target)
    assert raised.value.param == param


def test_gemini_stream_flag_is_in_url() -> None:
    body, _ = translate(HI["gemini"], "gemini", "openai-chat", stream=True)
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert "stream" not in translate(CHAT, "openai-chat", "gemini")[0]


def test_strict_tools() -> None:
    """Strict tools get a schema in the target's form; keywords that it lacks are reported."""
    loose = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}, "b": {}}, "required": ["a"]}
    exact = {**loose, "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    for schema in (exact, loose):
        function = {"name": "f", "parameters": schema, "strict": True}
        request = {**HI["openai-chat"], "max_tokens": 9, "tools": [{"type": "function", "function": function}]}
        body, changed = translate(request, "openai-chat", "anthropic")
        tool = body["tools"][0]
        assert tool["strict"] is True and tool["input_schema"]["additionalProperties"] is False
        assert changed.keys() == (set() if schema is exact else {"tools[].maxLength", "tools[].additionalProperties"})
        body, changed = translate(request, "openai-chat", "anthropic", "claude-opus-4-1")
        assert "strict" not in body["tools"][0] and body["tools"][0]["input_schema"] == schema
        assert changed.keys() == {"tools[].strict"}
        tool = {"type": "custom", "name": "f", "input_schema": schema, "strict": True}
        body, changed = translate({**HI["anthropic"], "tools": [tool]}, "anthropic", "openai-chat")
        assert body["tools"][0]["function"] == {"name": "f", "parameters": schema, "strict": schema is exact}
        assert changed.keys() == (set() if schema is exact else {"tools[].strict"})
        body, _ = translate(request, "openai-chat", "openai-responses")
        assert body["tools"][0]["strict"] is True


def test_claude_output_format() -> None:
    """The older field output_format is accepted too; older models support neither."""
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {}, "additionalProperties": False}}
    body, changed = translate({**HI["anthropic"], "output_format": form}, "anthropic", "openai-chat")
    assert body["response_format"]["json_schema"]["schema"] == form["schema"] and not changed
    same, _ = translate({**HI["anthropic"], "output_format": form}, "anthropic", "anthropic", "m")
    assert same == {**HI["anthropic"], "output_format": form}
    back, changed = translate(body, "openai-chat", "anthropic", "claude-3-5-haiku-20241022")
    assert "output_config" not in back and "not support schemas" in changed["response_format"]


def test_parallel_tool_calls_dropped_without_tools() -> None:
    """OpenAI's chat rejects parallel_tool_calls without tools."""
    request: dict[str, Any] = {**HI["openai-responses"], "parallel_tool_calls": False}
    body, changed = translate(request, "openai-responses", "openai-chat")
    assert "parallel_tool_calls" not in body and not changed
    request["tools"] = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    assert translate(request, "openai-responses", "openai-chat")[0]["parallel_tool_calls"] is False


def test_gemini_validated_mode_is_reported() -> None:
    tools = [{"functionDeclarations": [{"name": "f"}]}]
    calling = {"functionCallingConfig": {"mode": "VALIDATED"}}
    body, changed = translate({**HI["gemini"], "tools": tools, "toolConfig": calling}, "gemini", "openai-chat")
    assert body["tool_choice"] == "auto" and changed.keys() == {"toolConfig.functionCallingConfig.mode"}
