"""A server that is short of file descriptors closes idle connections, says so, and recovers."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
from typing import Any

import pytest
from raw_http import GET, all_left, answer, run

from emberline.core.descriptor_limit import raise_descriptor_limit
from emberline.net import server as server_module
from emberline.net import server_connection
from emberline.net.descriptors import DescriptorWatch
from emberline.net.server import HTTPServer
from emberline.net.server_state import Receive, Send
from emberline.server.metrics import listener_families, render_exposition


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> DescriptorWatch:
    made = DescriptorWatch()
    for module in (server_module, server_connection):
        monkeypatch.setattr(module, "descriptor_watch", made)
    return made


def test_descriptors_near_the_limit_are_reserved(monkeypatch: pytest.MonkeyPatch, watch: DescriptorWatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert [watch.count_missing(each) for each in (10, 959, 960, 1023)] == [0, 0, 1, 64]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (80, 80))
    assert [watch.count_missing(each) for each in (69, 70, 79)] == [0, 1, 10]


def test_idle_connection_makes_room_for_a_new_one(monkeypatch: pytest.MonkeyPatch, watch: DescriptorWatch) -> None:
    may_answer = asyncio.Event()

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await may_answer.wait()
        await answer(send, b"done")

    async def work(client: Any, server: HTTPServer) -> None:
        busy = await client()
        busy.send(GET)
        while not server.state.tasks:
            await asyncio.sleep(0.01)
        idle = await client()
        while len(server.state.connections) < 2:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(watch, "count_missing", lambda descriptor: 1)
        newest = await client()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await idle.reply()
        newest.send(GET)
        while len(server.state.tasks) < 2:
            await asyncio.sleep(0.01)
        reply, body = await (await client()).reply()  # all others have requests
        assert reply.startswith(b"HTTP/1.1 503 ") and b"too many open connections" in body
        may_answer.set()
        assert [(await each.reply())[1] for each in (busy, newest)] == [b"done", b"done"]

    run(app, work)
    assert (watch.closed_connections >= 1, watch.rejected_connections) == (True, 1)


def test_exhaustion_is_logged_once_and_idle_connections_are_closed(
    monkeypatch: pytest.MonkeyPatch, watch: DescriptorWatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The event loop closes new connections without calling the server, so the check each second must notice."""
    monkeypatch.setattr(server_module, "CHECK_INTERVAL_S", 0.02)

    def fail(descriptor: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async def work(client: Any, server: HTTPServer) -> None:
        opened = [await client() for _ in range(3)]
        while len(server.state.connections) < 3:
            await asyncio.sleep(0.01)
        with monkeypatch.context() as patch:
            patch.setattr(os, "dup", fail)
            await all_left(server)
            while watch.exhausted_checks < 3:
                await asyncio.sleep(0.01)
        assert [await each.reader.read() for each in opened] == [b""] * 3

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        raise AssertionError

    run(app, work)
    lines = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(lines) == 1 and "Too many open files" in lines[0] and "ulimit -n" in lines[0]
    assert watch.closed_connections == 3


def test_soft_limit_is_raised_to_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    raise_descriptor_limit()
    raise_descriptor_limit()
    assert limits == [(1024, 4096), (4096, 4096)]


def test_metrics_of_listeners() -> None:
    text = render_exposition(listener_families())
    for name in ("request_body_bytes", "rejected_connections_total", "descriptor_exhaustion_total"):
        assert f"\nemberline:http_{name} " in text
