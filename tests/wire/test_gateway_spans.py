"""Spans of calls, at a scripted OpenTelemetry collector."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from gateways import Gateways
from routers import until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collecting(http.server.ThreadingHTTPServer):
    """`script`: statuses that come first; then all is taken."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[int] = []
        self.got: list[tuple[str, dict[str, str], Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def spans(self) -> list[dict[str, Any]]:
        scopes = [s for _, _, body in self.got for r in body["resourceSpans"] for s in r["scopeSpans"]]
        return [span for scope in scopes for span in scope["spans"]]

    def of(self, log: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The one span of a call, and its attributes."""
        until(lambda: any(_about(span)["emberline.log_id"] == log for span in self.spans))
        (span,) = [span for span in self.spans if _about(span)["emberline.log_id"] == log]
        return span, _about(span)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Collecting
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status = self.server.script.pop(0) if self.server.script else 200
        if status == 200:
            self.server.got.append((self.path, dict(self.headers), body))
        self.send_response(status)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _about(span: dict[str, Any]) -> dict[str, Any]:
    kinds = {"intValue": int, "stringValue": str, "doubleValue": float, "boolValue": bool}
    return {each["key"]: kinds[kind](value) for each in span["attributes"] for kind, value in each["value"].items()}


@pytest.fixture(scope="module")
def collecting() -> Iterator[Collecting]:
    made = Collecting()
    yield made
    made.shutdown()


def places(urls: dict[str, str]) -> dict[str, Any]:
    return {"oai": {"base_url": urls["fake"], "speaks": ["openai-chat"]}}


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory, collecting: Collecting) -> Iterator[Gateways]:
    process = {"otlp": collecting.url, "otlp_headers": {"x-vendor-key": "k"}, "otlp_payloads": True}
    prices = {"oai/m": {"input": 1_000_000, "output": 2_000_000}}
    made = Gateways(tmp_path_factory.mktemp("spans"), ("fake",), places, process, prices=prices)
    yield made
    made.close()


@pytest.fixture
def gateway(gateways: Gateways) -> Gateways:
    gateways.reset()
    return gateways


def ask(gateway: Gateways, headers: dict[str, str] | None = None, **more: Any) -> tuple[int, str]:
    body = {"model": "oai/m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, **more}
    status, told, _ = gateway.post("/v1/chat/completions", body, headers)
    return status, told["cf-aig-log-id"]


def test_a_call_is_a_span_below_the_callers_own(gateway: Gateways, collecting: Collecting) -> None:
    began = time.time()
    told = {"cf-aig-otel-trace-id": TRACE, "cf-aig-otel-parent-span-id": PARENT, "cf-aig-metadata": '{"team": "a"}'}
    _, log = ask(gateway, told)
    span, about = collecting.of(log)
    assert (span["traceId"], span["parentSpanId"], span["kind"]) == (TRACE, PARENT, 3)
    assert len(span["spanId"]) == 16 and span["spanId"] != PARENT and span["status"] == {"code": 1}
    assert began - 1 < int(span["startTimeUnixNano"]) / 1e9 <= int(span["endTimeUnixNano"]) / 1e9 < time.time() + 1
    assert (about["gen_ai.provider.name"], about["gen_ai.operation.name"]) == ("oai", "chat")
    assert (about["gen_ai.usage.input_tokens"], about["gen_ai.usage.output_tokens"]) == (11, 8)
    assert about["gen_ai.usage.cost"] == pytest.approx(27e-6) and about["metadata.team"] == "a"
    assert json.loads(about["gen_ai.prompt_json"])["messages"][0]["content"] == "hello"
    assert "word7" in about["gen_ai.completion_json"]
    path, headers, _ = collecting.got[-1]
    assert path == "/v1/traces" and headers["x-vendor-key"] == "k"
    assert headers["content-type"] == "application/json"


def test_a_stream_has_a_trace_of_its_own(gateway: Gateways, collecting: Collecting) -> None:
    _, log = ask(gateway, stream=True)
    span, about = collecting.of(log)
    assert len(span["traceId"]) == 32 and "parentSpanId" not in span
    assert about["emberline.stream"] and about["gen_ai.usage.output_tokens"] == 8
    assert "word7" in about["gen_ai.completion_json"]


def test_what_is_private_stays_here(gateway: Gateways, collecting: Collecting) -> None:
    for header in ({"cf-aig-zdr": "true"}, {"cf-aig-collect-log-payload": "false"}):
        _, about = collecting.of(ask(gateway, header)[1])
        assert not {"gen_ai.prompt_json", "gen_ai.completion_json"} & about.keys()


def test_a_failure_is_told_as_one(gateway: Gateways, collecting: Collecting) -> None:
    gateway.fakes["fake"].fault = "500"
    status, log = ask(gateway)
    span, about = collecting.of(log)
    assert span["status"]["code"] == 2 and about["error.type"] == span["status"]["message"] != ""
    assert about["http.response.status_code"] == status >= 500


def test_a_collector_that_is_busy_is_asked_again_and_one_that_refuses_is_not(
    gateway: Gateways, collecting: Collecting
) -> None:
    collecting.script = [503]
    collecting.of(ask(gateway)[1])
    collecting.script = [400]
    _, lost = ask(gateway)
    until(lambda: not collecting.script)
    collecting.of(ask(gateway)[1])
    assert all(_about(span)["emberline.log_id"] != lost for span in collecting.spans)
    until(lambda: b"spans_dropped_total 1" in gateway.post("/metrics", b"", method="GET")[2])
