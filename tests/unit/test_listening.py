"""Of two servers that were given the same port, the second says so, however close together they start."""

from __future__ import annotations

import asyncio
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
