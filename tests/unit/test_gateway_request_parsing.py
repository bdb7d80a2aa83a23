"""Small parts of the gateway: paths, option headers, body fields, ids, errors and settings."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.api.openai.models import ServedModel
from emberline.core.errors import InvalidRequest, NotFound
from emberline.gateway.core.cost import Price
from emberline.gateway.core.errors import ProviderErrorReply, UpstreamBroken, UpstreamTimeout
from emberline.gateway.core.identity import ANONYMOUS, Identity
from emberline.gateway.core.log_record import parse_created_ms
from emberline.gateway.core.options import NO_OPTIONS, CustomCost, RequestOptions
from emberline.gateway.core.paths import RequestTarget, parse_path
from emberline.gateway.core.request_body import read_body_fields, replace_fields
from emberline.gateway.core.settings import GatewaySettings, ProviderSettings
from emberline.gateway.core.token_estimate import TOKENS_PER_ATTACHMENT, estimate_input_tokens
from emberline.gateway.costs.catalogue import CatalogueFiles
from emberline.gateway.error_replies import error_event, error_reply, read_provider_error, read_retry_after
from emberline.gateway.gateway import resolve_model
from emberline.gateway.logs.request_ids import RequestIDGenerator
from emberline.gateway.model_lister import ModelLister
from emberline.gateway.providers.registry import ProviderRegistry
from emberline.gateway.settings_store import read_configured_gateways, with_engine_provider
from emberline.gateway.store.compression import (
    MIN_COMPRESSED_BYTES,
    SMALL_PAYLOAD_BYTES,
    compress_payload,
    decompress_payload,
)

CHAT = "chat/completions"
ENGINE = ProviderSettings(base_url="http://engine", key="k")


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/v1/chat/completions", RequestTarget("plain", endpoint=CHAT, dialect="openai-chat")),
        ("/v1/messages", RequestTarget("plain", endpoint="messages", dialect="anthropic")),
        ("/v1/messages/count_tokens", RequestTarget("plain", endpoint="messages/count_tokens")),
        ("/v1/acc/gw", RequestTarget("universal", "acc", "gw")),
        ("/v1/acc/gw/", RequestTarget("universal", "acc", "gw")),
        ("/v1/acc/gw/compat/chat/completions", RequestTarget("compat", "acc", "gw", "", CHAT, "openai-chat")),
        (
            "/v1/acc/gw/compat/v1/embeddings",
            RequestTarget("compat", "acc", "gw", "", "embeddings", "openai-embeddings"),
        ),
        ("/v1/acc/gw/openai/chat/completions", RequestTarget("native", "acc", "gw", "openai", CHAT)),
        ("/v1/acc/gw/anthropic/v1/messages", RequestTarget("native", "acc", "gw", "anthropic", "v1/messages")),
        ("/v1/acc/gw/custom-mine/a/b%20c", RequestTarget("native", "acc", "gw", "custom-mine", "a/b%20c")),
        ("/v1/acc/gw/workers-ai/@cf/meta/llama", RequestTarget("native", "acc", "gw", "workers-ai", "@cf/meta/llama")),
        ("/accounts/acc/ai/v1/embeddings", RequestTarget("plain", "acc", None, "", "embeddings", "openai-embeddings")),
    ],
)  # fmt: skip
def test_paths_are_parsed(path: str, target: RequestTarget) -> None:
    assert parse_path(path) == target


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/acc", "/v1/acc/gw/openai", "/v1/acc/gw/compat/odd", "/v2/acc/gw/openai/x"]
)
def test_unknown_paths_are_not_found(path: str) -> None:
    with pytest.raises(NotFound):
        parse_path(path)


def test_option_headers_are_read() -> None:
    request = RequestOptions.from_headers(
        {
            "cf-aig-cache-ttl": "3600",
            "cf-aig-skip-cache": "true",
            "cf-aig-request-timeout": "1500",
            "cf-aig-retry-delay": "250",
            "cf-aig-max-attempts": "5",
            "cf-aig-backoff": "linear",
            "cf-aig-metadata": '{"a": "x", "b": 2, "c": true}',
            "cf-aig-custom-cost": '{"per_token_in": 0.000001, "per_token_out": 0.0000025}',
            "cf-aig-allowed-models": "gpt-*, claude-*",
            "authorization": "Bearer x",
        }
    )
    assert (request.cache_ttl, request.skip_cache, request.request_timeout, request.retry_delay) == (
        3600,
        True,
        1.5,
        0.25,
    )
    assert (request.max_attempts, request.backoff) == (5, "linear") and request.allowed_models == ("gpt-*", "claude-*")
    assert request.metadata == {"a": "x", "b": 2, "c": True}
    assert request.custom_cost == CustomCost(Price(1_000_000, 2_500_000))
    assert RequestOptions.from_headers({"accept": "*/*"}) is NO_OPTIONS
    assert RequestOptions.from_headers({"cf-cache-ttl": "60000"}).cache_ttl == 60, "the older header is in milliseconds"
    assert RequestOptions.from_headers({"cf-aig-cache-ttl": "90", "cf-cache-ttl": "60000"}).cache_ttl == 90
    assert RequestOptions.from_headers({"cf-aig-custom-cost": '{"total_cost": 0.1}'}).custom_cost == CustomCost(
        micros=100_000
    )
    sent = '{"город": "Café"}'.encode().decode("latin-1")  # a server decodes UTF-8 headers as Latin-1
    assert RequestOptions.from_headers({"cf-aig-metadata": sent}).metadata == {"город": "Café"}
    assert RequestOptions.from_headers({"cf-aig-metadata": '{"a": "Caf\xe9"}'}).metadata == {"a": "Café"}, (
        "Latin-1 works, too"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cf-aig-cache-ttl", "59"),
        ("cf-aig-cache-ttl", "-1"),
        ("cf-aig-cache-ttl", "1e3"),
        ("cf-aig-skip-cache", "yes"),
        ("cf-aig-max-attempts", "6"),
        ("cf-aig-max-attempts", "0"),
        ("cf-aig-retry-delay", "5001"),
        ("cf-aig-backoff", "quadratic"),
        ("cf-aig-metadata", "{}}"),
        ("cf-aig-metadata", '{"a": {}}'),
        ("cf-aig-metadata", '{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1}'),
        ("cf-aig-custom-cost", '{"per_token_in": 1}'),
        ("cf-aig-custom-cost", '{"total_cost": -1}'),
        ("cf-aig-custom-cost", '{"total_cost": "NaN"}'),
        ("cf-aig-custom-cost", '{"total_cost": "-Infinity"}'),
        ("cf-aig-custom-cost", '{"total_cost": 1e999999}'),
        ("cf-aig-custom-cost", '{"total_cost": 1000001}'),
        ("cf-aig-custom-cost", '{"per_token_in": 1e18, "per_token_out": 0}'),
        ("cf-aig-custom-cost", '{"total_cost": true}'),
        ("cf-aig-otel-trace-id", "xyz"),
        ("cf-aig-event-id", ""),
    ],
)
def test_invalid_options_are_refused(name: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RequestOptions.from_headers({name: text})
    assert caught.value.param == name


def test_step_options_override_the_request() -> None:
    below = RequestOptions(cache_ttl=60, max_attempts=2, skip_cache=True)
    assert RequestOptions(max_attempts=5, skip_cache=False).with_defaults(below) == RequestOptions(
        cache_ttl=60, max_attempts=5, skip_cache=False
    )


def test_body_fields_are_read() -> None:
    seen = read_body_fields(
        b'{"model": "m", "stream": true, "max_completion_tokens": 7, "max_tokens": 9, "messages": [{"odd": 1}]}'
    )
    assert (seen.model, seen.stream, seen.max_output, seen.wants_usage) == ("m", True, 7, False)
    assert read_body_fields(b'{"stream_options": {"include_usage": true}}').wants_usage
    assert read_body_fields(b'{"model": 5, "stream": "yes", "max_tokens": "x"}').max_output is None, (
        "the provider refuses it"
    )
    gemini = read_body_fields(b'{"generationConfig": {"maxOutputTokens": 9, "candidateCount": 3}}')
    assert (gemini.max_output, gemini.choice_count) == (9, 3) and read_body_fields(b'{"n": 4}').choice_count == 4
    assert [
        read_body_fields(body).choice_count for body in (b"{}", b'{"n": true}', b'{"n": 0}', b'{"generationConfig": 5}')
    ] == [1] * 4
    for body in (b"", b"[]", b"nul", b'{"model": "\xff"}', b'{"model": "' + b"x" * 300 + b'"}'):
        with pytest.raises(InvalidRequest):
            read_body_fields(body)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda each: st.lists(each, max_size=3), max_leaves=5
)


@given(st.dictionaries(st.text(), values, max_size=5), st.text())
def test_replace_fields_keeps_other_fields(body: dict[str, Any], model: str) -> None:
    made = json.loads(replace_fields(json.dumps(body).encode(), model=model))
    assert made == {**body, "model": model} and list(made) == list({**body, "model": model})


def test_replace_fields_keeps_bytes() -> None:
    assert (
        replace_fields(b'{"a": 1.50e0,"model":"x", "b":[1 , 2]}', model="y") == b'{"a":1.50e0,"model":"y","b":[1 , 2]}'
    )


def test_estimate_does_not_count_images_as_text() -> None:
    text = {"messages": [{"role": "user", "content": "word " * 1000}]}
    picture = {"messages": [{"role": "user", "content": [{"url": "data:image/png;base64," + "A" * 400_000}]}]}
    assert 1200 < estimate_input_tokens(json.dumps(text).encode()) < 1300
    assert TOKENS_PER_ATTACHMENT <= estimate_input_tokens(json.dumps(picture).encode()) < TOKENS_PER_ATTACHMENT + 50
    assert estimate_input_tokens(b"") == 1


@pytest.mark.parametrize(
    "size", [0, 1, MIN_COMPRESSED_BYTES - 1, MIN_COMPRESSED_BYTES, SMALL_PAYLOAD_BYTES, SMALL_PAYLOAD_BYTES + 1]
)
@pytest.mark.parametrize("start", [b"", b"\0", b"x\x9c", b"{"])
def test_payload_compression_round_trips(size: int, start: bytes) -> None:
    data = (start + b"abc" * size)[:size]
    assert decompress_payload(compress_payload(data)) == data and len(compress_payload(data)) <= max(
        MIN_COMPRESSED_BYTES, size
    )


def test_request_ids_are_record_ids() -> None:
    ids = RequestIDGenerator()
    made = [ids.next_id(1_700_000_000_000 + i) for i in range(1000)]
    assert len(set(made)) == 1000 and made == sorted(made) and all(len(id) == 32 for id in made)
    assert parse_created_ms(made[5]) == 1_700_000_000_005


@pytest.mark.parametrize(
    ("status", "body", "kind", "retryable"),
    [
        (429, b"{}", "busy", True),
        (500, b"{}", "server", True),
        (529, b"{}", "server", True),
        (401, b"{}", "access", False),
        (404, b"{}", "access", False),
        (400, b'{"error": {"message": "bad", "code": "invalid_value"}}', "request", False),
        (400, b'{"error": {"code": "context_length_exceeded", "message": "too long"}}', "context", False),
        (400, b'{"type":"error","error":{"message":"prompt is too long: 1 tokens > 0"}}', "context", False),
        (400, b'{"error": {"code": "content_filter", "message": "no"}}', "filtered", False),
        (422, b"not json", "request", False),
    ],
)
def test_provider_errors_are_classified(status: int, body: bytes, kind: str, retryable: bool) -> None:
    error = read_provider_error("openai", status, {}, body, "openai-chat")
    assert (error.reason, error.retryable, error.status) == (kind, retryable, status)


def test_retry_after() -> None:
    assert read_retry_after({"retry-after": "7"}) == 7.0 and read_retry_after({"retry-after-ms": "1500"}) == 1.5
    assert read_retry_after({}) is None and read_retry_after({"retry-after": "soon"}) is None
    assert read_retry_after({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0.0


def test_errors_in_every_dialect() -> None:
    error = UpstreamTimeout("it was silent")
    for dialect in ("openai-chat", "openai-responses", "anthropic", "gemini", "raw"):
        reply = error_reply(dialect, error)  # type: ignore[arg-type]
        assert isinstance(reply.body, bytes)
        failure = json.loads(reply.body)["error"]
        assert reply.status == 504 and reply.error == "upstream_timeout" and "it was silent" in failure["message"]
    own = ProviderErrorReply(
        "x", reason="busy", status=429, headers={"Retry-After": "3", "x": "y"}, body=b"own", dialect="anthropic"
    )
    assert error_reply("anthropic", own).body == b"own" and error_reply("anthropic", own).headers == {
        "retry-after": "3"
    }
    assert error_reply("openai-chat", own).body != b"own"
    assert b"internal server error" in error_reply("raw", RuntimeError("inside")).body  # type: ignore[operator]
    words = error_event("anthropic", UpstreamBroken("cut"))
    assert (
        words is not None
        and words.startswith(b"event: error\n")
        and error_event("gemini", UpstreamBroken("cut")) is None
    )


def test_engine_has_the_address_and_key_of_the_process_unless_settings_change_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEAM_KEY", "own")
    keyed = {"gateways": {"plain": {}, "team": {"providers": {"emberline": {"key_env": "TEAM_KEY"}}}}}
    made = read_configured_gateways(keyed, ENGINE)
    engines = [made["default", name].providers["emberline"] for name in ("plain", "team")]
    assert [(engine.base_url, engine.key) for engine in engines] == [("http://engine", "k"), ("http://engine", "own")]
    stored = GatewaySettings(providers={"emberline": ProviderSettings(headers={"x": "y"}, public=True)})
    engine = with_engine_provider(stored, ENGINE).providers["emberline"]
    assert (engine.base_url, engine.key, engine.headers, engine.public) == ("http://engine", "k", {"x": "y"}, False)
    other = GatewaySettings(providers={"emberline": ProviderSettings(base_url="https://elsewhere", public=True)})
    assert with_engine_provider(other, ENGINE) is other, "the key must not be sent there"


def test_settings_are_read_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    found = {"gateways": {"team": {"account": "acme", "providers": {"openai": {"key_env": "SOME_KEY"}}}}}
    made = read_configured_gateways(found, ENGINE)
    assert made["acme", "team"].providers["openai"].key == "secret"
    assert made["acme", "team"].providers["emberline"].base_url == "http://engine"
    assert list(made) == [("acme", "team")], "the default gateway is in the store unless the file defines it"
    for wrong in (
        {"retries": {"attempts": 9}},
        {"timeouts": {"total": 0}},
        {"odd": 1},
        {"providers": {"openai": {"key_env": "NOT_SET"}}},
        {"fallbacks": [{"model": "a", "to": ["b"]}]},
        {"fallbacks": [{"model": "openai/*", "to": ["antropic/claude-sonnet-4-5"]}]},
        {"default_provider": "opanai"},
        {"pools": {"p": {"members": [{"provider": "gorq", "model": "m"}]}}},
        {"guardrails": {"judges": [{"name": "j", "provider": "worker-ai", "model": "m"}]}},
        {"providers": {"mine": {}}},
        {"providers": {"mine": {"base_url": "ftp://here"}}},
        {"providers": {"mine": {"base_url": "http://here", "speaks": ["gemini"]}}},
        {"providers": {"openai": {"headers": {"x": "a\r\nb: c"}}}},
        {"providers": {"openai": {"headers": {"content-length": "0"}}}},
        {"limits": [{"name": "l", "limit": 1, "per": "fortnight"}]},
        {"budgets": [{"name": "b", "limit": 1, "split": ["team"]}]},
        {"prices": {"openai/gpt-5": {"input": -1, "output": 1}}},
        {"logs": {"days": 0}},
        {"cache_ttl": -1},
        {"breaker": {"failures": 0}},
        {"gateway": "another"},
    ):
        with pytest.raises(InvalidRequest):
            read_configured_gateways({"gateways": {"team": wrong}}, ENGINE)
    later = {"fallbacks": [{"model": "*", "to": ["custom-mine/m"]}]}  # a custom provider may be in the store
    assert read_configured_gateways({"gateways": {"team": later}}, ENGINE)["default", "team"].fallbacks
    with pytest.raises(InvalidRequest, match="gateway 'team': default_provider names an unknown") as failure:
        read_configured_gateways({"gateways": {"team": {"default_provider": "opanai"}}}, ENGINE)
    assert "openai" in (failure.value.hint or "")
    with pytest.raises(InvalidRequest):
        read_configured_gateways({"gateways": {"team": 5}}, ENGINE)
    assert GatewaySettings().retries.attempts == 2


@pytest.mark.parametrize(("named", "name"), [(False, "gpt-4o-mini"), (True, "openai/gpt-4o-mini")])
def test_models_are_listed_by_request_names(named: bool, name: str) -> None:
    class Nobody:
        async def get_key(self, account: str, provider: str, alias: str) -> None:
            return None

    settings = GatewaySettings.parse({"default_provider": "openai", "providers": {"openai": {"key": "k"}}})
    models = ModelLister(ProviderRegistry(), Nobody(), None, CatalogueFiles())  # type: ignore[arg-type]
    listed = {model.id for model in asyncio.run(models.list_models(settings, ANONYMOUS, with_provider=named))}
    assert name in listed and resolve_model(name, settings, require_provider=named) == ("openai", "gpt-4o-mini")
    assert named == all("/" in each for each in listed)


def test_an_alias_is_listed_if_its_model_may_be_used() -> None:
    class Nobody:
        async def get_key(self, account: str, provider: str, alias: str) -> None:
            return None

    aliases = {"mini": "openai/gpt-4o-mini", "large": "gpt-5", "new": "not-in-the-catalogue", "other": "anthropic/x"}
    fields = {"default_provider": "openai", "providers": {"openai": {"key": "k"}}, "models": aliases}
    models = ModelLister(ProviderRegistry(), Nobody(), None, CatalogueFiles())  # type: ignore[arg-type]

    def listed(identity: Identity, **more: object) -> dict[str, ServedModel]:
        settings = GatewaySettings.parse({**fields, **more})
        found = asyncio.run(models.list_models(settings, identity))
        return {model.id: model for model in found if model.id in aliases}

    assert listed(ANONYMOUS).keys() == aliases.keys()
    assert listed(ANONYMOUS)["mini"].max_context > 0 == listed(ANONYMOUS)["new"].max_context
    assert listed(replace(ANONYMOUS, allowed_models=("gpt-4o*", "openai/not-*"))).keys() == {"mini", "new"}
    assert listed(replace(ANONYMOUS, allowed_providers=("anthropic",))).keys() == {"other"}
    assert listed(ANONYMOUS, allowed_models=["gpt-5"]).keys() == {"large"}


def test_a_server_whose_models_cannot_be_listed_is_logged_until_that_changes(caplog: pytest.LogCaptureFixture) -> None:
    replies = [(401, b"{}"), (401, b"{}"), (500, b""), (200, b"[]"), (200, b'{"data": [{"id": "m"}]}'), (401, b"")]

    class Reply:
        def __init__(self, status: int, body: bytes) -> None:
            self.status, self._body = status, body

        async def read_all(self, timeout: float, most: int) -> bytes:
            return self._body

        def close(self) -> None:
            pass

    class Upstream:
        async def send(self, request: object, timeout: float) -> Reply:
            return Reply(*replies.pop(0))

    class Keys:
        async def get_key(self, account: str, provider: str, alias: str) -> str:
            return "wrong"

    provider = {"base_url": "http://127.0.0.1:1", "speaks": ["openai-chat"]}
    settings = GatewaySettings.parse({"default_provider": "mine", "providers": {"mine": provider}})
    models = ModelLister(ProviderRegistry(), Keys(), Upstream(), CatalogueFiles())  # type: ignore[arg-type]
    found = [asyncio.run(models.list_models(settings, ANONYMOUS)) for _ in range(len(replies))]
    assert [len(each) for each in found] == [0, 0, 0, 0, 1, 0]
    reasons = [record.getMessage() for record in caplog.records if "Models cannot be listed" in record.getMessage()]
    parts = ["refuses the provider's key with status 401", "status 500", "not a list of models", "status 401"]
    assert len(reasons) == len(parts) and all(part in each for part, each in zip(parts, reasons, strict=True)), reasons
    assert all("account=default gateway=default provider=mine" in each for each in reasons)
    replies += [(200, b'{"data": []}'), (401, b""), (200, b'{"data": []}'), (401, b"")]
    caplog.clear()
    for each in (
        settings,
        msgspec.structs.replace(settings, gateway="second"),
    ) * 2:  # the second one's key is wrong all the time
        asyncio.run(models.list_models(each, ANONYMOUS))
    assert len([record for record in caplog.records if "gateway=second" in record.getMessage()]) == 1


@pytest.mark.parametrize("where", ['"model": ', '"model": "m", "other": '])
def test_deeply_nested_body_is_refused(where: str) -> None:
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        read_body_fields(b"{" + where.encode() + b"[" * 100_000 + b"]" * 100_000 + b"}")
