"""Rejected requests leave a log line, a metric and, if the caller may use the gateway, a record with the message."""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from local_gateway import LocalGateway

KEY = "a-key-of-the-tests"
ADMIN = {"authorization": f"Bearer {KEY}"}
BODY = {"model": "oai/m", "messages": [{"role": "user", "content": "hello"}]}


def provider_settings(urls: dict[str, str]) -> dict[str, Any]:
    return {"oai": {"base_url": urls["fake"], "speaks": ["openai-chat"], "key": "secret-of-oai"}}


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    path = tmp_path_factory.mktemp("rejections")
    with LocalGateway(path, ("fake",), provider_settings, authentication=True) as made:
        yield made


@pytest.fixture
def gateway(gateways: LocalGateway, caplog: pytest.LogCaptureFixture) -> LocalGateway:
    caplog.set_level(logging.INFO)
    gateways.reset()
    return gateways


def rejected_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for record in caplog.records if "Request rejected" in (line := record.getMessage())]


def metric(gateway: LocalGateway, line_start: str) -> float:
    request = urllib.request.Request(f"{gateway.url}/metrics", headers=ADMIN)
    with urllib.request.urlopen(request, timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(line_start))


def logs(gateway: LocalGateway, query: str = "") -> list[dict[str, Any]]:
    status, _, body = gateway.post(f"/admin/accounts/default/logs?{query}", b"", ADMIN, "GET")
    assert status == 200, body
    return json.loads(body)["items"]


REJECTED = [
    ("/v1/chat/completions", b"{", 400, "invalid_value"),
    ("/v1/chat/completions", {"messages": []}, 400, "invalid_value"),
    ("/v1/default/default/nothing/chat/completions", {}, 404, "provider_not_found"),
]


@pytest.mark.parametrize(("path", "body", "status", "code"), REJECTED)
def test_invalid_request_of_a_known_caller_is_recorded(
    gateway: LocalGateway, caplog: pytest.LogCaptureFixture, path: str, body: Any, status: int, code: str
) -> None:
    before = metric(gateway, "emberline:gateway_requests_total"), metric(gateway, "emberline:gateway_rejections_total")
    got, headers, reply = gateway.post(path, body, ADMIN)
    assert got == status
    (line,) = rejected_lines(caplog)
    record = gateway.record(headers["cf-aig-log-id"])
    assert (record.status, record.error, record.key_id) == (status, code, "configured-0")
    assert (
        record.message
        and record.message in json.loads(reply)["error"]["message"]
        and json.dumps(record.message) in line
    )
    after = metric(gateway, "emberline:gateway_requests_total"), metric(gateway, "emberline:gateway_rejections_total")
    assert (after[0] - before[0], after[1] - before[1]) == (1, 1)


@pytest.mark.parametrize(
    ("path", "body", "headers", "method", "status"),
    [
        ("/v1/chat/completions", BODY, {}, "POST", 401),
        ("/v1/chat/completions", b"{", {}, "POST", 401),
        ("/v1/chat/completions", BODY, {"cf-aig-authorization": "Bearer wrong"}, "POST", 401),
        ("/v1/nowhere", BODY, {}, "POST", 404),
        ("/v1/default/missing/compat/chat/completions", BODY, {}, "POST", 404),
        ("/admin/accounts/default/keys", b"", {"authorization": "Bearer wrong"}, "GET", 401),
        ("/accounts/default/ai-gateway/gateways", b"", {"authorization": "Bearer wrong"}, "GET", 401),
        ("/admin/nothing", b"", ADMIN, "GET", 404),
    ],
)
def test_strangers_leave_a_line_but_no_record(
    gateway: LocalGateway,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: Any,
    headers: Any,
    method: str,
    status: int,
) -> None:
    records, wrong_keys = len(logs(gateway)), metric(gateway, "emberline:wrong_keys_total")
    assert gateway.post(path, body, headers, method)[0] == status
    (line,) = rejected_lines(caplog)
    assert f"status={status} " in line and "wrong" not in line
    gateway.record(gateway.post("/v1/chat/completions", BODY, ADMIN)[1]["cf-aig-log-id"])
    assert len(logs(gateway)) == records + 1
    assert metric(gateway, "emberline:wrong_keys_total") - wrong_keys == ("wrong" in str(headers))


def test_a_wrong_admin_key_is_named(gateway: LocalGateway) -> None:
    _, _, body = gateway.post("/admin/accounts/default/keys", b"", {"authorization": "Bearer wrong"}, "GET")
    assert "key in the header authorization is unknown" in json.loads(body)["error"]["message"]
    _, _, body = gateway.post("/admin/accounts/default/keys", b"", {}, "GET")
    assert "the request has none" in json.loads(body)["error"]["message"]


def test_log_shows_and_finds_the_providers_message(gateway: LocalGateway, caplog: pytest.LogCaptureFixture) -> None:
    gateway.fakes["fake"].fault = "500"
    status, headers, _ = gateway.post("/v1/chat/completions", BODY, ADMIN)
    record = gateway.record(headers["cf-aig-log-id"])
    assert record.status == status >= 500 and "provider oai answered with status 500: " in record.message
    (line,) = rejected_lines(caplog)
    assert json.dumps(record.message) in line
    assert [each["id"] for each in logs(gateway, "search=answered%20with%20status%20500")] == [record.id]
    _, headers, _ = gateway.post("/v1/chat/completions", BODY, {**ADMIN, "cf-aig-zdr": "true"})
    assert gateway.record(headers["cf-aig-log-id"]).message == "", "the message may repeat the prompt"


@pytest.mark.parametrize("query", ["search=%00", "search=a%00b", "user=%00", "metadata.a=%00", "filters=" + "%5B%5D"])
def test_search_with_unusual_characters_answers(gateway: LocalGateway, query: str) -> None:
    assert isinstance(logs(gateway, query), list)


@pytest.mark.parametrize(
    ("fault", "message"), [("error-event", "ended the stream with an error"), ("cut", "closed the connection")]
)
def test_log_shows_why_a_stream_broke_off(gateway: LocalGateway, fault: str, message: str) -> None:
    gateway.fakes["fake"].fault = fault
    _, headers, _ = gateway.post("/v1/chat/completions", {**BODY, "stream": True}, ADMIN)
    record = gateway.record(headers["cf-aig-log-id"])
    assert record.ended == "cut" and message in record.message and not record.success
