"""Of two servers that were given the same port, the second says so, however close together they start."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import pytest
import uvloop

from emberline.core.errors import InvalidRequest
from emberline.server.listening import bind, listen


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nobody asks")


def test_the_second_on_a_port_is_told() -> None:
    first = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    second = bind("127.0.0.1", port)  # as long as nobody listens, that is no mistake
    first.listen()
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            listening = listen(nothing, second, lambda: failed.append(AssertionError("ready")))
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(asyncio.wait_for(listening, 5))
        except (InvalidRequest, TimeoutError) as e:
            failed.append(e)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join(20)
    first.close()
    second.close()
    assert [type(error) for error in failed] == [InvalidRequest]


def test_a_port_where_somebody_listens_is_refused_at_once() -> None:
    first = bind("127.0.0.1", 0)
    first.listen()
    with pytest.raises(InvalidRequest, match="choose another --port"):
        bind("127.0.0.1", first.getsockname()[1])
    first.close()


def test_a_stop_with_open_requests_says_how_long_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "emberline.server")

    async def main() -> None:
        begun, end = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            begun.set()
            await end.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

        async def leaving() -> None:
            end.set()

        listener = bind("127.0.0.1", 0)
        port = listener.getsockname()[1]
        ready = asyncio.Event()
        listening = asyncio.create_task(listen(app, listener, ready.set, leaving))
        await ready.wait()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await begun.wait()
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(listening, 20)
        writer.close()

    old = signal.getsignal(signal.SIGTERM)
    try:
        asyncio.run(main())
    finally:
        signal.signal(signal.SIGTERM, old)
    assert "stopping: open requests get up to 10 s to end (1 open)" in caplog.text
