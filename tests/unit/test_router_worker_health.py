"""Lost and stuck workers are abandoned; a pause of the router itself loses no worker."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import msgspec
import pytest

from emberline.cluster.registration import Heartbeat, ModelRegistration, WorkerRegistration
from emberline.core.clock import ManualClock
from emberline.core.config import RouterConfig
from emberline.core.errors import InvalidRequest, Superseded
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.http.worker_attempt import WorkerAttempt
from emberline.router.http.worker_registry import TICK_INTERVAL_S
from emberline.router.request_summary import RequestSummary

PATIENCE = RouterConfig().lost_after


def new_registration(incarnation: str) -> WorkerRegistration:
    return WorkerRegistration(
        "w", incarnation, "http://w", (ModelRegistration("m", "layout", 10_000, 8, 10_000, 16),), "both"
    )


@dataclass
class RouterWorld:
    """A worker, and what it is asked."""

    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self.dispatch = Dispatcher(RouterConfig(), self.clock)
        self.dispatch.register(new_registration("1"))
        self.dispatch.record_heartbeat(Heartbeat("w", "1"))
        self.ask = RequestSummary.parse(json.dumps({"model": "m", "prompt": "a story", "max_tokens": 100}).encode())
        self.decision = self.dispatch.choose_worker(self.ask, set())

    @property
    def ready(self) -> bool:
        return self.decision.worker.is_ready

    def asked(self) -> AbstractContextManager[WorkerAttempt]:
        return self.dispatch.open_attempt(self.ask, self.decision)

    def pass_seconds(self, seconds: float) -> None:
        ticks = max(1, round(seconds / TICK_INTERVAL_S))
        for _ in range(ticks):
            self.clock.advance(seconds / ticks)
            self.dispatch.check_workers()


@pytest.fixture
def world() -> RouterWorld:
    return RouterWorld()


def test_active_stream_survives_missing_heartbeats(world: RouterWorld) -> None:
    """They come late from a busy machine. It gets nothing new, but what it has is cut off only when that is silent too;
    what it has not begun to answer, at once."""
    with world.asked() as speaking, world.asked() as silent:
        for _ in range(8):
            world.pass_seconds(1.0)
            world.dispatch.record_reply_bytes(speaking, 1)
        assert (speaking.abort_reason, silent.abort_reason) == ("", "lost") and not world.ready
        world.pass_seconds(PATIENCE)
        assert not speaking.abort_reason
        world.pass_seconds(0.1)
        assert speaking.abort_reason == "lost"


def test_replaced_worker_has_limited_silence(world: RouterWorld) -> None:
    with world.asked() as leg:
        for _ in range(5):
            world.pass_seconds(1.0)
            world.dispatch.record_reply_bytes(leg, 1)
        world.dispatch.register(new_registration("2"))
        world.pass_seconds(PATIENCE)
        assert not leg.abort_reason, "it speaks"
        world.pass_seconds(0.1)
        assert leg.abort_reason


@pytest.mark.parametrize("waiting", [0, 2])  # for room, until the blocks are there
@pytest.mark.parametrize("loading", [1, 0])
def test_worker_waiting_for_blocks_is_not_stuck(world: RouterWorld, loading: int, waiting: int) -> None:
    """It makes no step meanwhile; that these come is looked after where they do."""
    with world.asked() as leg:
        for _ in range(round(RouterConfig().stuck_after) + 2):
            world.pass_seconds(1.0)
            world.dispatch.record_heartbeat(Heartbeat("w", "1", running=1, waiting=waiting, loading=loading))
        assert (world.ready, leg.abort_reason) == ((True, "") if loading else (False, "stuck"))


def test_router_pause_loses_no_worker(world: RouterWorld) -> None:
    """The router itself was stopped for a minute: what was said meanwhile is still to be read."""
    with world.asked() as leg:
        world.clock.advance(60.0)
        world.dispatch.check_workers()
        assert world.ready and not leg.abort_reason
        world.pass_seconds(PATIENCE - TICK_INTERVAL_S)
        assert world.ready and not leg.abort_reason
        world.pass_seconds(0.1)
        assert not world.ready and leg.abort_reason == "lost", "their silence counts from then on"


def test_router_pause_ending_with_heartbeat_loses_no_worker(world: RouterWorld) -> None:
    with world.asked() as leg:
        world.clock.advance(60.0)
        world.dispatch.record_heartbeat(Heartbeat("w", "1", running=1))  # sent in the first second of that minute
        assert world.ready and not leg.abort_reason, "it is not stuck"
    world.dispatch.register(new_registration("2"))
    world.clock.advance(60.0)
    with pytest.raises(Superseded):
        world.dispatch.register(new_registration("1"))  # the newer one is not lost


def test_name_belongs_to_live_worker(world: RouterWorld) -> None:
    other = msgspec.structs.replace(new_registration("2"), url="http://elsewhere")
    with pytest.raises(Superseded, match="is alive at http://w"):
        world.dispatch.register(other)
    assert world.dispatch.worker_url(world.decision.worker) == "http://w"
    world.pass_seconds(PATIENCE + 0.1)  # without a beat
    world.dispatch.register(other)
    with pytest.raises(Superseded):
        world.dispatch.register(new_registration("1"))
    world.dispatch.mark_leaving("w", "2")
    world.dispatch.register(new_registration("3"))  # the other has said goodbye
    world.decision = world.dispatch.choose_worker(world.ask, set())
    world.decision.worker.failed_since_heartbeat = True  # it broke, and was not heard of since
    world.dispatch.register(msgspec.structs.replace(new_registration("4"), url="http://again"))


@pytest.mark.parametrize(("host", "url"), [
    ("127.0.0.1", "http://127.0.0.1:8000"), ("127.0.0.1", "http://localhost:8000"), ("localhost", "http://127.0.0.1:8000"),
    ("0.0.0.0", "http://127.0.0.1:8000"), ("::", "http://127.0.0.1:8000/")])  # fmt: skip
def test_router_cannot_register_itself(host: str, url: str) -> None:
    dispatch = Dispatcher(RouterConfig(host=host, port=8000), ManualClock())
    with pytest.raises(InvalidRequest, match="the URL of this router"):
        dispatch.register(msgspec.structs.replace(new_registration("1"), url=url))
    for elsewhere in ("http://127.0.0.1:8001", "http://192.0.2.1:8000"):
        dispatch.register(msgspec.structs.replace(new_registration("1"), url=elsewhere))


def test_dead_worker_is_lost_despite_repeated_pauses(world: RouterWorld) -> None:
    for _ in range(100):
        world.clock.advance(1.1)
        world.dispatch.check_workers()
    assert not world.ready
