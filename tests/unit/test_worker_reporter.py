"""A worker in a cluster: its registration, readiness, peers and repeated registration."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest

from emberline.api.openai.models import ServedModel
from emberline.cluster import registrar
from emberline.cluster.registrar import NOT_READY_INTERVAL_S, REGISTER_INTERVAL_S, Registrar
from emberline.cluster.registration import Heartbeat, ModelRegistration, WorkerRegistration
from emberline.core.config import WorkerConfig
from emberline.core.errors import InvalidRequest
from emberline.core.events import Stats, TransferStats
from emberline.engine.async_engine import AsyncEngine, EngineState
from emberline.engine.messages import LoadedModelInfo, PairingChange
from emberline.engine.rank_summary import RankSummary
from emberline.net.connection_pool import FetchedReply, HTTPConnectionPool
from emberline.net.errors import UpstreamUnreachable
from emberline.worker.main import LEASE_DRAIN_TIMEOUT_S, _worker_name, wait_until_blocks_are_fetched, with_reachable_url
from emberline.worker.worker_reporter import PAIRING_TIMEOUT_S, WorkerReporter

P1, P2 = {"name": "p1", "incarnation": "one"}, {"name": "p2", "incarnation": "two"}


@dataclass
class Engine:
    model_info: dict[str, LoadedModelInfo] = field(default_factory=dict)
    stats: dict[str, Stats] = field(default_factory=dict)
    pairing_states: dict[str, PairingChange] = field(default_factory=dict)
    state: EngineState = EngineState.READY
    time: float = 100.0
    progress_reports: int = 0
    is_asleep: bool = False
    peer_updates: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)

    def now(self) -> float:
        return self.time

    def set_peers(self, model: str, peers: list[dict[str, Any]]) -> None:
        self.peer_updates.append((model, peers))


def facts(peer: dict[str, Any] | None) -> LoadedModelInfo:
    return LoadedModelInfo(512, 300, [], 4096, 16, 1, 1, "ref", "layout", 64, {}, peer)


def make_reporter(engine: Engine) -> WorkerReporter:
    served = [ServedModel("m", 1, 512), ServedModel("embedder", 1, 256)]
    return WorkerReporter("w", "i", "http://w", "decode", cast("AsyncEngine", engine), lambda: served)


def test_shutdown_waits_for_leased_blocks() -> None:
    engine, stopped = Engine(stats={"m": Stats(transfer=TransferStats(leases=1))}), list[str]()

    async def stop() -> None:
        await wait_until_blocks_are_fetched(cast("AsyncEngine", engine))
        stopped.append("it stops")

    async def watch() -> None:
        stopping = asyncio.create_task(stop())
        await asyncio.sleep(0.2)
        assert not stopped
        engine.stats["m"] = Stats(transfer=TransferStats())
        await stopping
        for engine.stats["m"], engine.state in (
            (Stats(), EngineState.READY),
            (Stats(transfer=TransferStats(leases=1)), EngineState.RESTARTING),
        ):
            await stop()
        engine.state, waiting = EngineState.READY, asyncio.create_task(stop())
        await asyncio.sleep(0.1)
        engine.time += LEASE_DRAIN_TIMEOUT_S  # no worker pulls the blocks
        await waiting

    asyncio.run(asyncio.wait_for(watch(), 10))
    assert len(stopped) == 4


def test_registration_describes_the_engine() -> None:
    engine = Engine({"m": facts({"incarnation": "first"})})
    reporter = make_reporter(engine)
    registration = reporter.build_registration()
    assert (
        registration.role == "decode"
        and registration.models[0].peer == {"incarnation": "first"}
        and registration.models[0].kv_tokens == 4096
    )
    assert registration.models[1] == ModelRegistration("embedder", max_context=256)
    engine.model_info = {"m": facts({"incarnation": "second"})}
    assert reporter.build_registration() != registration
    engine.model_info["m"].ranks = (RankSummary(0, 0, 0, 2, 10, 10), RankSummary(1, 1, 0, 2, 10, 10))
    assert [model.ranks for model in (*registration.models, reporter.build_registration().models[0])] == [1, 1, 2]


def test_worker_is_ready_after_pairing_with_first_peers() -> None:
    engine = Engine({"m": facts({})}, {"m": Stats(transfer=TransferStats(pulls=2))})
    reporter = make_reporter(engine)
    reporter.update_peers({"m": [P1, P2]})
    assert engine.peer_updates == [("m", [P1, P2])] and not reporter.build_heartbeat().ready
    engine.pairing_states = {"m": PairingChange("m", ["one"], {})}
    assert not reporter.build_heartbeat().ready
    engine.pairing_states = {"m": PairingChange("m", ["one"], {"two": "another layout"})}
    heartbeat = reporter.build_heartbeat()
    assert heartbeat.ready and heartbeat.paired == ("one",) and heartbeat.refused == {"two": "another layout"}
    assert heartbeat.transfer == TransferStats(pulls=2)
    reporter.update_peers({"m": [P1, P2, {"incarnation": "three"}]})  # a later peer does not delay readiness
    assert reporter.build_heartbeat().ready and len(engine.peer_updates) == 2
    reporter.update_peers({"m": [P1, P2, {"incarnation": "three"}]})
    assert len(engine.peer_updates) == 2  # only changes are passed on
    reporter.update_peers({})
    assert engine.peer_updates[-1] == ("m", [])


def test_pairing_times_out() -> None:
    engine = Engine({"m": facts({})}, {"m": Stats()})
    reporter = make_reporter(engine)
    reporter.update_peers({"m": [P1]})
    engine.time += PAIRING_TIMEOUT_S - 0.1
    assert not reporter.build_heartbeat().ready
    engine.time += 0.2
    assert reporter.build_heartbeat().ready
    engine.state = EngineState.RESTARTING
    assert not reporter.build_heartbeat().ready


def test_engine_without_transfer_gets_no_peers() -> None:
    engine = Engine({"m": facts(None)}, {"m": Stats()})
    reporter = make_reporter(engine)
    reporter.update_peers({"m": [P1]})
    assert engine.peer_updates == []


class ScriptedRegistrar(Registrar):
    """Records the messages sent and returns scripted replies of the router."""

    def __init__(self, answers: list[tuple[int, Any]]) -> None:
        self.registration, self.heartbeat, self.peer_updates = (
            WorkerRegistration("w", "i", "http://w", (ModelRegistration("m"),)),
            Heartbeat("w", "i"),
            list[Any](),
        )
        super().__init__("http://r", None, lambda: self.registration, lambda: self.heartbeat, self.peer_updates.append)
        self.answers, self.sent = answers, list[str]()

    async def _post(self, pool: HTTPConnectionPool, path: str, body: bytes) -> FetchedReply:
        self.sent.append(path.removeprefix("/cluster/"))
        status, answer = self.answers.pop(0)
        if status == 0:
            raise UpstreamUnreachable("away")
        return FetchedReply(status, {}, answer if isinstance(answer, bytes) else msgspec.json.encode(answer))

    def run_once(self) -> float | None:
        return asyncio.run(self._send_next_message(cast("HTTPConnectionPool", None)))


WELCOME = {"beat_seconds": 0.7, "peers": {"m": [P1]}}


def test_worker_registers_then_sends_heartbeats() -> None:
    scripted = ScriptedRegistrar([(200, WELCOME)] * 4)
    assert (scripted.run_once(), scripted.run_once()) == (0.0, 0.7) and scripted.sent == ["register", "beat"]
    scripted.heartbeat = Heartbeat("w", "i", ready=False)
    assert scripted.run_once() == NOT_READY_INTERVAL_S and scripted.peer_updates == [{"m": [P1]}] * 3


def test_worker_registers_again() -> None:
    """It does so when the router does not know it, was unreachable, or its registration has changed."""
    scripted = ScriptedRegistrar(
        [(200, WELCOME), (404, {}), (200, WELCOME), (200, WELCOME), (200, WELCOME), (0, {}), (200, WELCOME)]
    )
    assert [scripted.run_once() for _ in range(3)] == [0.0, 0.0, 0.0]
    scripted.registration = WorkerRegistration("w", "i", "http://elsewhere", (ModelRegistration("m"),))
    assert [scripted.run_once() for _ in range(2)] == [0.0, 0.7]
    with pytest.raises(UpstreamUnreachable):
        scripted.run_once()
    scripted.run_once()
    assert scripted.sent == ["register", "beat", "register", "register", "beat", "beat", "register"]


def test_replaced_worker_keeps_registering() -> None:
    """The newer worker may be lost, which frees the name."""
    scripted = ScriptedRegistrar([(200, WELCOME), (500, {}), (409, {}), (409, {}), (200, WELCOME)])
    assert [scripted.run_once() for _ in range(5)] == [
        0.0,
        REGISTER_INTERVAL_S,
        REGISTER_INTERVAL_S,
        REGISTER_INTERVAL_S,
        0.0,
    ]
    assert scripted.sent == ["register", "beat", "register", "register", "register"]


def test_leaving_worker_does_not_register_at_restarted_router() -> None:
    scripted = ScriptedRegistrar([(200, WELCOME), (200, {}), (0, {}), (200, WELCOME), (404, {}), (404, {})])
    scripted.run_once()
    asyncio.run(scripted.announce_shutdown())
    with pytest.raises(UpstreamUnreachable):
        scripted.run_once()
    assert [scripted.run_once() for _ in range(3)] == [0.7, REGISTER_INTERVAL_S, REGISTER_INTERVAL_S]
    assert scripted.sent == ["register", "leave", "beat", "beat", "beat", "beat"]


def test_unreadable_router_reply_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy at the router's address may send such a reply while the router is down."""

    monkeypatch.setattr(registrar, "REGISTER_INTERVAL_S", 0.01)

    async def main() -> None:
        unreadable = (b'{"beat_seconds": 1, "peers": {"\xff": []}}', b"<html>")
        scripted = ScriptedRegistrar([*((200, each) for each in unreadable), *[(200, WELCOME)] * 2])
        updated = asyncio.Event()
        scripted._on_peers = lambda peers: updated.set()
        scripted.start()
        try:
            await asyncio.wait_for(updated.wait(), 20)
        finally:
            await scripted.stop()

    asyncio.run(main())


