"""Paths and bodies that gateway and provider could read differently, and private files."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.core.clock import WallClock
from emberline.core.errors import InvalidRequest
from emberline.gateway.cache.sqlite import SqliteCache
from emberline.gateway.core.options import RequestOptions
from emberline.gateway.core.paths import accepts_any_content_type, parse_path
from emberline.gateway.core.request_body import check_duplicate_keys, read_body_fields
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.providers.emberline import Emberline
from emberline.gateway.providers.registry import ProviderRegistry
from emberline.gateway.routes.universal import read_steps
from emberline.gateway.store.sqlite import SQLiteStore

ODD = ["../x", "..%2fx", "..%2Fx", "%2e%2e/x", "%2E%2e%2fx", "..\\x", "..%5cx", "a\\b", "a%5Cb", "%252e%252e/x",
       "a%2fb", "a%252fb", "./x", "%2e/x", "x/.."]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_ambiguous_path_is_refused(odd: str) -> None:
    for path in (f"/v1/default/default/openai/{odd}", f"/v1/default/{odd}/openai/chat/completions"):
        with pytest.raises(InvalidRequest, match="the path"):
            parse_path(path)
    body = b'[{"provider": "openai", "endpoint": "v1/%b", "query": {}}]' % odd.replace("\\", "\\\\").encode()
    with pytest.raises(InvalidRequest, match="the path"):
        asyncio.run(read_steps(body, RequestOptions(), GatewaySettings.parse({}), ProviderRegistry()))


def test_gemini_path_names_the_model() -> None:
    for path, model, stream in (
        ("/v1/models/openrouter/openai/gpt-5:generateContent", "openrouter/openai/gpt-5", False),
        (
            "/v1beta/models/aws-bedrock/amazon.nova-pro-v1:0:streamGenerateContent",
            "aws-bedrock/amazon.nova-pro-v1:0",
            True,
        ),
    ):
        target = parse_path(path)
        assert (target.kind, target.dialect, target.model, target.stream) == ("plain", "gemini", model, stream)
        assert not accepts_any_content_type(path)  # requires a JSON content type
    assert accepts_any_content_type("/v1/a/g/google-ai-studio/v1/models/m:generateContent")
    for path in ("/v1beta/models/:generateContent", f"/v1beta/models/{'m' * 257}:generateContent"):
        with pytest.raises(InvalidRequest, match="model"):
            parse_path(path)


def test_other_encoded_paths_are_forwarded_unchanged() -> None:
    for endpoint in ("models/gemini%3AgenerateContent", "v1/files/a..b", "@cf/meta/llama", "x/.hidden"):
        assert parse_path(f"/v1/default/default/openai/{endpoint}").endpoint == endpoint
    arn = "bedrock-runtime/us-east-1/model/arn%3Aaws%3Abedrock%3Aprofile%2Fx/converse"
    assert parse_path(f"/v1/default/default/aws-bedrock/{arn}").endpoint == arn


ARN = "arn%3Aaws%3Abedrock%3Aus-east-1%3A1%3Aprofile%2Fx"


@pytest.mark.parametrize(
    "path",
    [
        "aws-bedrock/model/..%2f..%2fx",
        f"aws-bedrock/model/{ARN}%2f..%2f..%2fx/converse",
        f"aws-bedrock/model/{ARN.replace('%2F', '%252F')}/converse",
        "aws-bedrock/model/a%2fb/converse",
        f"openai/aws-bedrock/{ARN}/x",
        f"openai/v1/aws-bedrock/model/{ARN}/converse",
        f"../aws-bedrock/{ARN}",
    ],
)
def test_encoded_slashes_are_for_bedrock_arns_only(path: str) -> None:
    for place in ("default/default", f"default/{ARN}", f"{ARN}/default", "aws-bedrock/default", "default/aws-bedrock"):
        with pytest.raises(InvalidRequest, match="the path"):
            parse_path(f"/v1/{place}/{path}")
    provider, _, endpoint = path.partition("/")
    step = {"provider": provider, "endpoint": endpoint, "query": {}}
    with pytest.raises(InvalidRequest, match="the path"):
        asyncio.run(
            read_steps(msgspec.json.encode([step]), RequestOptions(), GatewaySettings.parse({}), ProviderRegistry())
        )


def test_encoded_slash_before_bedrock_path_is_refused() -> None:
    for place in (f"default/{ARN}", f"{ARN}/default"):
        with pytest.raises(InvalidRequest, match="an encoded slash"):
            parse_path(f"/v1/{place}/aws-bedrock/model/{ARN}/converse")
    step = {"provider": "aws-bedrock", "endpoint": f"bedrock-runtime/us-east-1/model/{ARN}/converse", "query": {}}
    (read,) = asyncio.run(
        read_steps(msgspec.json.encode([step]), RequestOptions(), GatewaySettings.parse({}), ProviderRegistry())
    )
    assert read.model == "arn:aws:bedrock:us-east-1:1:profile/x"


@pytest.mark.parametrize("duplicate", [b'"model": "a", "x": 1, "model": "b"', b'"mod\\u0065l": "a", "model": "a"'])
def test_duplicate_key_is_refused_by_name(duplicate: bytes) -> None:
    with pytest.raises(InvalidRequest, match="'model' twice") as refused:
        read_body_fields(b"{%b}" % duplicate)
    assert refused.value.param == "model" and refused.value.status == 400
    assert read_body_fields(b'{"model": "a", "messages": [{"model": 1}, {"model": 2}]}').model == "a"


_SPELLINGS = [("a", "a"), ("a", r"\u0061"), ("b", "b"), ("\u00e9", "\u00e9"), ("\u00e9", r"\u00e9"), ("/", "/"),
              ("/", r"\/"), ('"', r"\""), ('"', r"\u0022"), ("\\", r"\\"), ("\x01", r"\u0001"), ("\x7f", "\x7f"),
              ("\U0001f600", "\U0001f600"), ("\U0001f600", r"\ud83d\ude00")]  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(_SPELLINGS), st.sampled_from(["1", "[ 1]", r'"\u0041"'])), max_size=6))
def test_duplicate_keys_are_found_in_any_spelling(fields: list[tuple[tuple[str, str], str]]) -> None:
    body = "{" + ",".join(f'"{written}":{value}' for (_, written), value in fields) + "}"
    if len({key for (key, _), _ in fields}) < len(fields):
        with pytest.raises(InvalidRequest, match="twice"):
            check_duplicate_keys(body.encode())
    else:
        check_duplicate_keys(body.encode())


def test_databases_are_private_to_their_owner(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        (tmp_path / "store").mkdir()
        (tmp_path / "store" / "gateway.db").touch(0o644)  # as earlier releases created it
        asyncio.run(_use(tmp_path))
    finally:
        os.umask(old)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"gateway.db", "cache.db"}
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files if path.stat().st_mode & 0o077} == {}
    assert (tmp_path / "new" / "deep").stat().st_mode & 0o777 == 0o700


async def _use(home: Path) -> None:
    for place in ("store", "new/deep"):
        store = await SQLiteStore.open(home / place)
        await store.close()
    cache = SqliteCache(home / "cache.db", WallClock())
    await cache.put("key", b"value", 60.0)
    assert await cache.get("key") == b"value"
    await cache.close()


@pytest.mark.parametrize("base", ["http://proxy:8000/serving/a", "http://proxy:8000/serving/a/v1/"])
def test_path_in_engine_url_is_kept(base: str) -> None:
    engine = Emberline(base)
    assert engine.build_url("v1/chat/completions", "") == "http://proxy:8000/serving/a/v1/chat/completions"
