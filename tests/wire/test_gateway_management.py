"""Changes through the management API take effect on a running gateway: keys, limits, prices, provider keys, custom
providers, gateways and the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from local_gateway import LocalGateway
from routers import until

KEY = "a-key-of-the-tests"
ADMIN = {"authorization": f"Bearer {KEY}"}
HELLO: Any = [{"role": "user", "content": "hello"}]
TEXT = "".join(f"word{i} " for i in range(8))
CHAT = "/v1/chat/completions"


def provider_settings(urls: dict[str, str]) -> dict[str, Any]:
    both = ["openai-chat", "anthropic"]
    others = ("azure-openai", "google-ai-studio", "workers-ai")
    return {
        "oai": {"base_url": urls["fake"], "speaks": both},
        "openai": {"base_url": urls["fake"] + "/v1"},
        **{slug: {"base_url": urls["fake"]} for slug in others},
    }


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    with LocalGateway(
        tmp_path_factory.mktemp("managed"), ("fake",), provider_settings, default_provider="oai", authentication=True
    ) as created:
        yield created


def manage(gateway: LocalGateway, method: str, path: str, body: Any = None) -> Any:
    data = b"" if body is None else json.dumps(body).encode()
    status, _, reply_data = gateway.post(f"/admin/accounts/default/{path}", data, ADMIN, method)
    assert status in (200, 201), reply_data
    return json.loads(reply_data)


def new_key(gateway: LocalGateway, **fields: Any) -> tuple[str, dict[str, str]]:
    created = manage(gateway, "POST", "keys", {"name": "k", **fields})
    return created["id"], {"authorization": f"Bearer {created['secret']}"}


def ask(
    gateway: LocalGateway, headers: dict[str, str], model: str = "m", **more: Any
) -> tuple[int, dict[str, str], Any]:
    status, reply_headers, body = gateway.post(CHAT, {"model": model, "messages": HELLO, **more}, headers)
    return status, reply_headers, json.loads(body) if body[:1] == b"{" else body


def test_requests_without_a_valid_key_are_rejected(gateway: LocalGateway) -> None:
    for headers in ({}, {"authorization": "Bearer sk-unknown"}, {"cf-aig-authorization": "Bearer egt_unknown"}):
        status, _, body = ask(gateway, headers)
        assert status == 401 and body["error"]["code"] == "invalid_api_key"
    assert gateway.fakes["fake"].count == 0
    with pytest.raises(anthropic.AuthenticationError):
        client = anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0)
        client.messages.create(model="m", messages=HELLO, max_tokens=8)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0).models.list()
    assert gateway.post("/admin/accounts/default/keys", b"", {}, "GET")[0] == 401


def test_key_works_until_it_is_revoked(gateway: LocalGateway) -> None:
    id, key = new_key(gateway, allowed_models=["small-*"])
    assert ask(gateway, key, "small-1")[0] == 200
    status, _, body = ask(gateway, key, "large")
    assert status == 403 and body["error"]["code"] == "not_allowed"
    assert gateway.post("/admin/accounts/default/keys", b"", key, "GET")[0] == 403, "the key may not manage"
    manage(gateway, "DELETE", f"keys/{id}")
    until(lambda: ask(gateway, key, "small-1")[0] == 401, 5)


@pytest.mark.parametrize(
    ("path", "allowed"),  # whether the path is valid
    [
        ("azure-openai/res/{model}/chat/completions", True),
        ("google-ai-studio/v1beta/models/{model}:generateContent", True),
        ("workers-ai/{model}", True),
        ("azure-openai/res/small/../{model}/chat/completions", False),
        ("google-ai-studio/v1beta/models/small/%2E%2e/{model}:generateContent", False),
    ],
)
def test_body_cannot_override_the_model_of_the_path(gateway: LocalGateway, path: str, allowed: bool) -> None:
    _, key = new_key(gateway, allowed_models=["small*"])
    headers = {"cf-aig-authorization": key["authorization"], "authorization": "Bearer k"}
    status, _, _ = gateway.post(f"/v1/default/default/{path.format(model='large')}", {"model": "small"}, headers)
    assert status == (403 if allowed else 400)
    slug, _, endpoint = path.partition("/")
    step = {"provider": slug, "endpoint": endpoint.format(model="large"), "query": {"model": "small"}}
    assert gateway.post("/v1/default/default", [step], headers)[0] == (403 if allowed else 400)
    assert gateway.fakes["fake"].count == 0
    if allowed:
        path = path.format(model="small")
        assert gateway.post(f"/v1/default/default/{path}", {"model": "large"}, headers)[0] == 200


def test_limits_of_a_created_gateway(gateway: LocalGateway) -> None:
    """Remaining requests are in headers, and an exceeded limit has Retry-After."""
    limits = [{"name": "few", "limit": 2, "per": "hour"}]
    manage(gateway, "PUT", "gateways/limited", {"default_provider": "custom-c", "limits": limits})
    headers = {**ADMIN, "cf-aig-gateway-id": "limited"}
    status, _, body = ask(gateway, headers, "emberline/m")
    assert status == 502 and body["error"]["code"] == "upstream_unreached", "there is no engine in this test"
    assert ask(gateway, headers, "emberline/m")[1]["x-ratelimit-remaining-requests"] == "0"
    status, reply_headers, body = ask(gateway, headers, "emberline/m")
    assert status == 429 and body["error"]["code"] == "rate_limit_exceeded" and int(reply_headers["retry-after"]) > 0
    assert reply_headers["x-ratelimit-limit-requests"] == "2"
    client = anthropic.Anthropic(
        base_url=gateway.url, api_key=KEY, max_retries=0, default_headers={"cf-aig-gateway-id": "limited"}
    )
    with pytest.raises(anthropic.RateLimitError):
        client.messages.create(model="emberline/m", messages=HELLO, max_tokens=8)


def test_stored_provider_key_is_used(gateway: LocalGateway) -> None:
    assert ask(gateway, ADMIN, "openai/gpt-x")[0] == 401, "no key is stored yet"
    manage(gateway, "PUT", "provider-keys/openai/default", {"secret": "sk-stored"})
    until(lambda: ask(gateway, ADMIN, "openai/gpt-x")[0] == 200, 5)
    assert gateway.fakes["fake"].requests[-1].headers["authorization"] == "Bearer sk-stored"
    manage(gateway, "PUT", "provider-keys/openai/other", {"secret": "sk-other"})
    until(lambda: ask(gateway, {**ADMIN, "cf-aig-byok-alias": "other"}, "openai/gpt-x")[0] == 200, 5)
    assert gateway.fakes["fake"].requests[-1].headers["authorization"] == "Bearer sk-other"


def test_created_price_is_charged(gateway: LocalGateway) -> None:
    manage(gateway, "PUT", "prices/oai/priced", {"input": 1_000_000, "output": 2_000_000})

    def is_charged() -> bool:
        _, headers, _ = ask(gateway, ADMIN, "oai/priced", stream=True)
        return gateway.record(headers["cf-aig-log-id"]).micros == 11 + 2 * 8

    until(is_charged, 5)
    _, headers, _ = ask(gateway, ADMIN, "oai/no-price")
    assert gateway.record(headers["cf-aig-log-id"]).micros is None, "an unknown price is not zero"


def test_custom_provider_must_have_a_public_address(gateway: LocalGateway) -> None:
    """The URL is checked when it is set, and the address again when it is connected to."""
    created = {"name": "Mine", "slug": "mine", "base_url": "https://127.0.0.1", "enable": True}
    status, _, _ = gateway.post("/admin/accounts/default/custom-providers/mine", created, ADMIN)
    assert status == 400
    created["base_url"] = "https://localhost.localdomain.example"
    manage(gateway, "POST", "custom-providers/mine", created)

    def is_refused() -> bool:
        status, _, body = gateway.post("/v1/default/default/custom-mine/v1/x", {"model": "m"}, ADMIN)
        return status == 502 and json.loads(body)["error"]["code"] == "upstream_unreached"

    until(is_refused, 5)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_cache_over_http(gateway: LocalGateway, path: str, stream: bool) -> None:
    headers = {**ADMIN, "cf-aig-cache-ttl": "60"}
    body = {"model": "m", "messages": HELLO, "max_tokens": 8, "stream": stream, "user": f"{path}{stream}"}
    first, second = (gateway.post(path, body, headers) for _ in range(2))
    assert [reply[1]["cf-aig-cache-status"] for reply in (first, second)] == ["MISS", "HIT"]
    assert first[2] == second[2] and b"word7" in first[2] and gateway.fakes["fake"].count == 1
    assert second[1]["content-type"] == first[1]["content-type"]
    rows = [gateway.record(reply[1]["cf-aig-log-id"]) for reply in (first, second)]
    assert [row.cached for row in rows] == [False, True] and rows[1].micros == 0 and rows[1].success
    body["model"] = "500"  # a fault of the fake provider: errors are never cached
    assert [gateway.post(path, body, headers)[1]["cf-aig-cache-status"] for _ in range(2)] == ["MISS", "MISS"]


def test_feedback_through_cloudflare_paths(gateway: LocalGateway) -> None:
    _, headers, _ = ask(gateway, ADMIN)
    id = headers["cf-aig-log-id"]
    gateway.record(id)
    at = f"/client/v4/accounts/default/ai-gateway/gateways/default/logs/{id}"
    status, _, body = gateway.post(at, {"feedback": 1}, ADMIN, "PATCH")
    assert status == 200 and json.loads(body)["success"] and gateway.record(id).feedback == 1


def test_model_list_respects_the_key(gateway: LocalGateway) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0)
    manage(gateway, "PUT", "provider-keys/openai/default", {"secret": "sk-stored"})
    until(lambda: any(model.id.startswith("openai/gpt-") for model in client.models.list()), 5)
    _, key = new_key(gateway, allowed_providers=["oai"])
    restricted = openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key=key["authorization"].removeprefix("Bearer "), max_retries=0
    )
    assert not any(model.id.startswith("openai/") for model in restricted.models.list())
