"""Every rejected request is one log line, within bounds, and guesses of keys are slowed down and counted."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest
from scripted_engine import WorkerHarness

from emberline.core.clock import ManualClock
from emberline.core.error_texts import MASK, printable_error
from emberline.server import rejections
from emberline.server.exchange import Exchange
from emberline.server.rejections import RejectionLog, WrongKeyDelay
from emberline.worker.engine_app import EngineApp


def exchange(client: str = "10.0.0.1", path: str = "/v1/x") -> Exchange:
    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "client": (client, 1)}
    return Exchange(scope, None, None)  # type: ignore[arg-type]


def make_worker(*keys: str) -> WorkerHarness:
    worker = WorkerHarness(lambda before, index: before + "abc")
    worker.app = EngineApp(replace(worker.app._config, api_keys=keys), worker.app.engine, worker.catalog, None, {})
    return worker


def rejected_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "Request rejected" in record.getMessage()]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/unknown", {}, 404, "does not exist"),
        ("/v1/models", {}, 405, "accepts GET"),
        ("/v1/chat/completions", {"messages": 1}, 400, "messages"),
        ("/v1/chat/completions", {"model": "other", "messages": [{"role": "user", "content": "hi"}]}, 404, "other"),
        ("/v1/messages", {"messages": 1}, 400, "messages"),
    ],
)
def test_each_rejected_request_is_one_line(
    caplog: pytest.LogCaptureFixture, path: str, body: Any, status: int, message: str
) -> None:
    caplog.set_level(logging.INFO)
    assert make_worker().post(path, body).status == status
    (line,) = rejected_lines(caplog)
    assert f"path={path} status={status} " in line and message in line


def test_a_request_that_succeeds_leaves_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert make_worker().post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}).status == 200
    assert rejected_lines(caplog) == []


def test_wrong_key_is_logged_without_the_key(caplog: pytest.LogCaptureFixture) -> None:
    worker = make_worker("right")
    assert worker.post("/v1/chat/completions", {}, authorization="Bearer sk-guess-123456").status == 401
    (line,) = rejected_lines(caplog)
    assert "status=401" in line and "guess" not in line
    assert worker.app._site.wrong_keys.count == 1
    assert worker.post("/v1/chat/completions", {}).status == 401 and worker.app._site.wrong_keys.count == 1


def test_log_is_bounded_and_says_what_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    log = RejectionLog(logging.getLogger("test"), clock)
    caplog.set_level(logging.INFO)
    for _ in range(10_000):
        log.record(exchange(), 404, "not_found", "no such path")
    assert len(rejected_lines(caplog)) == rejections.MAX_CLIENT_LINES
    log.record(exchange("10.0.0.2"), 400, "invalid", "of another client")
    assert "of another client" in caplog.messages[-1] and "count=9950" in caplog.messages[-2]
    for number in range(5000):
        log.record(exchange(f"10.1.{number // 256}.{number % 256}"), 404, "not_found", "m")
    assert len(rejected_lines(caplog)) == rejections.MAX_LINES
    assert len(log._lines_of_client) == rejections.MAX_CLIENTS
    clock.advance(1.0)
    log.record(exchange("10.0.0.3"), 400, "invalid", "after a second")
    assert "after a second" in caplog.messages[-1]


def test_line_cannot_be_forged(caplog: pytest.LogCaptureFixture) -> None:
    forged = "/v1/x\n2026-01-01 ERROR emberline Request rejected: path=/y status=200"
    RejectionLog(logging.getLogger("test")).record(exchange(path=forged), 500, "e", 'm"\r\nm\u2028 path=/z')
    (line,) = caplog.messages
    assert line.isprintable() and line.count(" path=") == 2 and line.endswith('message="m\\" m path=/z"')


def test_wrong_keys_wait_longer_and_longer_and_are_counted() -> None:
    clock, slept = ManualClock(), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def guess(count: int) -> None:
        for _ in range(count):
            await delay.wait()

    delay = WrongKeyDelay(clock, sleep)
    asyncio.run(guess(10))
    assert slept == []
    asyncio.run(guess(100))
    assert slept == sorted(slept) and slept[0] > 0 and slept[-1] == slept[-10] == rejections.MAX_DELAY_S
    assert "emberline:wrong_keys_total 110" in delay.family().lines
    clock.advance(60.0)
    slept.clear()
    asyncio.run(guess(1))
    assert slept == []


def test_few_replies_are_delayed_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejections, "MAX_DELAYED_REPLIES", 5)

    async def flood() -> int:
        released, waiting = asyncio.Event(), list[float]()

        async def sleep(seconds: float) -> None:
            waiting.append(seconds)
            await released.wait()

        delay = WrongKeyDelay(ManualClock(), sleep)
        tasks = [asyncio.create_task(delay.wait()) for _ in range(100)]
        await asyncio.sleep(0)
        released.set()
        await asyncio.gather(*tasks)
        return len(waiting)

    assert asyncio.run(flood()) == 5


@pytest.mark.parametrize(
    "text",
    [
        "Incorrect API key provided: sk-proj-abc123def456. Visit the site",
        "invalid Bearer abcdefgh12345678",
        "key AIzaSyA1234567890abcdefghijk is wrong",
        "token gsk_abc123def456 expired",
        "the key of-the-operator is wrong",
    ],
)
def test_printable_error_has_no_keys(text: str) -> None:
    shown = printable_error(text, ["of-the-operator", "is"])
    assert MASK in shown and not any(part in shown for part in ("123", "operator")) and "\n" not in shown


def test_printable_error_keeps_ordinary_words() -> None:
    text = "the task-oriented model gpt-4o-mini is unknown (hint: use key_env or max_tokens)"
    assert printable_error(text) == text and len(printable_error("x" * 5000)) == 500
