"""A provider's realtime socket through the gateway, with real `websockets` on both sides."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from socket import SHUT_RDWR
from typing import Any

import openai
import pytest
from local_gateway import TIMEOUTS, LocalGateway
from routers import until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request, Response
from websockets.sync.client import ClientConnection, connect
from websockets.sync.server import Server, ServerConnection, serve
from websockets.typing import Subprotocol

from emberline.gateway.core.log_record import LogRecord
from emberline.gateway.realtime.usage import parse_realtime_usage
from emberline.wire.usage import Usage

KEY = "a-key-of-the-tests"
OURS = {"cf-aig-authorization": f"Bearer {KEY}"}
PRICES = {"cf-aig-custom-cost": '{"per_token_in": 0.000003, "per_token_out": 0.000007}'}
PATH = "/v1/default/default/openai?model=gpt-realtime"
FLOOD = 2000  # messages
DONE = {
    "type": "response.done",
    "response": {
        "usage": {
            "total_tokens": 30,
            "input_tokens": 20,
            "output_tokens": 10,
            "input_token_details": {"text_tokens": 8, "audio_tokens": 12, "cached_tokens": 4},
            "output_token_details": {"text_tokens": 4, "audio_tokens": 6},
        }
    },
}


class Provider:
    """Echo messages; `close CODE`, `break`, `flood`, `large` and `done` are commands."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.closed: list[int | None] = []
        self.flooded = 0
        self._server: Server = serve(
            self._echo,
            "127.0.0.1",
            0,
            process_request=self._handle_request,
            select_subprotocol=self._choose_subprotocol,
            max_size=None,
        )
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _handle_request(self, connection: ServerConnection, request: Request) -> Response | None:
        self.requests.append(request)
        if "model=elsewhere" in request.path:
            moved = connection.respond(HTTPStatus.FOUND, "")
            moved.headers["Location"] = "/v1/realtime?model=gpt-realtime"
            return moved
        if "model=refused" in request.path:
            return connection.respond(HTTPStatus.UNAUTHORIZED, '{"error": {"message": "no such key"}}')
        return None

    def _choose_subprotocol(self, connection: ServerConnection, offered: Any) -> Any:
        return "realtime" if "realtime" in offered else None

    def _echo(self, connection: ServerConnection) -> None:
        with suppress(ConnectionClosed):
            for message in connection:
                match str(message).split():
                    case ["close", code]:
                        connection.close(int(code), "as told")
                    case ["break"]:
                        connection.socket.shutdown(SHUT_RDWR)
                    case ["large"]:
                        connection.send("x" * (3 << 20))
                    case ["done"] | [_, '"response.create"}']:
                        connection.send(json.dumps(DONE))
                    case ["flood"]:
                        for self.flooded in range(FLOOD + 1):
                            connection.send(b"x" * (1 << 16))
                    case _:
                        connection.send(message)
        with suppress(ConnectionClosed):
            connection.recv()
        self.closed.append(connection.close_code)

    def stop(self) -> None:
        self._server.shutdown()


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, provider: Provider) -> Iterator[LocalGateway]:
    def write_config(urls: dict[str, str]) -> dict[str, Any]:
        return {
            "openai": {"base_url": provider.url + "/v1", "key": "sk-stored"},
            "google-ai-studio": {"base_url": provider.url, "key": "g-stored"},
            "nobody": {"base_url": "http://127.0.0.1:1"},
            "gone": {"base_url": "http://127.0.0.1:1"},
            "hidden": {"base_url": provider.url, "public": True},
        }

    with LocalGateway(
        tmp_path_factory.mktemp("realtime"),
        (),
        write_config,
        {"max_body": 1 << 20},
        authentication=True,
        breaker={"pause": 10.0},
        timeouts={**TIMEOUTS, "idle": 4.0, "session": 30.0},
        allowed_models=["gpt-realtime*", "gemini-live", "refused", "elsewhere", "bare"],
        limits=[
            {"name": "few", "limit": 1, "per": "hour", "only": {"metadata.team": ["few"]}},
            {"name": "short", "limit": 60, "per": "day", "amount": "tokens", "only": {"metadata.team": ["short"]}},
        ],
    ) as made:
        yield made


def open_socket(gateway: LocalGateway, path: str = PATH, **more: Any) -> ClientConnection:
    more = {"additional_headers": OURS, "close_timeout": 5, **more}
    return connect(gateway.url.replace("http", "ws") + path, open_timeout=20, compression=None, **more)


