"""What a router keeps does not grow with the requests that pass, nor with workers that come and go under new names."""

from __future__ import annotations

import gc
import json
import math
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import pytest

from emberline.cluster import membership
from emberline.cluster.registration import Heartbeat, ModelRegistration, WorkerRegistration
from emberline.core.blockbatch import BlockBatch
from emberline.core.clock import ManualClock
from emberline.core.config import RouterConfig, WorkerConfig
from emberline.core.errors import InvalidRequest
from emberline.router.http import worker_registry
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.http.worker_attempt import AttemptOutcome
from emberline.router.prefix_block_map import BlockPosition
from emberline.router.reply_usage import ReplyUsage
from emberline.router.request_summary import RequestSummary
from emberline.worker.main import check_worker_address

SKIPPED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, int, float)  # code, and what is counted
ENDINGS: tuple[AttemptOutcome, ...] = ("answered", "refused", "failed", "left", "moved")


def kept_entries(root: object) -> int:
    """Objects that are reached from this one."""
    seen, ahead = {id(root)}, [root]
    while ahead:
        for each in gc.get_referents(ahead.pop()):
            if id(each) not in seen and not isinstance(each, SKIPPED):
                seen.add(id(each))
                ahead.append(each)
    return len(seen)


def run_worker_lifetimes(dispatch: Dispatcher, clock: ManualClock, number: int) -> None:
    """Of a worker: it joins, answers or breaks, and is not heard of again, or says goodbye."""
    name, incarnation, model = f"w{number}", f"{number:032x}", f"m{number}"
    dispatch.register(
        WorkerRegistration(name, incarnation, f"http://{name}:1", (ModelRegistration(model, "l", 64, 8, 64, 16),))
    )
    dispatch.record_heartbeat(Heartbeat(name, incarnation, prompt_tokens=number, busy_seconds=1.0))
    assert dispatch.kv_index is not None
    link = BlockPosition(b"%032d" % number, 1)
    batch = BlockBatch(incarnation, 1, stored=[(link.digest, b"")], parts=1)
    dispatch.kv_index.apply_batch(f"{name}/{incarnation}", batch)
    for i, ending in enumerate(ENDINGS):
        text = f"{number} {i} " * 300
        ask = RequestSummary.parse(json.dumps({"model": model, "prompt": text}).encode(), session_id=f"s{number}")
        with dispatch.open_attempt(ask, dispatch.choose_worker(ask, set())) as leg:
            dispatch.record_reply_bytes(leg, 3)
            dispatch.record_prompt_end(leg, link)
            leg.usage, leg.outcome = ReplyUsage(100, 10, 0), ending
            if i == len(ENDINGS) - 1:  # the last ends when its worker is forgotten
                if number % 2:
                    dispatch.mark_leaving(name, incarnation)
                clock.advance(1000.0)
                dispatch.check_workers()
    dispatch.check_workers()


def test_kept_state_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_REPLACED_INCARNATIONS", 8)
    monkeypatch.setattr(worker_registry, "PAUSE_THRESHOLD_S", 1e9)  # time goes by in leaps
    clock = ManualClock()
    dispatch = Dispatcher(RouterConfig(prefixes=32, kv_events=True, kv_blocks=16), clock)
    for number in range(40):
        run_worker_lifetimes(dispatch, clock, number)
    full = kept_entries(dispatch)
    for number in range(40, 120):
        run_worker_lifetimes(dispatch, clock, number)
    assert kept_entries(dispatch) <= full
    assert not dispatch.open_attempt_count and not dispatch.workers and len(dispatch.prefixes) == 32
    assert sum(dispatch.metrics.outcomes.values()) == 120 * len(ENDINGS), "whoever they were, they are counted"


def test_unbounded_queue_is_refused() -> None:
    for queue in (math.inf, 1e9):
        with pytest.raises(InvalidRequest, match="queue"):
            RouterConfig(queue=queue)


def test_invalid_worker_address_is_refused_before_loading() -> None:
    check_worker_address(WorkerConfig(("http://router",)), "::1", 8001)
    for bad in (
        {"worker_url": "host:8001"},
        {"worker_url": "ftp://h"},
        {"worker_name": "n" * 200},
        {"worker_name": "w\u00f6rker"},
    ):
        with pytest.raises(InvalidRequest, match="invalid worker name or URL"):
            check_worker_address(WorkerConfig(("http://router",), **bad), "127.0.0.1", 8001)
