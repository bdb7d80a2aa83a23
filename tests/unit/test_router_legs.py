"""A request at a worker, between two events: what is kept for it while another computes its prompt, and that it is cut
off in whatever moment it is to be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop

from emberline.cluster.card import Beat, Card, ModelCard
from emberline.core.clock import ManualClock, SystemClock
from emberline.core.config import Role, RouterConfig
from emberline.router.ask import Ask
from emberline.router.call import Call
from emberline.router.estimate import Estimate
from emberline.router.upstream import Broken, Reply, Upstream
from emberline.server.exchange import Exchange
from emberline.server.routing.dispatch import Dispatch
from emberline.server.routing.leg import Leg
from emberline.server.routing.relay import Relay

CALL = Call("POST", "/v1/chat/completions", {}, b"")
ROOM = 10_000  # tokens of a worker's cache

Run = Callable[[Coroutine[Any, Any, None]], None]


@dataclass
class Quiet:
    """Workers that are asked, and answer when they are let."""

    asked: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    let: asyncio.Event = field(default_factory=asyncio.Event)
    closed: int = 0

    async def request(self, at: str, call: Call) -> Reply:
        self.asked.put_nowait(at)
        await self.let.wait()
        return cast("Reply", SimpleNamespace(status=200, close=self._close))

    def _close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_who_is_cut_off_as_its_reply_begins_hears_of_it(run: Run) -> None:
    async def main() -> None:
        workers, leg = Quiet(), Leg(0, cast("Ask", None), cast("Any", None), 0.0, 0.0)

        async def asked() -> None:
            async with leg.asked(cast("Upstream", workers), "http://w", CALL):
                raise AssertionError("it is passed on")

        asking = asyncio.create_task(asked())
        assert await workers.asked.get() == "http://w"
        workers.let.set()
        leg.cut("prefill")
        with pytest.raises(Broken, match="prefill"):
            await asking
        assert workers.closed == 1

    run(main())


def register(dispatch: Dispatch, name: str, role: Role, *paired: str) -> None:
    model = ModelCard("m", "layout", ROOM, 8, ROOM, 16, peer={"incarnation": f"engine of {name}"})
    dispatch.register(Card(name, "1", f"http://{name}", (model,), role))
    dispatch.beat(Beat(name, "1", paired=paired))


def test_a_prompt_that_is_computed_elsewhere_has_its_room_here() -> None:
    async def main() -> None:
        config, workers = RouterConfig(), Quiet()
        dispatch = Dispatch(config, SystemClock())
        register(dispatch, "p", "prefill")
        register(dispatch, "d", "decode", "engine of p")
        body = json.dumps({"model": "m", "prompt": "a long story " * 400, "max_tokens": 100}).encode()
        ask, scope = Ask.read(body), {"method": "POST", "path": "/v1/completions", "headers": []}
        x = Exchange(scope, cast("Any", None), cast("Any", None))
        asking = asyncio.create_task(Relay(dispatch, cast("Upstream", workers), config).run(x, ask, body))
        assert await asyncio.wait_for(workers.asked.get(), 20) == "http://p"
        here, there, prompt = dispatch.workers["d"], dispatch.workers["p"], Estimate().prompt(ask.size)
        assert (here.prefill, there.prefill) == (0.0, prompt), "it is the other's work"
        assert here.room == ROOM - prompt - here.decode, "its blocks come here even so"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert here.room == there.room == ROOM and not dispatch.num_open

    asyncio.run(main())


def pass_seconds(dispatch: Dispatch, clock: ManualClock, seconds: float) -> None:
    for _ in range(4):
        clock.advance(seconds / 4)
        dispatch.tick()


def test_who_goes_on_speaking_is_not_lost_for_want_of_beats() -> None:
    """They come late from a busy machine. It gets nothing new, but what it has is cut off only when that is silent too;
    what it has not begun to answer, at once."""
    clock = ManualClock()
    dispatch = Dispatch(RouterConfig(), clock)
    register(dispatch, "w", "both")
    ask = Ask.read(json.dumps({"model": "m", "prompt": "a story", "max_tokens": 100}).encode())
    decision = dispatch.choose(ask, set())
    with dispatch.opened(ask, decision) as speaking, dispatch.opened(ask, decision) as silent:
        for _ in range(8):
            clock.advance(1.0)
            dispatch.came(speaking, 1)
            dispatch.tick()
        assert (speaking.lost, silent.lost) == ("", "lost") and not decision.worker.ready
        pass_seconds(dispatch, clock, RouterConfig().lost_after)
        assert not speaking.lost
        clock.advance(0.1)
        dispatch.tick()
        assert speaking.lost == "lost"


def test_nor_is_it_borne_for_long_once_it_was_replaced() -> None:
    clock = ManualClock()
    dispatch = Dispatch(RouterConfig(), clock)
    register(dispatch, "w", "both")
    ask = Ask.read(json.dumps({"model": "m", "prompt": "a story", "max_tokens": 100}).encode())
    with dispatch.opened(ask, dispatch.choose(ask, set())) as leg:
        for _ in range(5):
            clock.advance(1.0)
            dispatch.came(leg, 1)
            dispatch.tick()
        model = ModelCard("m", "layout", ROOM, 8, ROOM, 16)
        dispatch.register(Card("w", "2", "http://w2", (model,), "both"))
        pass_seconds(dispatch, clock, RouterConfig().lost_after)
        assert not leg.lost, "it speaks"
        clock.advance(0.1)
        dispatch.tick()
        assert leg.lost


def test_standing_still_is_held_against_nobody() -> None:
    """The router itself was stopped for a minute: what was said meanwhile is still to be read."""
    clock = ManualClock()
    dispatch = Dispatch(RouterConfig(), clock)
    register(dispatch, "w", "both")
    ask = Ask.read(json.dumps({"model": "m", "prompt": "a story", "max_tokens": 100}).encode())
    decision = dispatch.choose(ask, set())
    with dispatch.opened(ask, decision) as leg:
        dispatch.tick()
        clock.advance(60.0)
        dispatch.tick()
        assert decision.worker.ready and not leg.lost
        pass_seconds(dispatch, clock, RouterConfig().lost_after)
        assert decision.worker.ready and not leg.lost
        pass_seconds(dispatch, clock, 0.1)
        assert not decision.worker.ready and leg.lost == "lost", "its silence counts from then on"
