"""A worker's side of a cluster: its card, when it is ready, whom its engine meets, and when it registers again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp
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
from emberline.server.worker.serving import LEASE_DRAIN_TIMEOUT_S, _name, wait_for_leases, with_reachable_url
from emberline.server.worker.worker_reporter import PAIRING_TIMEOUT_S, WorkerReporter

P1, P2 = {"name": "p1", "incarnation": "one"}, {"name": "p2", "incarnation": "two"}


@dataclass
class Engine:
    ready: dict[str, LoadedModelInfo] = field(default_factory=dict)
    stats: dict[str, Stats] = field(default_factory=dict)
    paired: dict[str, PairingChange] = field(default_factory=dict)
    state: EngineState = EngineState.READY
    time: float = 100.0
    progress_reports: int = 0
    met: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)

    def now(self) -> float:
        return self.time

    def pair(self, model: str, peers: list[dict[str, Any]]) -> None:
        self.met.append((model, peers))


def facts(peer: dict[str, Any] | None) -> LoadedModelInfo:
    return LoadedModelInfo(512, 300, [], 4096, 16, 1, 1, "ref", "layout", 64, {}, peer)


def presence(engine: Engine) -> WorkerReporter:
    served = [ServedModel("m", 1, 512), ServedModel("embedder", 1, 256)]
    return WorkerReporter("w", "i", "http://w", "decode", cast("AsyncEngine", engine), lambda: served)


def test_who_stops_keeps_what_others_have_not_taken_yet() -> None:
    engine, stopped = Engine(stats={"m": Stats(transfer=TransferStats(leases=1))}), list[str]()

    async def stop() -> None:
        await wait_for_leases(cast("AsyncEngine", engine))
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
        engine.time += LEASE_DRAIN_TIMEOUT_S  # nobody comes
        await waiting

    asyncio.run(asyncio.wait_for(watch(), 10))
    assert len(stopped) == 4


def test_a_card_tells_what_the_engine_is_now() -> None:
    engine = Engine({"m": facts({"incarnation": "first"})})
    us = presence(engine)
    card = us.build_registration()
    assert (
        card.role == "decode" and card.models[0].peer == {"incarnation": "first"} and card.models[0].kv_tokens == 4096
    )
    assert card.models[1] == ModelRegistration("embedder", max_context=256)
    engine.ready = {"m": facts({"incarnation": "second"})}
    assert us.build_registration() != card


def test_it_is_ready_when_it_is_paired_with_whom_it_was_told_of_first() -> None:
    engine = Engine({"m": facts({})}, {"m": Stats(transfer=TransferStats(pulls=2))})
    us = presence(engine)
    us.update_peers({"m": [P1, P2]})
    assert engine.met == [("m", [P1, P2])] and not us.build_heartbeat().ready
    engine.paired = {"m": PairingChange("m", ["one"], {})}
    assert not us.build_heartbeat().ready
    engine.paired = {"m": PairingChange("m", ["one"], {"two": "another layout"})}
    beat = us.build_heartbeat()
    assert beat.ready and beat.paired == ("one",) and beat.refused == {"two": "another layout"}
    assert beat.transfer == TransferStats(pulls=2)
    us.update_peers({"m": [P1, P2, {"incarnation": "three"}]})  # whoever comes later is not waited for
    assert us.build_heartbeat().ready and len(engine.met) == 2
    us.update_peers({"m": [P1, P2, {"incarnation": "three"}]})
    assert len(engine.met) == 2  # only what is new is passed on
    us.update_peers({})
    assert engine.met[-1] == ("m", [])


def test_nobody_is_waited_for_for_ever() -> None:
    engine = Engine({"m": facts({})}, {"m": Stats()})
    us = presence(engine)
    us.update_peers({"m": [P1]})
    engine.time += PAIRING_TIMEOUT_S - 0.1
    assert not us.build_heartbeat().ready
    engine.time += 0.2
    assert us.build_heartbeat().ready
    engine.state = EngineState.RESTARTING
    assert not us.build_heartbeat().ready


def test_an_engine_that_exchanges_nothing_meets_nobody() -> None:
    engine = Engine({"m": facts(None)}, {"m": Stats()})
    us = presence(engine)
    us.update_peers({"m": [P1]})
    assert engine.met == []


class Scripted(Registrar):
    """What is sent, and the router's answers."""

    def __init__(self, answers: list[tuple[int, Any]]) -> None:
        self.card, self.how, self.met = (
            WorkerRegistration("w", "i", "http://w", (ModelRegistration("m"),)),
            Heartbeat("w", "i"),
            list[Any](),
        )
        super().__init__("http://r", None, lambda: self.card, lambda: self.how, self.met.append)
        self.answers, self.sent = answers, list[str]()

    async def _post(self, session: Any, path: str, body: bytes) -> tuple[int, bytes]:
        self.sent.append(path.removeprefix("/cluster/"))
        status, answer = self.answers.pop(0)
        if status == 0:
            raise aiohttp.ClientError("away")
        return status, answer if isinstance(answer, bytes) else msgspec.json.encode(answer)

    def turn(self) -> float | None:
        return asyncio.run(self._send_next(cast("aiohttp.ClientSession", None)))


