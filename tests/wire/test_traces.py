"""One trace id from a client over gateway and router to every worker that had a part, at a scripted collector: also
when one of them is killed, and when the client leaves. Real workers with a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_gateway import TIMEOUTS, LocalGateway
from routers import Fakes, get, spawn, start_router, stop, tiny_model, until
from trace_collector import TraceCollector, about

PARENT = "b7ad6b7169203331"
STORY = "Once upon a time there was a cache of keys and values that everybody wanted. " * 6
TOKENS = 500
Span = dict[str, Any]


class Stack:
    """A gateway before a router, before a worker that prefills and one that decodes; all tell the same collector."""

    def __init__(self, home: Path) -> None:
        self.collecting = TraceCollector()
        traced = ("--otlp", self.collecting.url)
        self.router = start_router(home / "router.log", "--split-tokens", "32", *traced)
        model = tiny_model(home / "tiny", 1024)
        settings = ("--served-name", "tiny", "--embedder", "none", "--threads", "1", "--kv-memory", "32M", *traced)
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("prefill", "decode"):
            command = ("-m", "emberline.cli", "worker", str(model), "--router", self.router.url, "--worker-name", name)
            self.workers[name] = spawn(home / f"{name}.log", *command, *settings, "--role", name)
        process = {"otlp": self.collecting.url}
        timeouts = TIMEOUTS | {"first_byte": 20.0, "between_events": 20.0}
        self.gateway = LocalGateway(home, (), self._places, process, timeouts=timeouts)
        until(lambda: len(self.rows()) == 2 and self.rows()["decode"]["paired"] == ["prefill"], 120)
        until(lambda: all(row["health"] == "ready" for row in self.rows().values()))

    def _places(self, _: dict[str, str]) -> dict[str, Any]:
        return {"own": {"base_url": self.router.url, "speaks": ["openai-chat"]}}

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in get(f"{self.router.url}/cluster/status")["workers"]}

    def ask(self, url: str, number: int, model: str = "tiny", *, sampled: bool = True) -> Any:
        """A reply to be read, whose trace is called by a number."""
        messages = [{"role": "user", "content": f"{number}. {STORY}"}]
        body = {"model": model, "messages": messages, "stream": True, "max_tokens": TOKENS, "ignore_eos": True}
        headers = {"traceparent": f"00-{number:032x}-{PARENT}-0{int(sampled)}", "tracestate": "vendor=1"}
        asked = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json", **headers}
        )
        return urllib.request.urlopen(asked, timeout=60)

    def trace(self, number: int, *expected: tuple[str, str]) -> list[Span]:
        """Its spans, once those named by service and name are among them."""

        def found() -> list[Span]:
            spans = [span for span in self.collecting.spans if span["traceId"] == f"{number:032x}"]
            left = [(span["service"], span["name"]) for span in spans]
            return spans if all(left.count(each) >= expected.count(each) for each in expected) else []

        spans: list[Span] = until(found)
        return spans


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = Stack(tmp_path_factory.mktemp("traces"))
    yield made
    made.gateway.close()
    stop(*made.workers.values(), made.router.process)
    made.collecting.shutdown()
    ids = [span["spanId"] for span in made.collecting.spans]
    assert len(set(ids)) == len(ids)  # each was told once


def find_spans(spans: list[Span], service: str, name: str) -> list[Span]:
    return [span for span in spans if (span["service"], span["name"]) == (f"emberline-{service}", name)]


def single_span(spans: list[Span], service: str, name: str, parent: str | None = None) -> Span:
    (span,) = [each for each in find_spans(spans, service, name) if parent in (None, each["parentSpanId"])]
    return span


GATEWAY, ROUTER, WORKER = "emberline-gateway", "emberline-router", "emberline-worker"


def test_one_trace_spans_gateway_router_and_workers(stack: Stack) -> None:
    with stack.ask(stack.gateway.url, 1, "own/tiny") as reply:
        assert reply.headers["x-emberline-prefill"] == "prefill"
        reply.read()
    spans = stack.trace(1, (GATEWAY, "chat tiny"), (ROUTER, "chat tiny"), (WORKER, "chat tiny"), (WORKER, "chat tiny"))
    entrance = single_span(spans, "gateway", "chat tiny", PARENT)
    request = single_span(spans, "router", "chat tiny", entrance["spanId"])
    legs = {name: single_span(spans, "router", f"{name} leg", request["spanId"]) for name in ("prefill", "plain")}
    facts = about(request)
    assert (facts["emberline.worker"], facts["emberline.split"], facts["emberline.attempts"]) == ("decode", True, 1)
    assert facts["emberline.route.why"] == "load" and facts["emberline.route.affinity"] == "none"
    assert facts["http.response.status_code"] == 200 and request["status"] == {"code": 1}
    for name, worker in (("prefill", "prefill"), ("plain", "decode")):
        facts = about(legs[name])
        assert (facts["emberline.worker"], facts["emberline.leg.outcome"]) == (worker, "answered")
    computed, answered = (single_span(spans, "worker", "chat tiny", leg["spanId"]) for leg in legs.values())
    assert (
        about(answered)["gen_ai.usage.output_tokens"] == TOKENS and about(computed)["gen_ai.usage.output_tokens"] == 1
    )
    for work in (computed, answered):
        children = {span["name"]: span for span in spans if span.get("parentSpanId") == work["spanId"]}
        assert children.keys() == {"queue", "prefill", "decode"}
        times = [int(children[name][edge]) for name in ("queue", "prefill", "decode") for edge in
                 ("startTimeUnixNano", "endTimeUnixNano")]  # fmt: skip
        assert times == sorted(times) and int(request["startTimeUnixNano"]) <= times[0]
    pull = single_span(spans, "worker", "pull", children["prefill"]["spanId"])
    assert about(pull)["emberline.pull.source"] == "prefill" and about(pull)["emberline.pull.bytes"] > 0
    decode = about(children["decode"])
    assert decode["emberline.tokens"] == TOKENS and decode["emberline.itl_mean"] > 0 and decode["emberline.ttft"] > 0
    assert STORY[:20] not in json.dumps(spans)


def test_client_disconnect_is_traced(stack: Stack) -> None:
    with stack.ask(stack.router.url, 2) as reply:
        reply.read(100)
    spans = stack.trace(2, (ROUTER, "chat tiny"), (WORKER, "chat tiny"), (WORKER, "chat tiny"))
    request = single_span(spans, "router", "chat tiny", PARENT)
    assert request["status"] == {"code": 2, "message": "client_gone"}
    leg = single_span(spans, "router", "plain leg", request["spanId"])
    assert about(leg)["emberline.leg.outcome"] == "left"
    answered = single_span(spans, "worker", "chat tiny", leg["spanId"])
    assert about(answered)["error.type"] == "client_gone"
    assert about(single_span(spans, "worker", "decode", answered["spanId"]))["error.type"] == "cut_off"


def test_unsampled_request_is_not_exported(stack: Stack) -> None:
    with stack.ask(stack.gateway.url, 3, "own/tiny", sampled=False) as reply:
        reply.read()
    with stack.ask(stack.router.url, 4) as reply:
        reply.read()
    stack.trace(4, (ROUTER, "chat tiny"), (WORKER, "chat tiny"))
    assert not [span for span in stack.collecting.spans if span["traceId"] == f"{3:032x}"]


def test_retry_has_its_own_span(stack: Stack, tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, "--otlp", stack.collecting.url)
    try:
        fakes.start("a", "b")
        fakes.tell("a", "refuse", times=1)
        while fakes.tell("a")["asked"] == 0:
            number = 100 + fakes.tell("b")["asked"]
            with stack.ask(fakes.url, number, "fake") as reply:
                reply.read()
        spans = stack.trace(number, (ROUTER, "chat fake"))
        request = single_span(spans, "router", "chat fake", PARENT)
        legs = {about(leg)["emberline.worker"]: leg for leg in find_spans(spans, "router", "plain leg")}
        assert {leg["parentSpanId"] for leg in legs.values()} == {request["spanId"]}
        assert (about(legs["a"])["error.type"], about(legs["b"])["emberline.leg.outcome"]) == ("503", "answered")
        (event,) = request["events"]
        assert (event["name"], about(event)) == (
            "emberline.retry", {"worker": "a", "reason": "status 503", "status": 503}
        )  # fmt: skip
        for name, leg in legs.items():
            seen = fakes.tell(name)["seen"][-1]
            assert seen["traceparent"] == f"00-{number:032x}-{leg['spanId']}-01" and seen["tracestate"] == "vendor=1"
    finally:
        fakes.close()


def test_migration_stays_in_same_trace(stack: Stack) -> None:
    """Last, for one of two workers is gone then."""
    with stack.ask(stack.router.url, 5) as reply:
        reply.read(100)
        os.kill(stack.workers["decode"].pid, signal.SIGKILL)
        assert reply.read().endswith(b"data: [DONE]\n\n")
    spans = stack.trace(5, (ROUTER, "chat tiny"), (WORKER, "chat tiny"), (WORKER, "chat tiny"))
    request = single_span(spans, "router", "chat tiny", PARENT)
    assert request["status"] == {"code": 1} and about(request)["emberline.migrations"] == 1
    (event,) = request["events"]
    assert (event["name"], about(event)["worker"]) == ("emberline.migration", "decode")
    lost = single_span(spans, "router", "plain leg", request["spanId"])
    assert about(lost)["emberline.leg.outcome"] == "failed" and lost["status"]["code"] == 2
    resumed = single_span(spans, "router", "resume leg", request["spanId"])
    assert about(resumed)["emberline.leg.attempt"] == 2 and about(resumed)["emberline.leg.outcome"] == "answered"
    work = single_span(spans, "worker", "chat tiny", resumed["spanId"])
    assert about(work)["http.route"] == "/cluster/resume" and 0 < about(work)["gen_ai.usage.output_tokens"] < TOKENS
    until(lambda: "emberline:spans_dropped_total 0" in get(f"{stack.router.url}/metrics"))
