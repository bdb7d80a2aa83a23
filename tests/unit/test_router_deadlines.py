"""How long a router waits for the next part of a reply: as long as tokens flow there is no other limit by default."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import msgspec
import pytest

from emberline.core.clock import ManualClock
from emberline.core.config import RouterConfig, ServerConfig
from emberline.core.handoff import Handoff
from emberline.router.ask import Ask
from emberline.router.call import Call
from emberline.router.native import Native
from emberline.server.routing.dispatch import Dispatch
from emberline.server.routing.relay import Relay
from emberline.server.routing.trip import Trip

NOTHING: Any = None


def trip(deadline: float, *, stream: bool) -> Trip:
    ask = Ask.read(msgspec.json.encode({"model": "m", "prompt": "a", "stream": stream}))
    return Trip(NOTHING, ask, NOTHING, 0, 0, None, deadline, 3, 3, generates=True, accused=False)


def limits(config: RouterConfig, asked: Trip, watched: bool) -> list[float | None]:
    """When the reply must go on: at the start, with a worker, after a token at 500 s, and after one at 500.5 s."""
    clock, when = ManualClock(), []

    async def main() -> None:
        relay = Relay(Dispatch(config, clock), NOTHING, config)
        relay._now = clock.now  # type: ignore[method-assign]
        async with asyncio.timeout(None) as asked.limit:
            start = clock.now()
            relay._extend(asked, anew=True)
            when.append(asked.limit.when())
            asked.watched = watched
            relay._extend(asked, anew=True)
            when.append(asked.limit.when())
            for seconds in (500.0, 0.5):
                clock.advance(seconds)
                relay._extend(asked)
                when.append(asked.limit.when())
            asked.limit.reschedule(None)
            when[:] = [each if each is None else each - start for each in when]

    asyncio.run(main())
    return cast("list[float | None]", when)


def test_a_stream_has_a_deadline_for_its_next_token_only() -> None:
    assert limits(RouterConfig(), trip(math.inf, stream=True), watched=True) == [600, 600, 1100, 1100]


def test_a_whole_reply_is_left_to_a_worker_that_has_deadlines_itself() -> None:
    assert limits(RouterConfig(), trip(math.inf, stream=False), watched=True)[1:] == [None, None, None]
    assert limits(RouterConfig(), trip(math.inf, stream=False), watched=False)[1] == 600


@pytest.mark.parametrize("stream", [True, False])
def test_a_limit_that_was_asked_for_holds(stream: bool) -> None:
    deadline = ManualClock().now() + 60
    assert limits(RouterConfig(request_timeout=60), trip(deadline, stream=stream), watched=True) == [60] * 4


def test_a_worker_is_told_a_deadline_only_where_there_is_one() -> None:
    native = Native(Call("POST", "/v1/completions", {}, b"{}"), 1, None, 0)
    left = [msgspec.json.decode(native.resume(Handoff(), each, None, None).body)["timeout"] for each in (math.inf, 5)]
    assert left == [None, 5]


def test_there_is_no_limit_of_the_whole_by_default() -> None:
    for config in (RouterConfig(), ServerConfig()):
        assert config.request_timeout == math.inf and config.token_timeout == 600