WELCOME = {"beat_seconds": 0.7, "peers": {"m": [P1]}}


def test_it_registers_then_beats_and_passes_peers_on() -> None:
    them = Scripted([(200, WELCOME)] * 4)
    assert (them.turn(), them.turn()) == (0.0, 0.7) and them.sent == ["register", "beat"]
    them.how = Heartbeat("w", "i", ready=False)
    assert them.turn() == NOT_READY_INTERVAL_S and them.met == [{"m": [P1]}] * 3


def test_it_registers_again_when_it_must() -> None:
    """When the router has forgotten it, was away, or its card has changed."""
    them = Scripted(
        [(200, WELCOME), (404, {}), (200, WELCOME), (200, WELCOME), (200, WELCOME), (0, {}), (200, WELCOME)]
    )
    assert [them.turn() for _ in range(3)] == [0.0, 0.0, 0.0]
    them.card = WorkerRegistration("w", "i", "http://elsewhere", (ModelRegistration("m"),))
    assert [them.turn() for _ in range(2)] == [0.0, 0.7]
    with pytest.raises(aiohttp.ClientError):
        them.turn()
    them.turn()
    assert them.sent == ["register", "beat", "register", "register", "beat", "beat", "register"]


def test_it_keeps_knocking_when_it_was_replaced() -> None:
    """The newer one may be lost: then the name is free again."""
    them = Scripted([(200, WELCOME), (500, {}), (409, {}), (409, {}), (200, WELCOME)])
    assert [them.turn() for _ in range(5)] == [0.0, REGISTER_INTERVAL_S, REGISTER_INTERVAL_S, REGISTER_INTERVAL_S, 0.0]
    assert them.sent == ["register", "beat", "register", "register", "register"]


def test_who_leaves_does_not_come_back_to_a_router_that_is_started_anew() -> None:
    them = Scripted([(200, WELCOME), (200, {}), (0, {}), (200, WELCOME), (404, {}), (404, {})])
    them.turn()
    asyncio.run(them.leave())
    with pytest.raises(aiohttp.ClientError):
        them.turn()
    assert [them.turn() for _ in range(3)] == [0.7, REGISTER_INTERVAL_S, REGISTER_INTERVAL_S]
    assert them.sent == ["register", "leave", "beat", "beat", "beat", "beat"]


def test_an_answer_that_nobody_can_read_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whoever answers at the router's address, as a proxy does while that is away."""

    monkeypatch.setattr(registrar, "REGISTER_INTERVAL_S", 0.01)

    async def main() -> None:
        unreadable = (b'{"beat_seconds": 1, "peers": {"\xff": []}}', b"<html>")
        them = Scripted([*((200, each) for each in unreadable), *[(200, WELCOME)] * 2])
        met = asyncio.Event()
        them._on_peers = lambda peers: met.set()
        them.start()
        try:
            await asyncio.wait_for(met.wait(), 20)
        finally:
            await them.stop()

    asyncio.run(main())


def test_progress_within_a_step_shows_in_the_beat() -> None:
    """A router takes a worker whose step stands still for one that hangs."""
    engine = Engine(stats={"m": Stats(step=7)})
    made = presence(engine)
    first = made.build_heartbeat().step
    engine.progress_reports += 1
    assert made.build_heartbeat().step != first == 7


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", ""])
def test_a_worker_on_all_interfaces_registers_the_address_towards_the_router(host: str) -> None:
    with pytest.raises(ValueError, match="all interfaces"):
        WorkerRegistration(
            "w", "1", f"http://{f'[{host}]' if ':' in host else host or '0.0.0.0'}:8001", (ModelRegistration("m"),)
        )
    found = with_reachable_url(WorkerConfig("http://127.0.0.1:8000"), host, 8001)
    assert found.url == "http://127.0.0.1:8001"
    given = WorkerConfig("http://127.0.0.1:8000", url="http://worker:8001")
    assert with_reachable_url(given, host, 8001) is given
    with pytest.raises(InvalidRequest, match="address towards the router"):
        with_reachable_url(WorkerConfig("http://no-such-host.invalid:8000"), host, 8001)


def test_default_names_are_addresses_because_hostnames_may_be_equal() -> None:
    one, two = (WorkerConfig("http://r", url=f"http://10.0.0.{i}:8001") for i in (1, 2))
    assert (_name(one, 8001), _name(two, 8001)) == ("10.0.0.1:8001", "10.0.0.2:8001")
    assert _name(WorkerConfig("http://r", name="given", url="http://10.0.0.1:8001"), 8001) == "given"
