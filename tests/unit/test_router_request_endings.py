"""The relay brings each request into exactly one terminal state, by the states that its attempts call for."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from emberline.cluster.registration import Heartbeat, ModelRegistration, WorkerRegistration
from emberline.core.clock import SystemClock
from emberline.core.config import RouterConfig
from emberline.core.errors import DeadlineExceeded, EngineUnavailable
from emberline.core.handoff import TokenGroup
from emberline.core.numerics import Numerics
from emberline.router import http as router_http
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.http.relay import Relay
from emberline.router.http.routed_request import RoutedRequest
from emberline.router.request_state import RequestEvent
from emberline.router.request_summary import RequestSummary
from emberline.router.upstream_request import UpstreamRequest
from emberline.router.worker_client import UpstreamBroken, UpstreamUnreachable, WorkerClient
from emberline.server.exchange import Exchange

NUMERICS = Numerics("abc", "bfloat16", "plain", "bfloat16", "cpu")
EVENT_STREAM = {"content-type": "text/event-stream"}
TOKEN_EVENT = b'data: {"id":"chatcmpl-1","created":1,"choices":[]}\n\n'
FINAL_EVENT = b"data: [DONE]\n\n"
HANG = "hang"  # in a script: never answer


def token_group(*tokens: int, events: bytes = TOKEN_EVENT) -> bytes:
    return TokenGroup(0, tokens).to_comment(len(events)) + events


class ScriptedReply:
    """A worker's reply: each part is bytes, an exception to raise, or HANG."""

    def __init__(self, *parts: bytes | Exception | str, status: int = 200, headers: dict[str, str] | None = None):
        self.status, self.headers = status, EVENT_STREAM if headers is None else headers
        self._parts = list(parts)

    async def read(self) -> bytes:
        part = self._parts.pop(0) if self._parts else b""
        if isinstance(part, Exception):
            raise part
        if isinstance(part, str):
            await asyncio.sleep(60)
        return cast("bytes", part)

    async def read_all(self) -> bytes:
        return b"".join([part async for part in self._all_parts()])

    async def _all_parts(self) -> Any:
        while part := await self.read():
            yield part

    def close(self) -> None:
        pass

    def abort(self, reason: str) -> None:
        pass


class ScriptedClient:
    """Answers the attempts of one request, in order."""

    def __init__(self, *answers: ScriptedReply | Exception | str) -> None:
        self._answers = list(answers)

    async def request(self, url: str, request: UpstreamRequest) -> ScriptedReply:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            await asyncio.sleep(60)
            raise AssertionError("the attempt was not cancelled")
        return answer