def test_heartbeat_counts_progress_within_a_step() -> None:
    """A router treats a worker whose step does not change as hanging."""
    engine = Engine(stats={"m": Stats(step=7)})
    reporter = make_reporter(engine)
    first = reporter.build_heartbeat().step
    engine.progress_reports += 1
    assert reporter.build_heartbeat().step != first == 7


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", ""])
def test_worker_on_all_interfaces_registers_outgoing_address(host: str) -> None:
    with pytest.raises(ValueError, match="all interfaces"):
        WorkerRegistration(
            "w", "1", f"http://{f'[{host}]' if ':' in host else host or '0.0.0.0'}:8001", (ModelRegistration("m"),)
        )
    found = with_reachable_url(WorkerConfig(("http://127.0.0.1:8000",)), host, 8001)
    assert found.worker_url == "http://127.0.0.1:8001"
    config = WorkerConfig(("http://127.0.0.1:8000",), worker_url="http://worker:8001")
    assert with_reachable_url(config, host, 8001) is config
    with pytest.raises(InvalidRequest, match="address towards the router"):
        with_reachable_url(WorkerConfig(("http://no-such-host.invalid:8000",)), host, 8001)


def test_default_worker_name_is_its_address() -> None:
    one, two = (WorkerConfig(("http://r",), worker_url=f"http://10.0.0.{i}:8001") for i in (1, 2))
    assert (_worker_name(one, 8001), _worker_name(two, 8001)) == ("10.0.0.1:8001", "10.0.0.2:8001")
    assert (
        _worker_name(WorkerConfig(("http://r",), worker_name="given", worker_url="http://10.0.0.1:8001"), 8001)
        == "given"
    )
