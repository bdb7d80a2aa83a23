"""Spans of gateway calls at a scripted OpenTelemetry collector."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from local_gateway import LocalGateway
from routers import until
from trace_collector import TraceCollector, about

from emberline.trace import otlp_exporter

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def span_of(collecting: TraceCollector, log: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Wait for the span of a call and return it with its attributes."""
    until(lambda: any(about(span)["emberline.log_id"] == log for span in collecting.spans))
    (span,) = [span for span in collecting.spans if about(span)["emberline.log_id"] == log]
    return span, about(span)


@pytest.fixture(scope="module")
def collecting() -> Iterator[TraceCollector]:
    made = TraceCollector()
    yield made
    made.shutdown()


def provider_settings(urls: dict[str, str]) -> dict[str, Any]:
    return {"oai": {"base_url": urls["fake"], "speaks": ["openai-chat"]}}


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory, collecting: TraceCollector) -> Iterator[LocalGateway]:
    process = {"otlp": collecting.url, "otlp_headers": {"x-vendor-key": "k"}, "otlp_payloads": True}
    prices = {"oai/m": {"input": 1_000_000, "output": 2_000_000}}
    home = tmp_path_factory.mktemp("spans")
    with pytest.MonkeyPatch.context() as patch:  # each test waits for its span
        patch.setattr(otlp_exporter, "BATCH_DELAY_S", 0.05)
        patch.setattr(otlp_exporter, "RETRY_DELAYS_S", (0.1, 0.2, 0.4))
        with LocalGateway(home, ("fake",), provider_settings, process, prices=prices) as made:
            yield made


def ask(gateway: LocalGateway, headers: dict[str, str] | None = None, **more: Any) -> tuple[int, str]:
    body = {"model": "oai/m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, **more}
    status, reply_headers, _ = gateway.post("/v1/chat/completions", body, headers)
    return status, reply_headers["cf-aig-log-id"]


def test_call_span_has_the_callers_span_as_parent(gateway: LocalGateway, collecting: TraceCollector) -> None:
    began = time.time()
    request_headers = {
        "cf-aig-otel-trace-id": TRACE,
        "cf-aig-otel-parent-span-id": PARENT,
        "cf-aig-metadata": '{"team": "a"}',
    }
    _, log = ask(gateway, request_headers)
    span, facts = span_of(collecting, log)
    assert (span["traceId"], span["parentSpanId"], span["kind"]) == (TRACE, PARENT, 3)
    assert len(span["spanId"]) == 16 and span["spanId"] != PARENT and span["status"] == {"code": 1}
    assert began - 1 < int(span["startTimeUnixNano"]) / 1e9 <= int(span["endTimeUnixNano"]) / 1e9 < time.time() + 1
    assert (facts["gen_ai.provider.name"], facts["gen_ai.operation.name"]) == ("oai", "chat")
    assert (facts["gen_ai.usage.input_tokens"], facts["gen_ai.usage.output_tokens"]) == (11, 8)
    assert facts["gen_ai.usage.cost"] == pytest.approx(27e-6) and facts["metadata.team"] == "a"
    assert json.loads(facts["gen_ai.prompt_json"])["messages"][0]["content"] == "hello"
    assert "word7" in facts["gen_ai.completion_json"]
    path, headers, _ = collecting.got[-1]
    assert path == "/v1/traces" and headers["x-vendor-key"] == "k"
    assert headers["content-type"] == "application/json"


HELLO = [{"role": "user", "content": "hello"}]
STEP = {"provider": "oai", "endpoint": "v1/chat/completions", "headers": {}, "query": {"model": "m", "messages": HELLO}}


@pytest.mark.parametrize(
    "path,body",
    [
        ("/v1/chat/completions", {"model": "oai/m", "messages": HELLO}),
        ("/v1/messages", {"model": "oai/m", "messages": HELLO, "max_tokens": 8}),  # translated
        ("/v1/default/default", [STEP]),
    ],
)
def test_provider_receives_the_call_span_as_parent(
    gateway: LocalGateway, collecting: TraceCollector, path: str, body: Any
) -> None:
    request_headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    _, headers, _ = gateway.post(path, body, request_headers)
    span, _ = span_of(collecting, headers["cf-aig-log-id"])
    assert (span["traceId"], span["parentSpanId"]) == (TRACE, PARENT)
    sent_headers = gateway.fakes["fake"].requests[-1].headers
    assert sent_headers["traceparent"] == f"00-{TRACE}-{span['spanId']}-01" and sent_headers["tracestate"] == "vendor=1"


def test_step_key_is_in_no_span(gateway: LocalGateway, collecting: TraceCollector) -> None:
    secret = {"headers": {"authorization": "Bearer sk-of-the-caller"}}
    _, headers, _ = gateway.post("/v1/default/default", [STEP | secret])
    _, facts = span_of(collecting, headers["cf-aig-log-id"])
    assert gateway.fakes["fake"].requests[-1].headers["authorization"] == "Bearer sk-of-the-caller"
    assert json.loads(facts["gen_ai.prompt_json"]) == STEP["query"]
    assert "sk-of-the-caller" not in str(collecting.spans)


def test_invalid_traceparent_is_not_passed_on(gateway: LocalGateway, collecting: TraceCollector) -> None:
    _, log = ask(gateway, {"traceparent": f"00-{TRACE}-{PARENT}", "tracestate": "vendor=1"})
    span, _ = span_of(collecting, log)
    assert span["traceId"] != TRACE and "parentSpanId" not in span
    sent_headers = gateway.fakes["fake"].requests[-1].headers
    assert (
        sent_headers["traceparent"] == f"00-{span['traceId']}-{span['spanId']}-01" and "tracestate" not in sent_headers
    )


def test_stream_without_a_parent_starts_a_trace(gateway: LocalGateway, collecting: TraceCollector) -> None:
    _, log = ask(gateway, stream=True)
    span, facts = span_of(collecting, log)
    assert len(span["traceId"]) == 32 and "parentSpanId" not in span
    assert facts["emberline.stream"] and facts["gen_ai.usage.output_tokens"] == 8
    assert "word7" in facts["gen_ai.completion_json"]


def test_private_payloads_are_not_exported(gateway: LocalGateway, collecting: TraceCollector) -> None:
    for header in ({"cf-aig-zdr": "true"}, {"cf-aig-collect-log-payload": "false"}):
        _, facts = span_of(collecting, ask(gateway, header)[1])
        assert not {"gen_ai.prompt_json", "gen_ai.completion_json"} & facts.keys()


def test_failed_call_has_an_error_span(gateway: LocalGateway, collecting: TraceCollector) -> None:
    gateway.fakes["fake"].fault = "500"
    status, log = ask(gateway)
    span, facts = span_of(collecting, log)
    assert span["status"]["code"] == 2 and facts["error.type"] == span["status"]["message"] != ""
    assert facts["http.response.status_code"] == status >= 500


def test_export_is_retried_when_busy_but_not_when_refused(gateway: LocalGateway, collecting: TraceCollector) -> None:
    collecting.script = [503]
    span_of(collecting, ask(gateway)[1])
    collecting.script = [400]
    _, lost = ask(gateway)
    until(lambda: not collecting.script)
    span_of(collecting, ask(gateway)[1])
    assert all(about(span)["emberline.log_id"] != lost for span in collecting.spans)
    until(
        lambda: (
            b"spans_dropped_total 1"
            in gateway.post("/metrics", b"", {"authorization": "Bearer a-key-of-the-tests"}, method="GET")[2]
        )
    )
