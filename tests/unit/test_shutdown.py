"""A stream that is open when a server stops ends with its protocol's error event, and is not logged as a 200."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from local_router import LocalRouter
from scripted_engine import Answer, WorkerHarness
from test_router_endings import HEAD, WORD, chunk

from emberline.core.handoff import TokenGroup

BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9000},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("leaves", [False, True])
def test_worker_shutdown_ends_streams_with_error(path: str, leaves: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "emberline")
    worker, answer, gone = WorkerHarness(lambda prompt, choice: "word " * 2000), Answer(), asyncio.Event()
    body = json.dumps({"model": "m", "stream": True, **BODIES[path]}).encode()
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "client": ("127.0.0.1", 1)}
    inbox = [{"type": "http.request", "body": body}]

    async def receive() -> dict[str, Any]:
        if not inbox:
            await gone.wait()
        return inbox.pop() if inbox else {"type": "http.disconnect"}

    async def run() -> None:
        serving = asyncio.ensure_future(worker.app(scope, receive, answer.send))
        while len(answer.writes) < 3:
            assert not serving.done(), answer.body
            await asyncio.sleep(0)
        gone.set() if leaves else serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(run())
    logged = next(each.getMessage() for each in caplog.records if each.getMessage().startswith("Request: method=POST"))
    if leaves:
        assert b"shutting_down" not in answer.body and "gone" in logged
    else:
        assert answer.ended and b"server shut down" in answer.body and not worker.engine.open
        assert f"path={path} status=503 " in logged and "shutting_down" in logged


def test_router_shutdown_ends_streams_with_error() -> None:
    begun = asyncio.Event()

    async def never_ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + chunk(TokenGroup(0, (1,)), WORD.replace(b'"stop"', b"null")))
        await writer.drain()
        begun.set()
        await reader.read()

    async def run() -> bytes:
        router = await LocalRouter().start()
        await router.add_worker("a", never_ends)
        asking = asyncio.create_task(router.relay_request())
        await begun.wait()
        while not any(each.open_requests for each in router.app.dispatcher.workers.values()):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # the first event is passed on
        await router.stop(0.0)
        return await asking

    got = asyncio.run(run())
    assert b"hi" in got and b"shutting_down" in got
