"""Fields without effect, in all four protocols.

Hints are accepted and listed in a reply header, default values and nulls are accepted, and any other value is rejected
by the field's name.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_engine import WorkerHarness

from emberline.api.anthropic import request as anthropic
from emberline.api.fields import IGNORED_FIELDS_HEADER, MAX_LISTED_FIELDS, IgnoredFields
from emberline.api.openai import chat, completions, embeddings
from emberline.api.parse import MAX_UNKNOWN_FIELDS
from emberline.api.responses import request as responses
from emberline.core.errors import InvalidRequest
from emberline.gateway.cache.entry import KEPT_HEADERS
from emberline.gateway.layers.retries import _DROPPED_HEADERS
from emberline.router.http.reply_relay import content_type_and_headers
from emberline.worker.ignored_fields import IgnoredFieldPolicy

USER = {"role": "user", "content": "hi"}
LEAST: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (chat.parse, {"messages": [USER]}),
    "completions": (completions.parse, {"prompt": "hi"}),
    "responses": (responses.parse, {"input": "hi"}),
    "messages": (anthropic.parse, {"messages": [USER], "max_tokens": 9}),
    "count_tokens": (anthropic.parse_count_tokens, {"messages": [USER]}),
    "embeddings": (embeddings.parse, {"input": "hi"}),
}
OPENAI = ("chat", "completions", "responses")


def parse_request(protocol: str, **fields: Any) -> Any:
    parse, least = LEAST[protocol]
    return parse(json.dumps({**least, **fields}).encode())


HINTS: list[tuple[tuple[str, ...], dict[str, Any], list[str]]] = [
    (("chat", "completions"), {"store": True}, ["store"]),
    (("chat", "responses"), {"verbosity": "high"}, ["verbosity"]),
    (OPENAI, {"prompt_cache_retention": "24h"}, ["prompt_cache_retention"]),
    (OPENAI, {"prompt_cache_key": "k"}, ["prompt_cache_key"]),
    (OPENAI, {"cache_prompt": True, "id_slot": 3}, ["cache_prompt", "id_slot"]),
    (OPENAI, {"timings_per_token": True, "return_progress": True}, ["timings_per_token", "return_progress"]),
    (("responses",), {"prediction": {"type": "content", "content": "x"}}, ["prediction"]),
    (
        OPENAI,
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        ["stream_options.include_obfuscation"],
    ),
    (
        ("chat", "completions"),
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        ["stream_options.continuous_usage_stats"],
    ),
    (("responses",), {"text": {"verbosity": "low"}}, ["text.verbosity"]),
    (("messages",), {"context_management": {"edits": [{"type": "clear"}]}}, ["context_management"]),
    (("responses",), {"context_management": [{"type": "compaction"}]}, ["context_management"]),
    (("messages",), {"mcp_servers": [{}], "container": "c"}, ["mcp_servers", "container"]),
    (("messages",), {"diagnostics": {}, "inference_geo": "eu"}, ["diagnostics", "inference_geo"]),
    (("chat",), {"web_search_options": {}}, ["web_search_options"]),
    (("responses",), {"truncation": "auto"}, ["truncation"]),
    (("responses",), {"reasoning": {"summary": "none"}}, ["reasoning.summary"]),
    (("responses",), {"stream": True, "stream_options": {"include_usage": True}}, ["stream_options.include_usage"]),
    (OPENAI, {"guided_decoding_backend": "guidance"}, ["guided_decoding_backend"]),
    (("messages",), {"betas": ["x"], "service_tier": "auto", "speed": "fast"}, ["speed", "betas", "service_tier"]),
]


@pytest.mark.parametrize(("protocols", "fields", "ignored"), HINTS)
def test_ignored_fields_are_listed(protocols: tuple[str, ...], fields: dict[str, Any], ignored: list[str]) -> None:
    for protocol in protocols:
        assert parse_request(protocol, **fields).ignored == IgnoredFields(known=tuple(ignored)), protocol


DEFAULTS: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = [
    (("chat", "completions"), {"best_of": 1}, {"best_of": 2}),
    (("responses",), {"echo": False}, {"echo": True}),
    (OPENAI, {"length_penalty": 1.0}, {"length_penalty": 2.0}),
    (OPENAI, {"use_beam_search": False}, {"use_beam_search": True}),
    (OPENAI, {"detokenize": True}, {"detokenize": False}),
    (OPENAI, {"kv_transfer_params": None}, {"kv_transfer_params": {"do_remote_decode": True}}),
    (OPENAI, {"mirostat": 0, "typical_p": 1.0}, {"mirostat": 2}),
    (OPENAI, {"spaces_between_special_tokens": True}, {"spaces_between_special_tokens": 3}),
    (("responses",), {"include_reasoning": True}, {"include_reasoning": False}),
    (("responses",), {"return_tokens_as_token_ids": False}, {"return_tokens_as_token_ids": True}),
    (("completions",), {"suffix": ""}, {"suffix": "x"}),
    (("chat", "responses"), {"documents": []}, {"documents": [{"text": "x"}]}),
    (("messages",), {"output_format": None}, {"output_format": {"type": "xml"}}),
]


@pytest.mark.parametrize(("protocols", "default", "other"), DEFAULTS)
def test_default_value_is_accepted_and_any_other_rejected(
    protocols: tuple[str, ...], default: dict[str, Any], other: dict[str, Any]
) -> None:
    for protocol in protocols:
        assert parse_request(protocol, **default) == parse_request(protocol), protocol
        with pytest.raises(InvalidRequest) as caught:
            parse_request(protocol, **other)
        assert (caught.value.param or "").startswith(next(iter(other))), protocol


NO_OPS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("messages",), {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
    (("messages",), {"context_management": {}, "mcp_servers": []}),
    (("messages",), {"thread": {"type": "create"}}),
    (("messages",), {"cache_control": {"type": "new", "ttl": "24h"}}),
    (("responses",), {"client_metadata": {"session_id": "s"}, "truncation": "disabled", "n": 1}),
]


@pytest.mark.parametrize(("protocols", "fields"), NO_OPS)
def test_values_that_ask_for_nothing_are_not_listed(protocols: tuple[str, ...], fields: dict[str, Any]) -> None:
    for protocol in protocols:
        assert parse_request(protocol, **fields) == parse_request(protocol)


WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search"}
FUNCTION = {"name": "f", "parameters": {}}
FOREIGN_CALL = [
    {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}},
    {"type": "text", "text": "a"},
]
UNKNOWN: list[tuple[str, dict[str, Any], list[str]]] = [
    ("chat", {"messages": [{**USER, "mood": 1}]}, ["messages[].mood"]),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
        ["messages[].content[].x"],
    ),
    ("chat", {"tools": [{"type": "custom", "custom": {}}]}, ["tools[custom]"]),
    ("chat", {"tools": [{"type": "function", "function": {**FUNCTION, "x": 1}}]}, ["tools[].function.x"]),
    ("chat", {"prediction": {"type": "content", "content": "a", "x": 1}}, ["prediction.x"]),
    ("completions", {"messages": []}, ["messages"]),
    ("embeddings", {"truncate": 1}, ["truncate"]),
    ("messages", {"messages": [{**USER, "name": "n"}]}, ["messages[].name"]),
    ("messages", {"metadata": {"user": "u"}, "typo": 1}, ["metadata.user", "typo"]),
    ("messages", {"tools": [WEB_SEARCH, {**WEB_SEARCH}]}, ["tools[web_search_20250305]"]),
    (
        "messages",
        {"messages": [USER, {"role": "assistant", "content": FOREIGN_CALL}]},
        ["messages[].content[server_tool_use]"],
    ),
    ("count_tokens", {"tools": [WEB_SEARCH], "max_tokens": 5}, ["tools[web_search_20250305]", "max_tokens"]),
    ("responses", {"input": [{"role": "user", "content": "a", "name": "n"}]}, ["input[].name"]),
    ("responses", {"input": [USER, {"type": "web_search_call", "id": "x"}]}, ["input[web_search_call]"]),
    ("responses", {"include": ["file_search_call.everything"]}, ["include[file_search_call.everything]"]),
    ("responses", {"tools": [{"type": "web_search"}, {"type": "function", **FUNCTION}]}, ["tools[web_search]"]),
    (
        "responses",
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]},
        ["tools[].tools[custom]"],
    ),
]


@pytest.mark.parametrize(("protocol", "fields", "unknown"), UNKNOWN)
def test_unknown_fields_and_hosted_tools_are_left_out(
    protocol: str, fields: dict[str, Any], unknown: list[str]
) -> None:
    call = parse_request(protocol, **fields)
    assert sorted(call.ignored.unknown) == sorted(unknown) and not call.ignored.known


def test_unknown_names_cannot_break_the_header() -> None:
    names = ["a\r\nset-cookie: x", "\u00e9\U0001f600", "b" * 10_000, "c,d", *(f"x{i}" for i in range(2000))]
    answer = WorkerHarness(script).post("/v1/chat/completions", {"messages": [USER], **dict.fromkeys(names, 1)})
    value = answer.headers[IGNORED_FIELDS_HEADER]
    assert answer.status == 200 and value.isascii() and value.isprintable() and len(value) < 4000
    assert value.startswith("a??set-cookie:?x, ??, bbb") and value.endswith(
        f"and {MAX_UNKNOWN_FIELDS - MAX_LISTED_FIELDS} more"
    )


def test_ignored_fields_are_counted_with_a_bounded_number_of_labels() -> None:
    policy = IgnoredFieldPolicy()
    for i in range(3):
        policy.apply(IgnoredFields(known=("store",), unknown=(f"x{i}", "typo")))
    policy.apply(IgnoredFields(unknown=("typo",)))
    policy.apply(IgnoredFields())
    assert policy.family().lines == [
        'emberline:ignored_fields_total{field="other"} 7',
        'emberline:ignored_fields_total{field="store"} 3',
    ]


def test_strict_server_refuses_unknown_fields_and_hosted_tools() -> None:
    worker = WorkerHarness(script, strict=True)
    for path, fields in PATHS.items():
        assert worker.post(path, fields).status == 200, "fields that the server knows are still ignored"
        refused = worker.post(path, {**fields, "mystery": 1})
        assert refused.status == 400 and b"mystery is an unknown field" in refused.body and b"--strict" in refused.body
    refused = worker.post("/v1/messages", {"messages": [USER], "max_tokens": 9, "tools": [WEB_SEARCH]})
    assert refused.status == 400 and b"tools[web_search_20250305]" in refused.body


def test_null_is_accepted_for_optional_and_unknown_fields() -> None:
    for protocol in LEAST:
        assert parse_request(protocol, whatever=None) == parse_request(protocol)
    noted = {**USER, "note": None}
    assert parse_request("chat", messages=[noted]).messages == parse_request("chat").messages
    assert parse_request("messages", messages=[noted], tool_choice={"type": "auto", "disable_parallel_tool_use": None})
    with pytest.raises(InvalidRequest):
        parse_request("chat", messages=None)


def test_null_inside_schema_is_kept() -> None:
    schema = {"type": "object", "properties": {"a": {"default": None}}}
    call = parse_request("chat", unknown=None, response_format={"type": "json_object", "schema": schema})
    assert json.loads(call.params.grammar.text) == schema


GRAMMARS: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"regex": "a+"}, ("regex", "a+")),
    ({"ebnf": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
    ({"grammar": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
    ({"json_schema": {"type": "object"}}, ("json_schema", '{"type":"object"}')),
    ({"json_schema": '{"type": "object"}'}, ("json_schema", '{"type":"object"}')),
]


@pytest.mark.parametrize(("fields", "grammar"), GRAMMARS)
def test_format_fields_of_sglang_and_llama_cpp(fields: dict[str, Any], grammar: tuple[str, str]) -> None:
    for protocol in OPENAI:
        found = parse_request(protocol, **fields).params.grammar
        assert (found.kind, found.text) == grammar, protocol


def test_same_grammar_by_two_fields_is_accepted() -> None:
    """guidance sends it by vLLM's old field and by the new one."""
    lark = 'start: "a"'
    for protocol in OPENAI:
        same = {"guided_grammar": lark, "structured_outputs": {"grammar": lark}, "guided_decoding_backend": "guidance"}
        assert parse_request(protocol, **same).params.grammar.text == lark
        with pytest.raises(InvalidRequest, match="only one of them"):
            parse_request(protocol, **same, ebnf='start: "b"')


