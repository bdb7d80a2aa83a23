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
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.http.relay import Relay
from emberline.router.http.routed_request import RoutedRequest
from emberline.router.native import NativeDialect
from emberline.router.request_summary import RequestSummary
from emberline.router.upstream_request import UpstreamRequest

NOTHING: Any = None


def new_routed_request(deadline: float, *, stream: bool) -> RoutedRequest:
    ask = RequestSummary.parse(msgspec.json.encode({"model": "m", "prompt": "a", "stream": stream}))
    return RoutedRequest(NOTHING, ask, NOTHING, 0, 0, None, deadline, 3, 3, is_generation=True, is_known_suspect=False)


def output_deadlines(config: RouterConfig, asked: RoutedRequest, watched: bool) -> list[float | None]:
    """When the reply must go on: at the start, with a worker, after a token at 500 s, and after one at 500.5 s."""
    clock, when = ManualClock(), []

    async def main() -> None:
        relay = Relay(Dispatcher(config, clock), NOTHING, config)
        relay._now = clock.now  # type: ignore[method-assign]
        async with asyncio.timeout(None) as asked.output_timeout:
            start = clock.now()
            relay._extend_output_deadline(asked, force=True)
            when.append(asked.output_timeout.when())
            asked.worker_times_out_itself = watched
            relay._extend_output_deadline(asked, force=True)
            when.append(asked.output_timeout.when())
            for seconds in (500.0, 0.5):
                clock.advance(seconds)
                relay._extend_output_deadline(asked)
                when.append(asked.output_timeout.when())
            asked.output_timeout.reschedule(None)
            when[:] = [each if each is None else each - start for each in when]

    asyncio.run(main())
    return cast("list[float | None]", when)


def test_stream_deadline_is_next_token() -> None:
    assert output_deadlines(RouterConfig(), new_routed_request(math.inf, stream=True), watched=True) == [
        600,
        600,
        1100,
        1100,
    ]


def test_native_worker_times_out_reply_without_stream() -> None:
    assert output_deadlines(RouterConfig(), new_routed_request(math.inf, stream=False), watched=True)[1:] == [
        None,
        None,
        None,
    ]
    assert output_deadlines(RouterConfig(), new_routed_request(math.inf, stream=False), watched=False)[1] == 600


@pytest.mark.parametrize("stream", [True, False])
def test_request_timeout_holds(stream: bool) -> None:
    deadline = ManualClock().now() + 60
    assert (
        output_deadlines(RouterConfig(request_timeout=60), new_routed_request(deadline, stream=stream), watched=True)
        == [60] * 4
    )


def test_worker_gets_deadline_only_if_set() -> None:
    native = NativeDialect(UpstreamRequest("POST", "/v1/completions", {}, b"{}"), 1, None, 0)
    left = [
        msgspec.json.decode(native.build_resume_request(Handoff(), each, None, None).body)["timeout"]
        for each in (math.inf, 5)
    ]
    assert left == [None, 5]


def test_no_request_timeout_by_default() -> None:
    for config in (RouterConfig(), ServerConfig()):
        assert config.request_timeout == math.inf and config.token_timeout == 600
