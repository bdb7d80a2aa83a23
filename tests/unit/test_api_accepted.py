"""Fields that have no effect: hints are accepted and named in the reply's header, defaults and nulls are accepted, and
what would change the answer is refused by name. The same rule in all four protocols."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_engine import House

from emberline.api.anthropic import request as anthropic
from emberline.api.fields import IGNORED_FIELDS_HEADER
from emberline.api.openai import chat, completions
from emberline.api.responses import request as responses
from emberline.core.errors import InvalidRequest
from emberline.gateway.cache.entry import KEPT_HEADERS
from emberline.gateway.layers.retries import _DROPPED_HEADERS
from emberline.server.routing.relay import _reply_headers

USER = {"role": "user", "content": "hi"}
LEAST: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (chat.parse, {"messages": [USER]}),
    "completions": (completions.parse, {"prompt": "hi"}),
    "responses": (responses.parse, {"input": "hi"}),
    "messages": (anthropic.parse, {"messages": [USER], "max_tokens": 9}),
}
OPENAI = ("chat", "completions", "responses")


def parsed(protocol: str, **fields: Any) -> Any:
    parse, least = LEAST[protocol]
    return parse(json.dumps({**least, **fields}).encode())


HINTS: list[tuple[tuple[str, ...], dict[str, Any], list[str]]] = [
    (("chat", "completions"), {"store": True}, ["store"]),
    (("chat", "responses"), {"verbosity": "high"}, ["verbosity"]),
    (OPENAI, {"prompt_cache_retention": "24h"}, ["prompt_cache_retention"]),
    (OPENAI, {"prompt_cache_key": "k"}, ["prompt_cache_key"]),
    (OPENAI, {"cache_prompt": True, "id_slot": 3}, ["cache_prompt", "id_slot"]),
    (OPENAI, {"timings_per_token": True, "return_progress": True}, ["timings_per_token", "return_progress"]),
    (("chat",), {"prediction": {"type": "content", "content": "x"}}, ["prediction"]),
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
    (("messages",), {"betas": ["x"], "service_tier": "auto", "speed": "fast"}, ["speed", "betas", "service_tier"]),
]


@pytest.mark.parametrize(("protocols", "fields", "ignored"), HINTS)
def test_hints_are_accepted_and_named(protocols: tuple[str, ...], fields: dict[str, Any], ignored: list[str]) -> None:
    for protocol in protocols:
        assert parsed(protocol, **fields).ignored == ignored, protocol


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
    (("messages",), {"context_management": {}}, {"context_management": {"edits": [{"type": "clear"}]}}),
    (("messages", "responses"), {"context_management": []}, {"context_management": [{"type": "compaction"}]}),
    (("messages",), {"mcp_servers": []}, {"mcp_servers": [{}]}),
    (("messages",), {"output_format": None}, {"output_format": {"type": "xml"}}),
]


@pytest.mark.parametrize(("protocols", "default", "other"), DEFAULTS)
def test_a_default_is_accepted_and_another_value_refused_by_name(
    protocols: tuple[str, ...], default: dict[str, Any], other: dict[str, Any]
) -> None:
    for protocol in protocols:
        assert parsed(protocol, **default) == parsed(protocol), protocol
        with pytest.raises(InvalidRequest) as caught:
            parsed(protocol, **other)
        assert (caught.value.param or "").startswith(next(iter(other))), protocol


def test_any_null_is_accepted_and_anything_else_unknown_is_refused() -> None:
    for protocol in LEAST:
        assert parsed(protocol, whatever=None) == parsed(protocol)
        with pytest.raises(InvalidRequest) as caught:
            parsed(protocol, whatever=0)
        assert caught.value.param == "whatever"
    noted = {**USER, "note": None}
    assert parsed("chat", messages=[noted]).messages == parsed("chat").messages
    assert parsed("messages", messages=[noted], tool_choice={"type": "auto", "disable_parallel_tool_use": None})
    with pytest.raises(InvalidRequest):
        parsed("chat", messages=None)


def test_a_null_inside_a_schema_stays() -> None:
    schema = {"type": "object", "properties": {"a": {"default": None}}}
    call = parsed("chat", unknown=None, response_format={"type": "json_object", "schema": schema})
    assert json.loads(call.params.grammar.text) == schema


GRAMMARS: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"regex": "a+"}, ("regex", "a+")),
    ({"ebnf": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
    ({"grammar": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
    ({"json_schema": {"type": "object"}}, ("json_schema", '{"type":"object"}')),
    ({"json_schema": '{"type": "object"}'}, ("json_schema", '{"type":"object"}')),
]


@pytest.mark.parametrize(("fields", "grammar"), GRAMMARS)
def test_formats_as_sglang_and_llama_cpp_spell_them(fields: dict[str, Any], grammar: tuple[str, str]) -> None:
    for protocol in OPENAI:
        made = parsed(protocol, **fields).params.grammar
        assert (made.kind, made.text) == grammar, protocol


def test_formats_in_llama_cpps_places() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert parsed("chat", response_format=form).params.grammar.kind == "json_schema"
    with pytest.raises(InvalidRequest) as caught:
        parsed("chat", response_format={"type": "json_schema"})
    assert caught.value.param == "response_format.json_schema"


def test_the_limit_as_llama_cpp_names_it() -> None:
    for protocol in ("chat", "completions"):
        assert parsed(protocol, n_predict=7) == parsed(protocol, max_tokens=7)
        assert parsed(protocol, n_predict=-1, max_tokens=7).params.max_tokens == 7
        assert parsed(protocol, n_predict=-1).params.max_tokens is None
        with pytest.raises(InvalidRequest, match="max_tokens is 8 and n_predict is 7"):
            parsed(protocol, n_predict=7, max_tokens=8)
    with pytest.raises(InvalidRequest) as caught:
        parsed("chat", n_predict=0)
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


def test_messages_come_back_as_clients_resend_them() -> None:
    answer = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    call = parsed("chat", messages=[USER, RESENT, answer])
    function = {"name": "f", "arguments": {"a": 1}}
    said = {"role": "assistant", "content": "", "reasoning_content": "why"}
    assert call.messages[1] == {**said, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    with pytest.raises(InvalidRequest) as caught:
        parsed("chat", messages=[USER, {**RESENT, "audio": {"id": "a"}}])
    assert caught.value.param == "messages[1].audio"


def chunks_of(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]


def written(before: str, index: int) -> str:
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
def test_the_reply_names_what_had_no_effect(path: str, expected: str, stream: bool) -> None:
    house = House(written)
    answer = house.post(path, {**PATHS[path], "model": "m", "stream": stream})
    assert answer.status == 200, answer.body
    assert answer.headers[IGNORED_FIELDS_HEADER] == expected
    plain = {
        name: value for name, value in PATHS[path].items() if name in ("messages", "prompt", "input", "max_tokens")
    }
    assert IGNORED_FIELDS_HEADER not in house.post(path, plain).headers


def test_the_only_model_need_not_be_named() -> None:
    for fields in ({}, {"model": ""}, {"model": None}):
        answer = House(written).post("/v1/chat/completions", {"messages": [USER], **fields})
        assert answer.status == 200 and answer.json["model"] == "m"


def test_a_request_names_its_reply() -> None:
    for name in ("request_id", "rid"):
        body = {"messages": [USER], name: "mine-1"}
        assert House(written).post("/v1/chat/completions", body).json["id"] == "chatcmpl-mine-1"


def test_a_prompt_is_cut_to_its_last_or_first_tokens() -> None:
    house = House(written)
    reply = house.post("/v1/completions", {"prompt": "0123456789", "truncate_prompt_tokens": 4}).json
    assert reply["usage"]["prompt_tokens"] == 4
    assert house.tokenizer.decode(house.engine.submissions[-1].prompt) == "6789"
    cut = {"truncate_prompt_tokens": 4, "truncation_side": "right"}
    assert house.post("/v1/completions", {"prompt": "0123456789", **cut}).json["usage"]["prompt_tokens"] == 4
    assert house.tokenizer.decode(house.engine.submissions[-1].prompt) == "0123"
    long = {"prompt": "x" * 5000, "truncate_prompt_tokens": -1, "max_tokens": 1}
    assert house.post("/v1/completions", long).json["usage"]["prompt_tokens"] == 3999


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_those_of_the_text(stream: bool) -> None:
    house = House(written)
    asked = {"return_token_ids": True, "stream": stream, "skip_special_tokens": False}
    answer = house.post("/v1/chat/completions", {"messages": [USER], **asked})
    if stream:
        chunks = chunks_of(answer.body)
        ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids", ())]
        prompts = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    else:
        ids, prompts = answer.json["choices"][0]["token_ids"], [answer.json["prompt_token_ids"]]
    assert house.tokenizer.decode(ids).startswith("abcdefgh") and prompts == [house.engine.submissions[0].prompt]
    body = {"prompt": "hi|", **asked}
    answer = house.post("/v1/completions", body)
    choices = [c for chunk in chunks_of(answer.body) for c in chunk["choices"]] if stream else answer.json["choices"]
    ids = [i for choice in choices for i in choice["token_ids"]]
    assert house.tokenizer.decode(ids).startswith("abcdefgh")
    assert [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c] == [house.engine.submissions[1].prompt]


def test_bad_words_become_tokens_with_and_without_a_space() -> None:
    house = House(written)
    assert house.post("/v1/completions", {"prompt": "hi", "bad_words": ["ab"]}).status == 200
    encode = house.tokenizer.encode
    assert house.engine.submissions[0].params.bad_words == (tuple(encode("ab", False)), tuple(encode(" ab", False)))
    refused = house.post("/v1/completions", {"prompt": "hi", "allowed_token_ids": [1 << 30]})
    assert refused.status == 400 and refused.json["error"]["param"] == "allowed_token_ids"


def test_what_ended_a_reply() -> None:
    reply = House(written).post("/v1/completions", {"prompt": "hi", "stop": ["d"]}).json["choices"][0]
    assert (reply["stop_reason"], reply["matched_stop"]) == ("d", "d")


def test_a_prompt_too_long_is_refused_in_the_words_that_clients_look_for() -> None:
    refused = House(written).post("/v1/completions", {"prompt": "x" * 5000})
    assert refused.status == 400 and refused.json["error"]["code"] == "context_length_exceeded"
    assert "this model's maximum context length is 4000 tokens" in refused.json["error"]["message"]


def test_routers_and_gateways_pass_the_header_on() -> None:
    assert _reply_headers({IGNORED_FIELDS_HEADER: "store", "connection": "close"})[1] == {
        IGNORED_FIELDS_HEADER: "store"
    }
    assert IGNORED_FIELDS_HEADER not in _DROPPED_HEADERS and IGNORED_FIELDS_HEADER in KEPT_HEADERS
