"""The gateway over a WebSocket, with the real `websockets` client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from gateways import TIMEOUTS, Gateways
from routers import until
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect
from websockets.sync.connection import Connection
from websockets.typing import Subprotocol

KEY = "a-key-of-the-tests"
PATIENT = {
    **TIMEOUTS,
    "between_events": 60.0,
    "total": 120.0,
}  # so that only who leaves stops a provider that is silent
TEXT = "".join(f"word{i} " for i in range(8))


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    places = lambda urls: {"oai": {"base_url": urls["fake"], "speaks": ["openai-chat"]}}  # noqa: E731
    with Gateways(tmp_path_factory.mktemp("socket"), ("fake",), places, authentication=True, timeouts=PATIENT) as made:
        yield made


def opened(gateway: Gateways, path: str = "/v1/default/default/", **more: Any) -> Connection:
    return connect(gateway.url.replace("http", "ws") + path, open_timeout=20, close_timeout=20, **more)


@pytest.fixture
def socket(gateway: Gateways) -> Iterator[Connection]:
    with opened(gateway, additional_headers={"cf-aig-authorization": f"Bearer {KEY}"}) as made:
        yield made


def asks(socket: Connection, id: str | None, words: int = 8, **query: Any) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": words, **query}
    request = {"provider": "oai", "endpoint": "v1/chat/completions", "headers": {}, "query": asked}
    named = {**request, "eventId": id} if id is not None else request
    socket.send(json.dumps({"type": "universal.create", "request": named}))


def hears(socket: Connection) -> dict[str, Any]:
    found = json.loads(socket.recv(timeout=20))
    assert isinstance(found, dict)
    return found


def to_the_end(socket: Connection) -> list[dict[str, Any]]:
    heard = [hears(socket)]
    while heard[-1]["type"] in ("universal.created", "universal.stream"):
        heard.append(hears(socket))
    return heard


def test_a_reply_in_one_piece(gateway: Gateways, socket: Connection) -> None:
    asks(socket, "mine")
    created, done = to_the_end(socket)
    assert created["response"]["choices"][0]["message"]["content"] == TEXT
    about = created["metadata"]
    assert (about["eventId"], about["cacheStatus"], about["step"]) == ("mine", "MISS", "0")
    assert about["contentType"] == "application/json"
    assert done["type"] == "universal.done" and done["metadata"] == about
    record = gateway.record(about["logId"])
    assert record.event_id == "mine" and record.success and record.usage.output == 8


def test_a_stream(gateway: Gateways, socket: Connection) -> None:
    asks(socket, None, stream=True)
    created, *stream, done = to_the_end(socket)
    assert "response" not in created and created["metadata"]["contentType"].startswith("text/event-stream")
    assert done["type"] == "universal.done" and {each["type"] for each in stream} == {"universal.stream"}
    said = [each["response"]["choices"][0]["delta"].get("content", "") for each in stream]
    assert "".join(said) == TEXT
    assert {each["metadata"]["eventId"] for each in stream} == {created["metadata"]["eventId"]} != {""}


def test_many_at_once(gateway: Gateways, socket: Connection) -> None:
    gateway.fakes["fake"].pace = 0.02
    for i in range(8):
        asks(socket, f"event-{i}", words=4, stream=True)
    heard: list[dict[str, Any]] = []
    while sum(each["type"] == "universal.done" for each in heard) < 8:
        heard.append(hears(socket))
        assert heard[-1]["type"] != "universal.error", heard[-1]
    order = [each["metadata"]["eventId"] for each in heard]
    for i in range(8):
        own = [each["type"] for each in heard if each["metadata"]["eventId"] == f"event-{i}"]
        assert own[0] == "universal.created" and own[-1] == "universal.done" and own.count("universal.done") == 1
    assert order != sorted(order)  # they came together, not one after the other


def test_who_closes_stops_the_provider(gateway: Gateways) -> None:
    fake = gateway.fakes["fake"]
    fake.fault = "stall-later"
    with opened(gateway, additional_headers={"cf-aig-authorization": f"Bearer {KEY}"}) as socket:
        asks(socket, "left", words=1000, stream=True)
        log = hears(socket)["metadata"]["logId"]
        hears(socket)
    until(lambda: fake.gone == 1)
    assert gateway.record(log).ended == "left"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("{", "not a valid universal.create"),
        ("[]", "not a valid universal.create"),
        ('{"type": "universal.stop"}', "universal.stop"),
        ('{"type": "universal.create"}', "request"),
        ('{"type": "universal.create", "request": {"eventId": 5}}', "eventId"),
        (b"\xff\xfe", "not a valid universal.create"),
    ],
)
def test_what_is_no_request_is_told_and_the_socket_goes_on(socket: Connection, message: str | bytes, says: str) -> None:
    socket.send(message)
    error = hears(socket)
    assert error["type"] == "universal.error" and says in error["error"]["message"]
    assert error["error"]["code"] == "invalid_value"
    asks(socket, "after")
    assert to_the_end(socket)[-1]["type"] == "universal.done"


def test_an_id_that_is_open_is_refused(gateway: Gateways, socket: Connection) -> None:
    gateway.fakes["fake"].pace = 0.05
    asks(socket, "same", stream=True)
    assert hears(socket)["type"] == "universal.created"
    asks(socket, "same")
    heard = hears(socket)
    while heard["type"] == "universal.stream":
        heard = hears(socket)
    assert heard["type"] == "universal.error" and "used by an open request" in heard["error"]["message"]
    assert to_the_end(socket)[-1]["type"] == "universal.done"


def test_errors_of_providers(gateway: Gateways, socket: Connection) -> None:
    gateway.fakes["fake"].fault = "500"
    asks(socket, "bad")
    (error,) = to_the_end(socket)
    assert error["type"] == "universal.error" and error["metadata"]["status"] >= 500 and error["response"]["error"]
    assert error["error"]["message"] == "injected error"
    gateway.fakes["fake"].fault = "cut"
    asks(socket, "broken", stream=True)
    *_, last = to_the_end(socket)
    assert last["type"] == "universal.error" and last["error"]["code"]
    assert gateway.record(last["metadata"]["logId"]).ended == "cut"


def test_who_may_come_in(gateway: Gateways) -> None:
    with pytest.raises(InvalidStatus) as refused:
        opened(gateway)
    assert refused.value.response.status_code == 401 and b"requires a key" in (refused.value.response.body or b"")
    wrong = {"cf-aig-authorization": "Bearer egt_not-one-of-ours"}
    with pytest.raises(InvalidStatus) as refused:
        opened(gateway, additional_headers=wrong)
    assert refused.value.response.status_code == 401
    for path, status in (("/v1/default/nowhere/", 404), ("/v1/chat/completions", 404)):
        with pytest.raises(InvalidStatus) as refused:
            opened(gateway, path, additional_headers={"cf-aig-authorization": f"Bearer {KEY}"})
        assert refused.value.response.status_code == status
    spoken = Subprotocol(f"cf-aig-authorization.{KEY}")
    with opened(gateway, subprotocols=[spoken]) as socket:
        assert socket.subprotocol == spoken
        asks(socket, "browser")
        assert to_the_end(socket)[-1]["type"] == "universal.done"
    with opened(gateway, subprotocols=[Subprotocol("chat"), spoken]) as socket:
        assert socket.subprotocol == "chat"  # a key is not said back where something else can be


def test_a_message_that_is_too_large_ends_the_socket(socket: Connection) -> None:
    with pytest.raises(ConnectionClosedError) as closed:
        socket.send("x" * (2 << 20))
        socket.recv(timeout=20)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