def test_schema_fields_of_llama_cpp() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert parse_request("chat", response_format=form).params.grammar.kind == "json_schema"
    with pytest.raises(InvalidRequest) as caught:
        parse_request("chat", response_format={"type": "json_schema"})
    assert caught.value.param == "response_format.json_schema"


def test_n_predict_limits_tokens() -> None:
    for protocol in ("chat", "completions"):
        assert parse_request(protocol, n_predict=7) == parse_request(protocol, max_tokens=7)
        assert parse_request(protocol, n_predict=-1, max_tokens=7).params.max_tokens == 7
        assert parse_request(protocol, n_predict=-1).params.max_tokens is None
        with pytest.raises(InvalidRequest, match="max_tokens is 8 and n_predict is 7"):
            parse_request(protocol, n_predict=7, max_tokens=8)
    with pytest.raises(InvalidRequest) as caught:
        parse_request("chat", n_predict=0)
    assert caught.value.param == "n_predict"


RESENT = {
    "role": "assistant",
    "content": None,
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "parsed": None,
    "reasoning": "why",
    "provider_specific_fields": {"x": 1},
    "tool_calls": [
        {
            "index": 0,
            "id": "c1",
            "type": "function",
            "cache_control": {"type": "ephemeral"},
            "function": {"name": "f", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}},
        }
    ],
}


