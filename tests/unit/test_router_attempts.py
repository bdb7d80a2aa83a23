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

from emberline.cluster.registration import Heartbeat, ModelRegistration, WorkerRegistration
from emberline.core.clock import SystemClock
from emberline.core.config import Role, RouterConfig
from emberline.core.numerics import Numerics
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.http.relay import Relay
from emberline.router.http.worker_attempt import WorkerAttempt
from emberline.router.request_summary import RequestSummary
from emberline.router.token_estimator import TokenEstimator
from emberline.router.upstream_request import UpstreamRequest
from emberline.router.worker_client import HTTPClientResponse, UpstreamBroken, WorkerClient
from emberline.server.exchange import Exchange

CALL = UpstreamRequest("POST", "/v1/chat/completions", {}, b"")
BFLOAT16 = Numerics("abc", "bfloat16", "plain", "bfloat16", "cpu")
ROOM = 10_000  # tokens of a worker's cache

Run = Callable[[Coroutine[Any, Any, None]], None]


@dataclass
class SilentWorkerClient:
    """Workers that are asked, and answer when they are let."""

    asked: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    let: asyncio.Event = field(default_factory=asyncio.Event)
    closed: int = 0

    async def request(self, at: str, call: UpstreamRequest) -> HTTPClientResponse:
        self.asked.put_nowait(at)
        await self.let.wait()
        return cast("HTTPClientResponse", SimpleNamespace(status=200, close=self._close))

    def _close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_abort_at_reply_start_raises(run: Run) -> None:
    async def main() -> None:
        workers, leg = SilentWorkerClient(), WorkerAttempt(0, cast("RequestSummary", None), cast("Any", None), 0.0, 0.0)

        async def asked() -> None:
            async with leg.open_reply(cast("WorkerClient", workers), "http://w", CALL):
                raise AssertionError("it is passed on")

        asking = asyncio.create_task(asked())
        assert await workers.asked.get() == "http://w"
        workers.let.set()
        leg.abort("prefill")
        with pytest.raises(UpstreamBroken, match="prefill"):
            await asking
        assert workers.closed == 1

    run(main())


def register(dispatch: Dispatcher, name: str, role: Role, *paired: str, numerics: Numerics | None = BFLOAT16) -> None:
    model = ModelRegistration(
        "m", "layout", ROOM, 8, ROOM, 16, peer={"incarnation": f"engine of {name}"}, numerics=numerics
    )
    dispatch.register(WorkerRegistration(name, "1", f"http://{name}", (model,), role))
    dispatch.record_heartbeat(Heartbeat(name, "1", paired=paired))


def test_remote_prefill_reserves_kv_at_answering_worker() -> None:
    async def main() -> None:
        config, workers = RouterConfig(), SilentWorkerClient()
        dispatch = Dispatcher(config, SystemClock())
        register(dispatch, "p", "prefill")
        register(dispatch, "d", "decode", "engine of p")
        body = json.dumps({"model": "m", "prompt": "a long story " * 400, "max_tokens": 100}).encode()
        ask, scope = RequestSummary.parse(body), {"method": "POST", "path": "/v1/completions", "headers": []}
        x = Exchange(scope, cast("Any", None), cast("Any", None))
        asking = asyncio.create_task(Relay(dispatch, cast("WorkerClient", workers), config).run(x, ask, body))
        assert await asyncio.wait_for(workers.asked.get(), 20) == "http://p"
        here, there, prompt = (
            dispatch.workers["d"],
            dispatch.workers["p"],
            TokenEstimator().estimate_prompt_tokens(ask.prompt_bytes),
        )
        assert (here.prefill_tokens, there.prefill_tokens) == (0.0, prompt), "it is the other's work"
        assert here.kv_free_tokens == ROOM - prompt - here.decode_tokens, "its blocks come here even so"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert here.kv_free_tokens == there.kv_free_tokens == ROOM and not dispatch.open_attempt_count

    asyncio.run(main())


def test_leaving_worker_stays_peer_of_paired_workers() -> None:
    """They fetch what is theirs; nobody else is to get to know it."""
    dispatch = Dispatcher(RouterConfig(), SystemClock())
    register(dispatch, "p", "prefill")
    register(dispatch, "d", "decode", "engine of p")
    register(dispatch, "e", "decode")
    assert dispatch.peers_by_model("d") == dispatch.peers_by_model("e") == {"m": [{"incarnation": "engine of p"}]}
    dispatch.mark_leaving("p", "1")
    assert (
        dispatch.peers_by_model("d") == {"m": [{"incarnation": "engine of p"}]} and dispatch.peers_by_model("e") == {}
    )