class RelayRun:
    """Runs one request through a relay, and records its states."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *answers: Any,
        workers: str = "abc",
        path: str = "/v1/completions",
        **config: Any,
    ) -> None:
        self.states = ["choosing"]
        self.sent: list[dict[str, Any]] = []
        self._answers, self._workers, self._path = answers, workers, path
        self.breaker_states: list[str] = []  # of the workers, after the run
        self._config = RouterConfig(**{"migration_wait": 0.0, **config})
        handle_event = RoutedRequest.handle_event

        def record(routed: RoutedRequest, event: RequestEvent) -> None:
            handle_event(routed, event)
            self.states.append(routed.state.value)

        monkeypatch.setattr(RoutedRequest, "handle_event", record)

    def run(self, interrupt: Callable[[Exchange, asyncio.Task[None]], None] | None = None) -> list[str]:
        """Return the states; raise what the relay raised. `interrupt` is called after 0.05 s."""

        async def main() -> None:
            dispatcher = Dispatcher(self._config, SystemClock())
            for name in self._workers:
                model = ModelRegistration("m", "layout", 10_000, 8, 10_000, 16, numerics=NUMERICS)
                dispatcher.register(WorkerRegistration(name, "1", f"http://{name}", (model,)))
                dispatcher.record_heartbeat(Heartbeat(name, "1"))
            body = json.dumps({"model": "m", "prompt": "a", "stream": True}).encode()
            scope = {"method": "POST", "path": self._path, "headers": []}
            x = Exchange(scope, cast("Any", None), self._send)
            relay = Relay(dispatcher, cast("WorkerClient", ScriptedClient(*self._answers)), self._config)
            task = asyncio.create_task(relay.run(x, RequestSummary.parse(body), body))
            if interrupt is not None:
                await asyncio.sleep(0.05)
                interrupt(x, task)
            try:
                await task
            finally:
                self.breaker_states = [worker.breaker.state for worker in dispatcher.workers.values()]
            assert not dispatcher.open_attempt_count

        asyncio.run(main())
        return self.states

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


def complete_stream(*tokens: int) -> ScriptedReply:
    return ScriptedReply(token_group(*tokens), token_group(events=FINAL_EVENT))


def test_complete_reply_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RelayRun(monkeypatch, complete_stream(1)).run() == ["choosing", "attempting", "relaying", "done"]
    whole = ScriptedReply(b"{}", headers={"content-type": "application/json", "content-length": "2"})
    assert RelayRun(monkeypatch, whole).run()[-2:] == ["relaying", "done"]


def test_retry_before_first_output_chooses_again(monkeypatch: pytest.MonkeyPatch) -> None:
    states = RelayRun(monkeypatch, UpstreamUnreachable("refused"), complete_stream(1)).run()
    assert states == ["choosing", "attempting", "choosing", "attempting", "relaying", "done"]


def test_broken_stream_is_resumed_and_done(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ScriptedReply(token_group(1), UpstreamBroken("reset"))
    unavailable = ScriptedReply(b"", status=503)
    run = RelayRun(monkeypatch, broken, unavailable, complete_stream(2))
    resumed = ["interrupted", "resuming", "interrupted", "resuming", "relaying", "done"]
    assert run.run() == ["choosing", "attempting", "relaying", *resumed]
    assert run.body == 2 * TOKEN_EVENT + FINAL_EVENT


def test_stream_waits_for_worker_to_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RelayRun(
        monkeypatch, ScriptedReply(token_group(1), UpstreamBroken("reset")), workers="a", migration_wait=0.15
    )
    states = run.run()
    assert states[3:5] == ["interrupted", "waiting_to_resume"] and states[-1] == "abandoned"
    assert b"worker_lost" in run.body


@pytest.mark.parametrize("wait_s", [0.0, 0.15])
def test_request_without_worker_is_abandoned(monkeypatch: pytest.MonkeyPatch, wait_s: float) -> None:
    refusals = [UpstreamUnreachable("refused")] * 9
    run = RelayRun(monkeypatch, *refusals, workers="a", migration_wait=wait_s)
    with pytest.raises(EngineUnavailable):
        run.run()
    assert run.states[-1] == "abandoned" and ("waiting" in run.states) == (wait_s > 0)


@pytest.mark.parametrize(("path", "state"), [("/v1/completions", "open"), ("/v1/embeddings", "closed")])
def test_missing_embedder_does_not_open_breaker_of_worker(
    path: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [ScriptedReply(b"{}", status=503) for _ in range(9)]
    run = RelayRun(monkeypatch, *refusals, workers="a", path=path, breaker_failures=1)
    run.run()
    assert run.breaker_states == [state]


def test_error_reply_of_last_worker_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RelayRun(monkeypatch, ScriptedReply(b"{}", status=429), workers="a")
    assert run.run() == ["choosing", "attempting", "choosing", "abandoned"] and run.sent[0]["status"] == 429


@pytest.mark.parametrize("parts", [(), (token_group(1),)])
def test_deadline_times_out(monkeypatch: pytest.MonkeyPatch, parts: tuple[bytes, ...]) -> None:
    run = RelayRun(monkeypatch, ScriptedReply(*parts, HANG), token_timeout=0.1)
    if parts:
        run.run()
        assert b"deadline_exceeded" in run.body
    else:
        with pytest.raises(DeadlineExceeded):
            run.run()
    assert run.states[-1] == "timed_out" and run.states.count("timed_out") == 1


@pytest.mark.parametrize("parts", [(), (token_group(1),)])
@pytest.mark.parametrize(("has_disconnected", "ending"), [(False, "shut_down"), (True, "disconnected")])
def test_cancelled_request_names_the_cause(
    monkeypatch: pytest.MonkeyPatch, parts: tuple[bytes, ...], has_disconnected: bool, ending: str
) -> None:
    def interrupt(x: Exchange, task: asyncio.Task[None]) -> None:
        x.client_disconnected = has_disconnected
        task.cancel()

    run = RelayRun(monkeypatch, ScriptedReply(*parts, HANG))
    with pytest.raises(asyncio.CancelledError):
        run.run(interrupt)
    assert run.states[-1] == ending
    assert (b"shutting" in run.body) == (bool(parts) and not has_disconnected)


def test_unexpected_exception_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RelayRun(monkeypatch, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        run.run()
    assert run.states == ["choosing", "attempting", "failed"]


def test_only_handle_event_assigns_state() -> None:
    sources = {path.name: path.read_text() for path in Path(router_http.__path__[0]).glob("*.py")}
    assignments = {name: len(re.findall(r"\b(?:self|routed)\.state\s*=[^=]", text)) for name, text in sources.items()}
    assert {name: count for name, count in assignments.items() if count} == {"routed_request.py": 1}