def test_resent_messages_are_accepted() -> None:
    answer = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    call = parse_request("chat", messages=[USER, RESENT, answer])
    function = {"name": "f", "arguments": {"a": 1}}
    message = {"role": "assistant", "content": "", "reasoning_content": "why"}
    assert call.messages[1] == {**message, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    with pytest.raises(InvalidRequest) as caught:
        parse_request("chat", messages=[USER, {**RESENT, "audio": {"id": "a"}}])
    assert caught.value.param == "messages[1].audio"


def chunks_of(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]


def script(before: str, index: int) -> str:
    return before + "abcdefgh"


PATHS = {
    "/v1/chat/completions": {"messages": [USER], "store": True, "reasoning_effort": "low"},
    "/v1/completions": {"prompt": "hi", "store": True},
    "/v1/messages": {"messages": [USER], "max_tokens": 9, "betas": ["x"], "thinking": {"type": "disabled"}},
    "/v1/responses": {"input": "hi", "prompt_cache_key": "k"},
}
EXPECTED = ("store, reasoning_effort", "store", "betas, thinking", "prompt_cache_key")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "expected"), list(zip(PATHS, EXPECTED, strict=True)))
def test_reply_header_lists_ignored_fields(path: str, expected: str, stream: bool) -> None:
    worker = WorkerHarness(script)
    answer = worker.post(path, {**PATHS[path], "model": "m", "stream": stream})
    assert answer.status == 200, answer.body
    assert answer.headers[IGNORED_FIELDS_HEADER] == expected
    plain = {
        name: value for name, value in PATHS[path].items() if name in ("messages", "prompt", "input", "max_tokens")
    }
    assert IGNORED_FIELDS_HEADER not in worker.post(path, plain).headers


