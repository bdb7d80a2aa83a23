"""The gateway over a WebSocket, with the real `websockets` client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from local_gateway import TIMEOUTS, LocalGateway
from routers import until
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect
from websockets.sync.connection import Connection
from websockets.typing import Subprotocol

KEY = "a-key-of-the-tests"
LONG_TIMEOUTS = {
    **TIMEOUTS,
    "between_events": 60.0,
    "total": 120.0,
}  # so that only a disconnect stops a silent provider
TEXT = "".join(f"word{i} " for i in range(8))


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    provider_settings = lambda urls: {"oai": {"base_url": urls["fake"], "speaks": ["openai-chat"]}}  # noqa: E731
    with LocalGateway(
        tmp_path_factory.mktemp("socket"), ("fake",), provider_settings, authentication=True, timeouts=LONG_TIMEOUTS
    ) as made:
        yield made


def open_socket(gateway: LocalGateway, path: str = "/v1/default/default/", **more: Any) -> Connection:
    return connect(gateway.url.replace("http", "ws") + path, open_timeout=20, close_timeout=20, **more)


@pytest.fixture
def socket(gateway: LocalGateway) -> Iterator[Connection]:
    with open_socket(gateway, additional_headers={"cf-aig-authorization": f"Bearer {KEY}"}) as made:
        yield made


def send_request(socket: Connection, id: str | None, words: int = 8, **query: Any) -> None:
    query_body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": words, **query}
    request = {"provider": "oai", "endpoint": "v1/chat/completions", "headers": {}, "query": query_body}
    named = {**request, "eventId": id} if id is not None else request
    socket.send(json.dumps({"type": "universal.create", "request": named}))


def receive(socket: Connection) -> dict[str, Any]:
    found = json.loads(socket.recv(timeout=20))
    assert isinstance(found, dict)
    return found


def receive_all(socket: Connection) -> list[dict[str, Any]]:
    messages = [receive(socket)]
    while messages[-1]["type"] in ("universal.created", "universal.stream"):
        messages.append(receive(socket))
    return messages


def test_whole_reply(gateway: LocalGateway, socket: Connection) -> None:
    send_request(socket, "mine")
    created, done = receive_all(socket)
    assert created["response"]["choices"][0]["message"]["content"] == TEXT
    metadata = created["metadata"]
    assert (metadata["eventId"], metadata["cacheStatus"], metadata["step"]) == ("mine", "MISS", "0")
    assert metadata["contentType"] == "application/json"
    assert done["type"] == "universal.done" and done["metadata"] == metadata
    record = gateway.record(metadata["logId"])
    assert record.event_id == "mine" and record.success and record.usage.output == 8


def test_streamed_reply(gateway: LocalGateway, socket: Connection) -> None:
    send_request(socket, None, stream=True)
    created, *stream, done = receive_all(socket)
    assert "response" not in created and created["metadata"]["contentType"].startswith("text/event-stream")
    assert done["type"] == "universal.done" and {each["type"] for each in stream} == {"universal.stream"}
    texts = [each["response"]["choices"][0]["delta"].get("content", "") for each in stream]
    assert "".join(texts) == TEXT
    assert {each["metadata"]["eventId"] for each in stream} == {created["metadata"]["eventId"]} != {""}


def test_concurrent_requests(gateway: LocalGateway, socket: Connection) -> None:
    gateway.fakes["fake"].pace = 0.02
    for i in range(8):
        send_request(socket, f"event-{i}", words=4, stream=True)
    messages: list[dict[str, Any]] = []
    while sum(each["type"] == "universal.done" for each in messages) < 8:
        messages.append(receive(socket))
        assert messages[-1]["type"] != "universal.error", messages[-1]
    order = [each["metadata"]["eventId"] for each in messages]
    for i in range(8):
        own = [each["type"] for each in messages if each["metadata"]["eventId"] == f"event-{i}"]
        assert own[0] == "universal.created" and own[-1] == "universal.done" and own.count("universal.done") == 1
    assert order != sorted(order)  # they were served concurrently


def test_closing_the_socket_stops_the_provider(gateway: LocalGateway) -> None:
    fake = gateway.fakes["fake"]
    fake.fault = "stall-later"
    with open_socket(gateway, additional_headers={"cf-aig-authorization": f"Bearer {KEY}"}) as socket:
        send_request(socket, "left", words=1000, stream=True)
        log = receive(socket)["metadata"]["logId"]
        receive(socket)
    until(lambda: fake.gone == 1)
    assert gateway.record(log).ended == "left"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("{", "not a valid universal.create"),
        ("[]", "not a valid universal.create"),
        ('{"type": "universal.stop"}', "universal.stop"),
        ('{"type": "universal.create"}', "request"),
        ('{"type": "universal.create", "request": {"eventId": 5}}', "eventId"),
        (b"\xff\xfe", "not a valid universal.create"),
    ],
)
def test_invalid_message_is_an_error_and_the_socket_stays_open(
    socket: Connection, message: str | bytes, expected: str
) -> None:
    socket.send(message)
    error = receive(socket)
    assert error["type"] == "universal.error" and expected in error["error"]["message"]
    assert error["error"]["code"] == "invalid_value"
    send_request(socket, "after")
    assert receive_all(socket)[-1]["type"] == "universal.done"


def test_open_event_id_is_rejected(gateway: LocalGateway, socket: Connection) -> None:
    gateway.fakes["fake"].pace = 0.05
    send_request(socket, "same", stream=True)
    assert receive(socket)["type"] == "universal.created"
    send_request(socket, "same")
    messages = receive(socket)
    while messages["type"] == "universal.stream":
        messages = receive(socket)
    assert messages["type"] == "universal.error" and "used by an open request" in messages["error"]["message"]
    assert receive_all(socket)[-1]["type"] == "universal.done"


def test_provider_errors(gateway: LocalGateway, socket: Connection) -> None:
    gateway.fakes["fake"].fault = "500"
    send_request(socket, "bad")
    (error,) = receive_all(socket)
    assert error["type"] == "universal.error" and error["metadata"]["status"] >= 500 and error["response"]["error"]
    assert error["error"]["message"] == "injected error"
    gateway.fakes["fake"].fault = "cut"
    send_request(socket, "broken", stream=True)
    *_, last = receive_all(socket)
    assert last["type"] == "universal.error" and last["error"]["code"]
    assert gateway.record(last["metadata"]["logId"]).ended == "cut"


def test_socket_authentication(gateway: LocalGateway) -> None:
    with pytest.raises(InvalidStatus) as refused:
        open_socket(gateway)
    assert refused.value.response.status_code == 401 and b"requires a key" in (refused.value.response.body or b"")
    wrong = {"cf-aig-authorization": "Bearer egt_not-one-of-ours"}
    with pytest.raises(InvalidStatus) as refused:
        open_socket(gateway, additional_headers=wrong)
    assert refused.value.response.status_code == 401
    for path, status in (("/v1/default/nowhere/", 404), ("/v1/chat/completions", 404)):
        with pytest.raises(InvalidStatus) as refused:
            open_socket(gateway, path, additional_headers={"cf-aig-authorization": f"Bearer {KEY}"})
        assert refused.value.response.status_code == status
    key_protocol = Subprotocol(f"cf-aig-authorization.{KEY}")
    with open_socket(gateway, subprotocols=[key_protocol]) as socket:
        assert socket.subprotocol == key_protocol
        send_request(socket, "browser")
        assert receive_all(socket)[-1]["type"] == "universal.done"
    with open_socket(gateway, subprotocols=[Subprotocol("chat"), key_protocol]) as socket:
        assert socket.subprotocol == "chat"  # the key is echoed only if there is no other subprotocol


def test_too_large_message_closes_the_socket(socket: Connection) -> None:
    with pytest.raises(ConnectionClosedError) as closed:
        socket.send("x" * (2 << 20))
        socket.recv(timeout=20)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
