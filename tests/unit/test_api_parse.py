"""The JSON decoder of all endpoints: every error is a 400 that names the field."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.api import fields, tokenize
from emberline.api.anthropic import request as anthropic
from emberline.api.openai import chat as openai_chat
from emberline.api.openai import completions as openai_completions
from emberline.api.openai import embeddings as openai_embeddings
from emberline.api.parse import MAX_JSON_DEPTH, WireStruct, decode, decode_json_object, encode_json_text
from emberline.api.responses import request as responses
from emberline.core.config import ServerConfig
from emberline.core.errors import InvalidRequest
from emberline.worker import assembly, protocols


class Inner(WireStruct):
    text: str


class Outer(WireStruct):
    name: str
    items: list[Inner] | None = None
    bias: dict[int, float] | None = None
    anything: Any = None
    refused: None = None


def nested(depth: int) -> bytes:
    return b'{"name":"a","anything":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"null", None),
        (b"[]", None),
        (b'{"name":"\xff"}', None),
        (b'{"name":"\\ud800"}', None),
        (b'{"name":NaN}', None),
        (b'{"name":"a"} x', None),
        (b"{}", "name"),
        (b'{"name":1}', "name"),
        (b'{"name":"a","mystery":1}', "mystery"),
        (b'{"name":"a","a`b":1}', "a`b"),
        (b'{"name":"a","items":[{"text":"x"},{"text":3}]}', "items[1].text"),
        (b'{"name":"a","items":[{}]}', "items[0].text"),
        (b'{"name":"a","items":[{"text":"x","more":1}]}', "items[0].more"),
        (b'{"name":"a","items":[7]}', "items[0]"),
        (b'{"name":"a","bias":{"x":1}}', "bias"),
        (b'{"name":"a","bias":{"1":"x"}}', "bias[...]"),
        (b'{"name":"a","bias":{"1":1e999}}', "bias[...]"),
        (b'{"name":"a","refused":{}}', "refused"),
        (nested(100_000), None),
        (nested(MAX_JSON_DEPTH + 1), None),
    ],
)
def test_errors_name_the_field(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(body, Outer)
    assert caught.value.param == param
    assert caught.value.status == 400


def test_depth_counts_nesting_only() -> None:
    decode(nested(MAX_JSON_DEPTH), Outer)
    decode(b'{"name":"a","anything":[' + b"[]," * 5000 + b"0]}", Outer)
    decode(b'{"name":"a","anything":"' + b'[{\\"' * 5000 + b'"}', Outer)


def test_long_field_name_is_truncated_in_error() -> None:
    for body in (b'{"name":"a","%b":1}' % (b"x" * 100_000), b'{"name":"a","items":[{"text":%b}]}' % (b"9" * 100_000)):
        with pytest.raises(InvalidRequest) as caught:
            decode(body, Outer)
        assert len(str(caught.value)) < 1000


def test_decode_object_in_text() -> None:
    assert decode_json_object('{"a":[1]}', "x") == {"a": [1]}
    for text in ("", "[]", '"a"', "{", "[" * 5000, '{"a":' * 100 + "1" + "}" * 100):
        with pytest.raises(InvalidRequest) as caught:
            decode_json_object(text, "tool_calls[0].arguments")
        assert caught.value.param == "tool_calls[0].arguments"


def test_large_integers_are_preserved() -> None:
    huge = {"maximum": 10**30}
    assert decode_json_object(encode_json_text(huge), "x") == huge


PARSERS = [
    openai_chat.parse,
    openai_completions.parse,
    openai_embeddings.parse,
    responses.parse,
    anthropic.parse,
    anthropic.parse_count_tokens,
    tokenize.parse,
    tokenize.parse_detokenize,
]
FIELDS = ["model", "messages", "prompt", "input", "tools", "tool_choice", "role", "content", "type", "text", "tokens"]
FIELDS += ["response_format", "json_schema", "stop", "logit_bias", "function", "name", "arguments", "stream_options"]
WORDS = st.sampled_from(
    ["user", "assistant", "tool", "system", "text", "function", "message", "json_schema", "auto", "m"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS) | st.text(), inner, max_size=5),
    max_leaves=20,
)


@settings(deadline=None)
@given(st.sampled_from(PARSERS), JSON | st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8))
def test_any_json_parses_or_is_rejected(parse: Any, value: Any) -> None:
    with contextlib.suppress(InvalidRequest):
        parse(encode_json_text(value).encode())


@settings(deadline=None)
@given(st.sampled_from(PARSERS), st.binary())
def test_any_bytes_parse_or_are_rejected(parse: Any, body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse(body)


def test_warm_up_fills_parser_caches() -> None:
    for cached in (fields._find_field_rules, fields._resolve_type_hints):
        cached.cache_clear()
    assembly.preload_resources(ServerConfig(models={"m": "m"}, embedder=None), {})
    tables, hints = fields._find_field_rules.cache_info(), fields._resolve_type_hints.cache_info()
    for each in protocols.PROTOCOLS.values():
        each.parse(each.smallest_body)
    assert fields._find_field_rules.cache_info().misses == tables.misses
    assert fields._resolve_type_hints.cache_info().misses == hints.misses