def test_model_is_optional_with_one_model() -> None:
    for fields in ({}, {"model": ""}, {"model": None}):
        answer = WorkerHarness(script).post("/v1/chat/completions", {"messages": [USER], **fields})
        assert answer.status == 200 and answer.json["model"] == "m"


def test_request_id_becomes_reply_id() -> None:
    for name in ("request_id", "rid"):
        body = {"messages": [USER], name: "mine-1"}
        assert WorkerHarness(script).post("/v1/chat/completions", body).json["id"] == "chatcmpl-mine-1"


def test_prompt_is_truncated_on_either_side() -> None:
    worker = WorkerHarness(script)
    reply = worker.post("/v1/completions", {"prompt": "0123456789", "truncate_prompt_tokens": 4}).json
    assert reply["usage"]["prompt_tokens"] == 4
    assert worker.tokenizer.decode(worker.engine.submissions[-1].prompt) == "6789"
    cut = {"truncate_prompt_tokens": 4, "truncation_side": "right"}
    assert worker.post("/v1/completions", {"prompt": "0123456789", **cut}).json["usage"]["prompt_tokens"] == 4
    assert worker.tokenizer.decode(worker.engine.submissions[-1].prompt) == "0123"
    long = {"prompt": "x" * 5000, "truncate_prompt_tokens": -1, "max_tokens": 1}
    assert worker.post("/v1/completions", long).json["usage"]["prompt_tokens"] == 3999


