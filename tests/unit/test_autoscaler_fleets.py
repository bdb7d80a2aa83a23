"""Adapters of the autoscaler: Kubernetes and Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_kubernetes import TOKEN, FakeKubernetes

from emberline.autoscaler.fleet import FleetError, FleetWorker
from emberline.autoscaler.kubernetes_api import KubernetesAPI, _read_content
from emberline.autoscaler.kubernetes_fleet import KubernetesFleet
from emberline.autoscaler.pool_workers import group_workers
from emberline.autoscaler.ray_fleet import KILL_TIMEOUT_S, RayFleet
from emberline.core.errors import InvalidRequest


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[FakeKubernetes]:
    fake = FakeKubernetes(tmp_path)
    yield fake
    fake.close()


def make_kubernetes_fleet(fake: FakeKubernetes) -> KubernetesFleet:
    api = KubernetesAPI("127.0.0.1", fake.port, fake.account_dir)
    return KubernetesFleet(api, {"decode": "deployment/decode", "prefill": "statefulset/prefill"})


def test_kubernetes_scales_up_and_removes_the_drained_pod(kubernetes: FakeKubernetes) -> None:
    async def run() -> None:
        fleet = make_kubernetes_fleet(kubernetes)
        await fleet.start_workers("decode", 2)
        names = [worker.name for worker in await fleet.list_workers() if worker.role == "decode"]
        assert names == ["decode-0", "decode-1", "decode-2", "decode-3"]
        await fleet.stop_worker("decode-1")
        assert kubernetes.replicas["deployments", "decode"] == 3 and "decode-1" not in kubernetes.pods
        await fleet.stop_worker("decode-1")  # has no effect a second time
        assert kubernetes.replicas["deployments", "decode"] == 3

    asyncio.run(run())
    assert ("PUT", "/apis/apps/v1/namespaces/serving/deployments/decode/scale") in kubernetes.calls


def test_kubernetes_that_creates_and_deletes_pods_late_is_not_scaled_twice(kubernetes: FakeKubernetes) -> None:
    async def run() -> None:
        fleet = make_kubernetes_fleet(kubernetes)
        kubernetes.creates_pods = False
        await fleet.start_workers("decode", 2)
        pool = group_workers({"workers": []}, await fleet.list_workers(), ["decode"])["decode"]
        assert pool.serving_count == 4
        assert pool.choose_removals(1)[0].startswith("deployment/decode/pending-")
        await fleet.stop_worker(pool.choose_removals(1)[0])
        assert kubernetes.replicas["deployments", "decode"] == 3
        kubernetes.reconcile()
        await fleet.stop_worker("decode-0")
        await fleet.stop_worker("decode-0")  # the pod is still there, but the number of replicas is lower already
        assert kubernetes.replicas["deployments", "decode"] == 2

    asyncio.run(run())


def test_a_stateful_set_removes_its_last_pod(kubernetes: FakeKubernetes) -> None:
    async def run() -> None:
        fleet = make_kubernetes_fleet(kubernetes)
        await fleet.start_workers("prefill", 2)
        rows = [{"name": f"prefill-{i}", "role": "prefill", "health": "ready", "open": i} for i in range(3)]
        pool = group_workers({"workers": rows}, await fleet.list_workers(), ["prefill"])["prefill"]
        assert pool.choose_removals(2) == ["prefill-2", "prefill-1"]

    asyncio.run(run())


def test_kubernetes_replaces_a_pod_that_hangs_and_keeps_the_others(kubernetes: FakeKubernetes) -> None:
    async def run() -> None:
        fleet = make_kubernetes_fleet(kubernetes)
        await fleet.start_workers("prefill", 2)
        before = dict(kubernetes.pods)
        assert await fleet.replace_worker("prefill-1")
        assert kubernetes.replicas["statefulsets", "prefill"] == 3 and kubernetes.pods.keys() == before.keys()
        assert [name for name, pod in kubernetes.pods.items() if pod is not before[name]] == ["prefill-1"]
        kubernetes.creates_pods = False
        assert await fleet.replace_worker("prefill-1")
        assert await fleet.replace_worker("prefill-1")  # it is gone already
        pending = [worker for worker in await fleet.list_workers() if worker.is_placeholder]
        assert [worker.role for worker in pending] == ["prefill"]
        calls = len(kubernetes.calls)
        assert await fleet.replace_worker(pending[0].name)  # Kubernetes still has to create it
        assert len(kubernetes.calls) == calls

    asyncio.run(run())


def test_the_age_of_a_pod_is_that_of_its_youngest_container(kubernetes: FakeKubernetes) -> None:
    now = datetime.now(UTC)
    running = [
        {"state": {"running": {"startedAt": f"{now - timedelta(seconds=age):%Y-%m-%dT%H:%M:%SZ}"}}} for age in (900, 60)
    ]

    def age_with(statuses: Any) -> float | None:
        kubernetes.pods["prefill-0"]["status"]["containerStatuses"] = statuses
        workers = asyncio.run(make_kubernetes_fleet(kubernetes).list_workers())
        return next(worker.age_s for worker in workers if worker.name == "prefill-0")

    assert age_with(running) == pytest.approx(60, abs=20)
    assert age_with([running[0], {"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]) == 0.0
    assert age_with([{"state": {"running": {"startedAt": None}}}]) == 0.0
    assert age_with(None) == 0.0


def test_kubernetes_errors_are_named(kubernetes: FakeKubernetes, tmp_path: Path) -> None:
    async def run() -> None:
        api = KubernetesAPI("127.0.0.1", kubernetes.port, kubernetes.account_dir)
        with pytest.raises(FleetError, match=r"404.*check the target"):
            await KubernetesFleet(api, {"both": "deployment/missing"}).list_workers()
        scale = await api.read_scale("deployment/decode")
        await api.write_scale("deployment/decode", scale, 3)
        with pytest.raises(FleetError, match="changed by another client"):
            await api.write_scale("deployment/decode", scale, 4)
        (kubernetes.account_dir / "token").write_text("expired")
        with pytest.raises(FleetError, match=r"401.*service account"):
            await api.read_scale("deployment/decode")
        (kubernetes.account_dir / "token").write_text(TOKEN)  # tokens are read again for every call
        assert (await api.read_scale("deployment/decode")).spec.replicas == 3

    asyncio.run(run())
    with pytest.raises(InvalidRequest, match="KIND/NAME"):
        KubernetesFleet(KubernetesAPI("x", 1, kubernetes.account_dir), {"both": "pod/x"})
    with pytest.raises(InvalidRequest, match="cannot be read"):
        KubernetesAPI("127.0.0.1", 1, tmp_path / "missing")
    with pytest.raises(InvalidRequest, match="runs in no pod"):
        KubernetesAPI.from_environment()


def test_a_kubernetes_that_does_not_answer_is_an_error(kubernetes: FakeKubernetes) -> None:
    kubernetes.close()
    with pytest.raises(FleetError, match="does not answer"):
        asyncio.run(make_kubernetes_fleet(kubernetes).list_workers())


@pytest.mark.parametrize(
    "reply",
    [[], None, {"items": [{}]}, {"metadata": {}, "spec": None}, {"metadata": {}, "spec": {"replicas": "3"}}],
)
def test_a_reply_of_another_server_is_an_error(kubernetes: FakeKubernetes, reply: Any) -> None:
    kubernetes.answer = lambda *request: (200, reply)  # type: ignore[method-assign]
    with pytest.raises(FleetError, match="answered with another Scale"):
        asyncio.run(make_kubernetes_fleet(kubernetes).list_workers())


def test_a_scale_without_replicas_and_a_list_without_pods_are_empty(kubernetes: FakeKubernetes) -> None:
    scale = {"metadata": {}, "spec": {}, "status": {"selector": "app=x"}}
    kubernetes.answer = lambda method, path, *rest: (  # type: ignore[method-assign]
        200,
        {"items": None} if path.endswith("/pods") else scale,
    )
    assert asyncio.run(make_kubernetes_fleet(kubernetes).list_workers()) == []


def test_a_reply_that_does_not_end_is_given_up() -> None:
    class EndlessReply:
        def read1(self, size: int) -> bytes:
            return b" "

    with pytest.raises(TimeoutError, match="bytes of the reply"):
        _read_content(EndlessReply(), time.monotonic() + 0.05)  # type: ignore[arg-type]


def test_two_autoscalers_do_not_start_the_same_workers_twice(kubernetes: FakeKubernetes) -> None:
    async def run() -> None:
        first, second = make_kubernetes_fleet(kubernetes), make_kubernetes_fleet(kubernetes)
        await first.list_workers()
        await second.list_workers()
        await first.start_workers("decode", 1)
        await first.start_workers("decode", 1)  # its own change is known
        with pytest.raises(FleetError, match="has 4 replicas, and had 2"):
            await second.start_workers("decode", 2)
        await second.list_workers()
        await second.start_workers("decode", 1)
        assert kubernetes.replicas["deployments", "decode"] == 5

    asyncio.run(run())


def test_a_pod_that_serves_again_is_not_removed_in_place_of_a_drained_one(kubernetes: FakeKubernetes) -> None:
    async def run() -> None:
        fleet = make_kubernetes_fleet(kubernetes)
        answer = kubernetes.answer
        kubernetes.answer = lambda method, *rest: (  # type: ignore[method-assign]
            (409, {}) if method == "PUT" else answer(method, *rest)
        )
        with pytest.raises(FleetError, match="another client"):
            await fleet.stop_worker("decode-0")  # and then its drain is undone
        kubernetes.answer = answer  # type: ignore[method-assign]
        await fleet.stop_worker("decode-1")
        assert [name for name in kubernetes.pods if name.startswith("decode")] == ["decode-0"]

    asyncio.run(run())


class FakeRay:
    """A Ray cluster with one actor."""

    def __init__(self) -> None:
        self.util = SimpleNamespace(
            list_named_actors=lambda all_namespaces: [{"name": "auto-both-1", "namespace": "emberline"}]
        )
        self.fails = True
        self.calls: list[str] = []

    def get_actor(self, name: str, namespace: str) -> Any:
        if self.fails:
            raise RuntimeError("the head node is away")
        return SimpleNamespace(stop=SimpleNamespace(remote=lambda: self.calls.append("stop")))

    def kill(self, actor: Any) -> None:
        self.calls.append("kill")


def test_an_actor_that_could_not_be_stopped_is_stopped_later_and_killed_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        ray = FakeRay()
        fleet = RayFleet(ray, lambda role, name: [], ["both"], environment={}, resources_by_role={})
        with pytest.raises(FleetError, match="head node is away"):
            await fleet.stop_worker("auto-both-1")
        assert await fleet.list_workers() == [FleetWorker("auto-both-1", "both")]
        ray.fails = False
        await fleet.stop_worker("auto-both-1")
        await fleet.stop_worker("auto-both-1")
        assert await fleet.list_workers() == [FleetWorker("auto-both-1", "both", is_stopping=True)]
        assert ray.calls == ["stop"]
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + KILL_TIMEOUT_S + 1)
        await fleet.list_workers()
        await fleet.list_workers()
        assert ray.calls == ["stop", "kill"]

    asyncio.run(run())