def refusal_of(gateway: LocalGateway, path: str = PATH, **more: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(InvalidStatus) as error:
        open_socket(gateway, path, **more)
    return error.value.response.status_code, json.loads(error.value.response.body or b"{}")["error"]


def row(gateway: LocalGateway, socket: ClientConnection) -> LogRecord:
    """Return the log record of a session, by its handshake's log id."""
    assert socket.response is not None
    return gateway.record(socket.response.headers["cf-aig-log-id"])


def test_messages_pass_both_ways(gateway: LocalGateway, provider: Provider) -> None:
    headers = {**OURS, **PRICES, "openai-beta": "realtime=v1"}
    with open_socket(gateway, additional_headers=headers) as socket:
        socket.send("hello")
        assert socket.recv(timeout=5) == "hello"
        socket.send(b"\x00\xff")
        assert socket.recv(timeout=5) == b"\x00\xff"
        for _ in range(2):
            socket.send("done")
            assert json.loads(socket.recv(timeout=5))["type"] == "response.done"
    sent_request = provider.requests[-1]
    assert (
        sent_request.path == "/v1/realtime?model=gpt-realtime"
        and sent_request.headers["authorization"] == "Bearer sk-stored"
    )
    assert sent_request.headers["openai-beta"] == "realtime=v1" and not any(
        "cf-aig" in name for name in sent_request.headers
    )
    log = row(gateway, socket)
    assert (log.status, log.ended, log.success, log.model, log.provider) == (
        101,
        "complete",
        True,
        "gpt-realtime",
        "openai",
    )
    assert log.usage == Usage(input=40, cached_read=8, output=20, audio=24) and log.micros == 40 * 3 + 20 * 7
    assert log.stream and log.attempts == 1 and not log.error


def test_native_path_opens_provider_socket(gateway: LocalGateway, provider: Provider) -> None:
    with open_socket(gateway, "/v1/default/default/openai/realtime?model=gpt-realtime&intent=conversation") as socket:
        socket.send("hello")
        assert socket.recv(timeout=5) == "hello"
    assert provider.requests[-1].path == "/v1/realtime?model=gpt-realtime&intent=conversation"


def test_openai_client_connects(gateway: LocalGateway) -> None:
    url = f"{gateway.url}/v1/default/default/openai"
    client = openai.OpenAI(base_url=url, api_key="sk-mine", default_headers=OURS)
    with client.realtime.connect(model="gpt-realtime") as socket:
        socket.response.create()
        event = socket.recv()
    assert event.type == "response.done" and event.response.usage is not None
    assert event.response.usage.total_tokens == 30


def test_browser_sends_keys_as_subprotocols(gateway: LocalGateway, provider: Provider) -> None:
    answer = [f"cf-aig-authorization.{KEY}", "realtime", "openai-insecure-api-key.sk-mine", "openai-beta.realtime-v1"]
    with open_socket(gateway, additional_headers={}, subprotocols=[Subprotocol(each) for each in answer]) as socket:
        assert socket.subprotocol == "realtime"
    sent_request = provider.requests[-1].headers
    assert sent_request["authorization"] == "Bearer sk-mine" and KEY not in str(sent_request)
    assert sent_request["sec-websocket-protocol"] == "realtime, openai-beta.realtime-v1"


def test_gemini_model_is_in_first_message(gateway: LocalGateway, provider: Provider) -> None:
    path = "/v1/default/default/google-ai-studio?model=gemini-live"
    with open_socket(gateway, path) as socket:
        socket.send(json.dumps({"setup": {"model": "models/gemini-live"}}))
        assert "setup" in json.loads(socket.recv(timeout=5))
    sent_request = provider.requests[-1]
    assert sent_request.path == "/ws/google.ai.generativelanguage.v1beta.GenerativeService.BidiGenerateContent"
    assert sent_request.headers["x-goog-api-key"] == "g-stored"
    with open_socket(gateway, path) as socket, pytest.raises(ConnectionClosed) as closed:
        socket.send(json.dumps({"setup": {"model": "models/gemini-dear"}}).encode())
        socket.recv(timeout=5)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008


def test_invalid_sessions_are_refused(gateway: LocalGateway, provider: Provider) -> None:
    before = len(provider.requests)
    assert refusal_of(gateway, additional_headers={})[0] == 401
    status, error = refusal_of(gateway, "/v1/default/default/openai?model=gpt-dear")
    assert (status, error["code"]) == (403, "not_allowed")
    assert refusal_of(gateway, "/v1/default/default/openai")[0] == 403, "a session without a model is not allowed"
    assert refusal_of(gateway, PATH + "&model=gpt-dear")[0] == 400
    assert refusal_of(gateway, "/v1/default/default/nowhere?model=bare")[0] == 404
    assert refusal_of(gateway, "/v1/default/default/nobody?model=bare")[0] == 404, (
        "the provider's socket URL is unknown"
    )
    assert len(provider.requests) == before, "no request was sent"
    few = {**OURS, "cf-aig-metadata": '{"team": "few"}'}
    with open_socket(gateway, additional_headers=few):
        pass
    status, error = refusal_of(gateway, additional_headers=few)
    assert (status, error["code"]) == (429, "rate_limit_exceeded")


def test_limit_ends_session(gateway: LocalGateway) -> None:
    headers = {**OURS, "cf-aig-metadata": '{"team": "short"}'}
    with open_socket(gateway, additional_headers=headers) as socket, pytest.raises(ConnectionClosed) as closed:
        for _ in range(3):
            socket.send("done")
            assert json.loads(socket.recv(timeout=5)) == DONE
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008 and "60 tokens" in closed.value.rcvd.reason
    log = row(gateway, socket)
    assert (log.ended, log.error, log.usage.total) == ("cut", "rate_limit_exceeded", 60), "two replies of 30 tokens"
    assert refusal_of(gateway, additional_headers=headers)[0] == 429


def test_provider_refusal_is_passed_on(gateway: LocalGateway) -> None:
    status, error = refusal_of(gateway, "/v1/default/default/openai?model=refused")
    assert status == 401 and error["message"] == "no such key"
    status, error = refusal_of(gateway, "/v1/default/default/openai?model=elsewhere")
    assert (status, error["code"]) == (502, "upstream_broken"), "a key is sent to no other host"
    status, error = refusal_of(gateway, "/v1/default/default/nobody/v1/realtime?model=bare")
    assert (status, error["code"]) == (502, "upstream_unreached")
    status, error = refusal_of(gateway, "/v1/default/default/hidden/v1/realtime?model=bare")
    assert (status, error["code"]) == (502, "upstream_unreached") and "public" in error["message"]


def test_failing_provider_opens_circuit_breaker(gateway: LocalGateway) -> None:
    codes = [refusal_of(gateway, "/v1/default/default/gone/v1/realtime?model=bare")[1]["code"] for _ in range(6)]
    assert codes == ["upstream_unreached"] * 5 + ["upstream_resting"]


@pytest.mark.parametrize(
    ("failure", "code", "ended"),
    [("close 1000", 1000, "complete"), ("close 4003", 4003, "cut"), ("break", 1014, "cut"), ("large", 1009, "cut")],
)
def test_provider_close_is_passed_on(gateway: LocalGateway, failure: str, code: int, ended: str) -> None:
    with open_socket(gateway) as socket:
        socket.send(failure)
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=5)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == code
    log = row(gateway, socket)
    assert log.ended == ended and log.error == ("" if ended == "complete" else "upstream_broken")