@pytest.mark.parametrize("stream", [False, True])
def test_returned_token_ids_match_text(stream: bool) -> None:
    worker = WorkerHarness(script)
    options = {"return_token_ids": True, "stream": stream, "skip_special_tokens": False}
    answer = worker.post("/v1/chat/completions", {"messages": [USER], **options})
    if stream:
        chunks = chunks_of(answer.body)
        ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids", ())]
        prompts = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    else:
        ids, prompts = answer.json["choices"][0]["token_ids"], [answer.json["prompt_token_ids"]]
    assert worker.tokenizer.decode(ids).startswith("abcdefgh") and prompts == [worker.engine.submissions[0].prompt]
    body = {"prompt": "hi|", **options}
    answer = worker.post("/v1/completions", body)
    choices = [c for chunk in chunks_of(answer.body) for c in chunk["choices"]] if stream else answer.json["choices"]
    ids = [i for choice in choices for i in choice["token_ids"]]
    assert worker.tokenizer.decode(ids).startswith("abcdefgh")
    assert [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c] == [worker.engine.submissions[1].prompt]


def test_bad_words_are_tokenized_with_and_without_space() -> None:
    worker = WorkerHarness(script)
    assert worker.post("/v1/completions", {"prompt": "hi", "bad_words": ["ab"]}).status == 200
    encode = worker.tokenizer.encode
    assert worker.engine.submissions[0].params.bad_words == (tuple(encode("ab", False)), tuple(encode(" ab", False)))
    rejected = worker.post("/v1/completions", {"prompt": "hi", "allowed_token_ids": [1 << 30]})
    assert rejected.status == 400 and rejected.json["error"]["param"] == "allowed_token_ids"


def test_stop_reason_and_matched_stop() -> None:
    reply = WorkerHarness(script).post("/v1/completions", {"prompt": "hi", "stop": ["d"]}).json["choices"][0]
    assert (reply["stop_reason"], reply["matched_stop"]) == ("d", "d")


def test_long_prompt_error_has_the_message_that_clients_match() -> None:
    rejected = WorkerHarness(script).post("/v1/completions", {"prompt": "x" * 5000})
    assert rejected.status == 400 and rejected.json["error"]["code"] == "context_length_exceeded"
    assert "this model's maximum context length is 4000 tokens" in rejected.json["error"]["message"]


def test_router_and_gateway_forward_ignored_header() -> None:
    assert content_type_and_headers({IGNORED_FIELDS_HEADER: "store", "connection": "close"})[1] == {
        IGNORED_FIELDS_HEADER: "store"
    }
    assert IGNORED_FIELDS_HEADER not in _DROPPED_HEADERS and IGNORED_FIELDS_HEADER in KEPT_HEADERS
