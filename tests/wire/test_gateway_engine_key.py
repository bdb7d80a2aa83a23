"""The gateway's key for the local engine: if the engine refuses it, that is no fault of the client's key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from local_gateway import LocalGateway

KEY = "a-key-of-the-tests"  # of the gateway, as local_gateway configures it


def provider_settings(urls: dict[str, str]) -> dict[str, Any]:
    return {
        "emberline": {"base_url": urls["fake"], "key": "refused-by-the-engine"},
        "oai": {"base_url": urls["fake"], "speaks": ["openai-chat"], "key": "refused-by-oai"},
    }


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    with LocalGateway(tmp_path_factory.mktemp("engine-key"), ("fake",), provider_settings) as made:
        yield made


@pytest.mark.parametrize(
    ("model", "headers", "sent_key", "expected"),
    [
        ("emberline/m", {"authorization": f"Bearer {KEY}"}, "refused-by-the-engine", (502, "engine_key_refused")),
        ("emberline/m", {}, "refused-by-the-engine", (502, "engine_key_refused")),
        ("oai/m", {}, "refused-by-oai", (401, None)),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_engine_that_refuses_the_gateways_key_is_an_error_of_the_upstream(
    gateway: LocalGateway,
    path: str,
    model: str,
    headers: dict[str, str],
    sent_key: str,
    expected: tuple[int, str | None],
) -> None:
    fake = gateway.fakes["fake"]
    fake.fault = "401"
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    status, reply_headers, reply = gateway.post(path, body, headers)
    assert fake.count == 1, "a refused key is not tried again"
    assert fake.requests[0].headers["authorization"] == f"Bearer {sent_key}"
    error = json.loads(reply)["error"]
    assert status == expected[0] and ("EMBERLINE_ENGINE_KEY" in error["message"]) is (status == 502)
    if status == 502:
        assert gateway.record(reply_headers["cf-aig-log-id"]).error == expected[1]


def test_key_that_the_client_sent_is_the_clients(gateway: LocalGateway) -> None:
    """On the path of a provider, the usual key headers have the provider's key."""
    fake = gateway.fakes["fake"]
    fake.fault = "401"
    headers = {"cf-aig-authorization": f"Bearer {KEY}", "authorization": "Bearer of-a-client"}
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    status, _, reply = gateway.post("/v1/default/default/emberline/v1/chat/completions", body, headers)
    assert fake.requests[0].headers["authorization"] == "Bearer of-a-client"
    assert status == 401 and b"EMBERLINE_ENGINE_KEY" not in reply
