"""A request at a worker, between two events: what is kept for it while another computes its prompt, and that it is cut
off in whatever moment it is to be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop

from emberline.cluster.card import Beat, Card, ModelCard
from emberline.core.clock import SystemClock
from emberline.core.config import Role, RouterConfig
from emberline.core.numerics import Numerics
from emberline.router.ask import Ask
from emberline.router.call import Call
from emberline.router.estimate import Estimate
from emberline.router.upstream import Broken, Reply, Upstream
from emberline.server.exchange import Exchange
from emberline.server.routing.dispatch import Dispatch
from emberline.server.routing.leg import Leg
from emberline.server.routing.relay import Relay

CALL = Call("POST", "/v1/chat/completions", {}, b"")
BFLOAT16 = Numerics("abc", "bfloat16", "plain", "bfloat16", "cpu")
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


def register(dispatch: Dispatch, name: str, role: Role, *paired: str, numerics: Numerics | None = BFLOAT16) -> None:
    model = ModelCard("m", "layout", ROOM, 8, ROOM, 16, peer={"incarnation": f"engine of {name}"}, numerics=numerics)
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


def test_who_leaves_is_still_there_for_those_it_has_computed_for() -> None:
    """They fetch what is theirs; nobody else is to get to know it."""
    dispatch = Dispatch(RouterConfig(), SystemClock())
    register(dispatch, "p", "prefill")
    register(dispatch, "d", "decode", "engine of p")
    register(dispatch, "e", "decode")
    assert dispatch.peers("d") == dispatch.peers("e") == {"m": [{"incarnation": "engine of p"}]}
    dispatch.leave("p", "1")
    assert dispatch.peers("d") == {"m": [{"incarnation": "engine of p"}]} and dispatch.peers("e") == {}


def test_only_workers_of_our_own_go_on_with_what_others_began() -> None:
    dispatch = Dispatch(RouterConfig(), SystemClock())
    register(dispatch, "a", "both")
    dispatch.register(Card("v", "1", "http://v", (ModelCard("m"),), dialect="vllm"))
    assert dispatch.unable("m", dispatch.workers["a"]) == {"v/1"}


@pytest.mark.parametrize(
    "other",
    [
        replace(BFLOAT16, checkpoint="def"),
        replace(BFLOAT16, dtype="float32"),
        replace(BFLOAT16, weights="packed"),
        replace(BFLOAT16, kv_dtype="float8_e4m3fn"),
        replace(BFLOAT16, device="cuda"),
        None,
    ],
)
def test_streams_and_blocks_stay_with_workers_of_the_same_numerics(other: Numerics | None) -> None:
    dispatch = Dispatch(RouterConfig(), SystemClock())
    register(dispatch, "p", "prefill", numerics=other)
    register(dispatch, "a", "decode", "engine of p")
    register(dispatch, "b", "decode", "engine of p", numerics=other)
    a, b, p = (dispatch.workers[name] for name in "abp")
    assert dispatch.unable("m", a) == {"b/1", "p/1"} and dispatch.unable("m", b) == {"a/1"}
    assert b.takes_from(p, "m") and not a.takes_from(p, "m")
    assert dispatch.difference("m", b) == "", "one that agrees is ready: it was lost for another reason"
    dispatch.drain("a", True)
    why = dispatch.difference("m", a)
    assert why.startswith("release") if other is None else why == BFLOAT16.differences(other) and why.count("(") == 1


def test_a_drain_moves_only_streams_that_another_can_continue() -> None:
    dispatch = Dispatch(RouterConfig(), SystemClock())
    register(dispatch, "a", "both")
    register(dispatch, "b", "both", numerics=replace(BFLOAT16, dtype="float32"))
    ask = Ask("m", 400, True, 16)
    begun, new = (dispatch.choose(ask, {"b/1"}) for _ in range(2))
    with dispatch.opened(ask, begun) as one, dispatch.opened(ask, new) as two:
        one.movable = two.movable = True
        dispatch.came(one, 1)
        dispatch.drain("a", True, move=True)
        assert (one.lost, two.lost) == ("", "drained"), "what has not begun can begin anywhere"
        register(dispatch, "c", "both")
        dispatch.drain("a", True, move=True)
        assert one.lost == "drained"


@pytest.mark.parametrize(
    ("prompt", "said", "worth"), [(4000, 0, True), (40, 0, False), (40, 20, False), (40, 500, True)]
)
def test_blocks_are_handed_over_where_much_would_be_computed_again(prompt: int, said: int, worth: bool) -> None:
    """Of a stream with a short prompt too, if it has a long output by then."""
    dispatch = Dispatch(RouterConfig(), SystemClock())
    for name, paired in (("old", ()), ("new", ("eold",))):
        model = ModelCard("m", max_running=8, peer={"incarnation": f"e{name}"}, numerics=BFLOAT16)
        dispatch.register(Card(name, f"i{name}", f"http://{name}", (model,)))
        dispatch.beat(Beat(name, f"i{name}", paired=paired))
    ask = Ask("m", prompt, True, None, single=True)
    dispatch.drain("old", True)
    answering = dispatch.choose(ask, set())
    assert answering.worker.name == "new"
    decision = dispatch.handover(ask, said, answering, dispatch.workers["old"])
    assert (decision is not None) == worth
    assert decision is None or decision.worker.name == "old"