def test_only_native_workers_continue_streams() -> None:
    dispatch = Dispatcher(RouterConfig(), SystemClock())
    register(dispatch, "a", "both")
    dispatch.register(WorkerRegistration("v", "1", "http://v", (ModelRegistration("m"),), dialect="vllm"))
    assert dispatch.ids_of_workers_unable_to_continue("m", dispatch.workers["a"]) == {"v/1"}


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
def test_streams_and_blocks_need_equal_numerics(other: Numerics | None) -> None:
    dispatch = Dispatcher(RouterConfig(), SystemClock())
    register(dispatch, "p", "prefill", numerics=other)
    register(dispatch, "a", "decode", "engine of p")
    register(dispatch, "b", "decode", "engine of p", numerics=other)
    a, b, p = (dispatch.workers[name] for name in "abp")
    assert dispatch.ids_of_workers_unable_to_continue("m", a) == {
        "b/1",
        "p/1",
    } and dispatch.ids_of_workers_unable_to_continue("m", b) == {"a/1"}
    assert b.can_fetch_blocks_from(p, "m") and not a.can_fetch_blocks_from(p, "m")
    assert dispatch.describe_numerics_difference("m", b) == "", (
        "one that agrees is ready: it was lost for another reason"
    )
    dispatch.set_draining("a", True)
    why = dispatch.describe_numerics_difference("m", a)
    assert why.startswith("release") if other is None else why == BFLOAT16.differences(other) and why.count("(") == 1


def test_blocks_but_no_streams_move_between_different_numbers_of_tensor_ranks(caplog: pytest.LogCaptureFixture) -> None:
    dispatch = Dispatcher(RouterConfig(), SystemClock())
    divided = replace(BFLOAT16, ranks="tp2")
    register(dispatch, "p", "prefill", numerics=divided)
    register(dispatch, "d", "decode", "engine of p")
    p, d = (dispatch.workers[name] for name in "pd")
    assert d.can_fetch_blocks_from(p, "m") and dispatch.ids_of_workers_unable_to_continue("m", d) == {"p/1"}
    assert "no started streams move between them" in caplog.text and "ranks (, tp2)" in caplog.text
    d.numerics = {"m": replace(divided, dtype="float32")}
    assert not d.can_fetch_blocks_from(p, "m")


def test_drain_moves_only_continuable_streams() -> None:
    dispatch = Dispatcher(RouterConfig(), SystemClock())
    register(dispatch, "a", "both")
    register(dispatch, "b", "both", numerics=replace(BFLOAT16, dtype="float32"))
    ask = RequestSummary("m", 400, True, 16)
    begun, new = (dispatch.choose_worker(ask, {"b/1"}) for _ in range(2))
    with dispatch.open_attempt(ask, begun) as one, dispatch.open_attempt(ask, new) as two:
        one.is_movable = two.is_movable = True
        dispatch.record_reply_bytes(one, 1)
        dispatch.set_draining("a", True, move_streams=True)
        assert (one.abort_reason, two.abort_reason) == ("", "drained"), "what has not begun can begin anywhere"
        register(dispatch, "c", "both")
        dispatch.set_draining("a", True, move_streams=True)
        assert one.abort_reason == "drained"


@pytest.mark.parametrize(
    ("prompt", "said", "worth"), [(4000, 0, True), (40, 0, False), (40, 20, False), (40, 500, True)]
)
def test_handover_only_for_many_tokens(prompt: int, said: int, worth: bool) -> None:
    """Of a stream with a short prompt too, if it has a long output by then."""
    dispatch = Dispatcher(RouterConfig(), SystemClock())
    for name, paired in (("old", ()), ("new", ("eold",))):
        model = ModelRegistration("m", max_running=8, peer={"incarnation": f"e{name}"}, numerics=BFLOAT16)
        dispatch.register(WorkerRegistration(name, f"i{name}", f"http://{name}", (model,)))
        dispatch.record_heartbeat(Heartbeat(name, f"i{name}", paired=paired))
    ask = RequestSummary("m", prompt, True, None, is_single_sequence=True)
    dispatch.set_draining("old", True)
    answering = dispatch.choose_worker(ask, set())
    assert answering.worker.name == "new"
    decision = dispatch.choose_kv_source_for_moved_stream(ask, said, answering, dispatch.workers["old"])
    assert (decision is not None) == worth
    assert decision is None or decision.worker.name == "old"