@pytest.mark.parametrize(("code", "ended"), [(4001, "complete"), (None, "left")])
def test_client_close_is_passed_on_at_once(
    gateway: LocalGateway, provider: Provider, code: int | None, ended: str
) -> None:
    before = len(provider.closed)
    socket = open_socket(gateway)
    socket.send("hello")
    socket.recv(timeout=5)
    if code is None:
        socket.socket.shutdown(SHUT_RDWR)
    else:
        socket.close(code)
    until(lambda: len(provider.closed) > before, 5)
    assert provider.closed[-1] == (code or 1001)
    assert row(gateway, socket).ended == ended


def test_idle_session_is_closed(gateway: LocalGateway) -> None:
    with open_socket(gateway) as socket, pytest.raises(ConnectionClosed) as closed:
        socket.recv(timeout=10)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001 and "idle" in closed.value.rcvd.reason
    assert (row(gateway, socket).ended, row(gateway, socket).error) == ("cut", "upstream_timeout")


def test_slow_reader_is_throttled_and_timed_out(gateway: LocalGateway, provider: Provider) -> None:
    before = len(provider.closed)
    with open_socket(gateway, max_queue=1, close_timeout=0.1) as socket:
        socket.send("flood")
        until(lambda: len(provider.closed) > before, 20)
    assert 0 < provider.flooded < FLOOD, "unread messages are not buffered"
    assert (row(gateway, socket).ended, row(gateway, socket).error) == ("cut", "upstream_timeout")


def test_large_messages_are_refused(gateway: LocalGateway) -> None:
    with open_socket(gateway) as socket, pytest.raises(ConnectionClosed) as closed:
        socket.send("x" * (2 << 20))
        socket.recv(timeout=5)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


def test_guardrails_refuse_realtime_sessions(tmp_path_factory: pytest.TempPathFactory, provider: Provider) -> None:
    rule = {"name": "mail", "find": ["email"], "action": "block"}
    made = LocalGateway(
        tmp_path_factory.mktemp("guarded"),
        (),
        lambda urls: {"openai": {"base_url": provider.url + "/v1", "key": "k"}},
        guardrails={"patterns": [rule]},
    )
    try:
        status, error = refusal_of(made, additional_headers={})
        assert (status, error["code"]) == (403, "not_allowed") and "guardrails" in error["message"]
    finally:
        made.close()


def test_session_usage_is_logged() -> None:
    live = {
        "serverContent": {},
        "usageMetadata": {"promptTokenCount": 5, "responseTokenCount": 7, "totalTokenCount": 12},
    }
    assert (
        parse_realtime_usage(json.dumps(live))
        == parse_realtime_usage(json.dumps(live).encode())
        == Usage(input=5, output=7)
    )
    assert parse_realtime_usage('{"type": "response.audio.delta", "delta": "response.done"}') is None
    assert parse_realtime_usage(b"\xff response.done") is None
