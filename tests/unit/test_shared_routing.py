"""Several routers: registration of a worker with all of them, and what they learn from each other through it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from emberline.cluster.registrar_group import RegistrarGroup
from emberline.cluster.registration import Heartbeat, ModelRegistration, RouterReport, WorkerRegistration
from emberline.core.clock import SystemClock
from emberline.core.config import RouterConfig, WorkerConfig
from emberline.core.errors import InvalidRequest
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.request_summary import RequestSummary

URLS = ("http://a:1", "http://b:1")
P1, P2 = {"incarnation": "1"}, {"incarnation": "2"}


def registrations() -> list[WorkerRegistration]:
    return [
        WorkerRegistration(name, f"{name}1", f"http://{name}:1", (ModelRegistration("m", max_running=4),))
        for name in "uvw"
    ]


class Cluster:
    """Routers, and workers that are registered with all of them."""

    def __init__(self, routers: int) -> None:
        self.routers = [Dispatcher(RouterConfig(), SystemClock()) for _ in range(routers)]
        self.groups = []
        for registration in registrations():
            beat = Heartbeat(registration.name, registration.incarnation)
            group = RegistrarGroup(URLS[:routers], None, lambda r=registration: r, lambda b=beat: b)  # type: ignore[misc]
            self.groups.append(group)
            for router in self.routers:
                router.register(registration)

    def send_heartbeats(self) -> None:
        for group in self.groups:
            for router, registrar in zip(self.routers, group.registrars, strict=True):
                beat = registrar._heartbeat()
                router.record_heartbeat(beat)
                registrar.is_registered = True
                if (report := router.shared_routing.build_report(router.workers[beat.name])) is not None:
                    registrar._on_report(report)


def chat(*texts: str) -> RequestSummary:
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": "system", "content": "You help. " * 10}]
    messages += [{"role": role, "content": text * 300} for role, text in zip(roles, texts, strict=False)]
    return RequestSummary.parse(json.dumps({"model": "m", "messages": messages}).encode())


def test_router_counts_load_of_others() -> None:
    cluster = Cluster(2)
    one, two = cluster.routers
    cluster.send_heartbeats()
    first = two.choose_worker(chat("a"), set()).worker.name
    decision = one.choose_worker(chat("a"), set())
    assert decision.worker.name == first  # without information both follow the hash
    with one.open_attempt(chat("a"), decision):
        cluster.send_heartbeats()
        cluster.send_heartbeats()
        seen = two.workers[first]
        assert (seen.open_requests, seen.total_open_requests) == (0, 1)
        assert seen.total_prefill_tokens == pytest.approx(one.workers[first].prefill_tokens, abs=0.1)
        assert one.workers[first].other_routers.open_requests == 0  # its own requests count once
        assert two.choose_worker(chat("b"), set()).worker.name != first
    cluster.send_heartbeats()
    cluster.send_heartbeats()
    assert two.workers[first].total_open_requests == 0


def test_load_of_dead_router_is_dropped() -> None:
    cluster = Cluster(2)
    one, two = cluster.routers
    cluster.send_heartbeats()
    decision = one.choose_worker(chat("a"), set())
    with one.open_attempt(chat("a"), decision):
        cluster.send_heartbeats()
        for group in cluster.groups:
            group.registrars[0].is_registered = False
            two.record_heartbeat(group.registrars[1]._heartbeat())
        assert two.workers[decision.worker.name].total_open_requests == 0


@pytest.mark.parametrize("routers", [1, 2])
def test_conversation_stays_at_its_worker(routers: int) -> None:
    """Its first turn goes to another worker than that of its hash, which is busy; each turn comes to another router."""
    cluster = Cluster(routers)
    for i in range(10):
        router, texts, names = cluster.routers[0], [f"{i}"], []
        busy = router.choose_worker(chat(*texts), set())
        with router.open_attempt(chat(f"other {i}"), busy):
            cluster.send_heartbeats()
            decision = router.choose_worker(chat(*texts), set())
            assert decision.worker is not busy.worker
            with router.open_attempt(chat(*texts), decision):
                names.append(decision.worker.name)
        for turn in (1, 2):
            cluster.send_heartbeats()
            cluster.send_heartbeats()
            texts += ["answer", "next"]
            decision = cluster.routers[turn % routers].choose_worker(chat(*texts), set())
            with cluster.routers[turn % routers].open_attempt(chat(*texts), decision):
                names.append(decision.worker.name)
        assert len(set(names)) == 1


def test_turns_have_one_conversation_hash() -> None:
    assert chat("a").conversation == chat("a", "b", "c").conversation != chat("d", "b", "c").conversation
    raw = RequestSummary.parse(b'{"model":"m","prompt":"text"}')
    assert raw.conversation == raw.digest
    assert RequestSummary.parse(b'{"model":"m","messages":[{"role":1}]}').conversation
    assert not RequestSummary.parse(b'{"model":"m","messages":[]}').conversation


def test_single_router_reports_nothing() -> None:
    cluster = Cluster(1)
    cluster.send_heartbeats()
    (router,) = cluster.routers
    with router.open_attempt(chat("a"), router.choose_worker(chat("a"), set())):
        assert all(router.shared_routing.build_report(worker) is None for worker in router.workers.values())


def test_peers_of_all_routers_that_answer() -> None:
    updates: list[Any] = []
    group = RegistrarGroup(URLS, None, lambda: registrations()[0], lambda: Heartbeat("u", "u1"), updates.append)
    for registrar, peers in zip(group.registrars, ([P1], [P2, P1]), strict=True):
        registrar.is_registered = True
        registrar._on_peers({"m": peers})
    assert updates[-1] == {"m": [P1, P2]}
    group.registrars[0].is_registered = False
    group.registrars[1]._on_peers({"m": [P2]})
    assert updates[-1] == {"m": [P2]}


def test_router_urls() -> None:
    assert WorkerConfig(("http://a:1/,http://b", "https://b")).routers == ("http://a:1", "http://b", "https://b")
    for bad in (("http://a", "http://a:80/"), ("http://a:1,http://A:1",)):
        with pytest.raises(InvalidRequest, match="named twice"):
            WorkerConfig(bad)
    for bad in (("",), ("a:8000",), ("http://a,",), ("http://a:x",), ("ftp://a",)):
        with pytest.raises(InvalidRequest, match="router is"):
            WorkerConfig(bad)
    for url in ("http://user:secret@a:1", "http://user:secret@a:x"):
        with pytest.raises(InvalidRequest, match="has a user name or password") as caught:
            WorkerConfig((url,))
        assert "secret" not in str(caught.value)


def test_report_with_bad_hash_is_rejected() -> None:
    with pytest.raises(ValueError, match="hexadecimal"):
        RouterReport("r", prompts=(("zz", 1),))


def test_own_report_is_ignored() -> None:
    """A worker whose two URLs lead to the same router sends that router's report back to it."""
    cluster = Cluster(2)
    (one, _), beat = cluster.routers, Heartbeat("u", "u1", routers=2)
    with one.open_attempt(chat("a"), replace(one.choose_worker(chat("a"), set()), worker=one.workers["u"])):
        one.shared_routing.record_reports(one.workers["u"], beat)
        report = one.shared_routing.build_report(one.workers["u"])
        assert report is not None and report.open_requests == 1
        one.record_heartbeat(Heartbeat("u", "u1", routers=2, reports=(report,)))
        assert one.workers["u"].total_open_requests == 1
