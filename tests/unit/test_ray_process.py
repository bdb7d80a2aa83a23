"""Worker processes on nodes of Ray, supervised by `emberline cluster up`; tests/ray_cluster has a real cluster."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emberline.cli.cluster_ray import RayNodes
from emberline.cluster.ray_process import LOST_STATUS, make_ray_starter
from emberline.cluster.supervisor import SupervisedProcess, Supervisor
from emberline.core.config import RouterConfig
from emberline.core.errors import InvalidRequest


class RayError(Exception):
    pass


class FakeActor:
    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.command, self.environment = command, environment
        self.status: int | None = None  # -1: the actor is lost
        self.wait_for_end = SimpleNamespace(remote=lambda: self)
        self.stop = SimpleNamespace(remote=lambda: setattr(self, "status", 0))


class FakeRay:
    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self) -> None:
        self.actors: list[FakeActor] = []
        self.options: dict[str, Any] = {}

    def remote(self, actor_class: type) -> Any:
        def start(command: list[str], environment: dict[str, str]) -> FakeActor:
            self.actors.append(actor_class(command, environment))
            return self.actors[-1]

        def options(**given: Any) -> Any:
            self.options = given
            return SimpleNamespace(remote=start)

        return SimpleNamespace(options=options)

    def wait(self, actors: list[FakeActor], timeout: float) -> tuple[list[FakeActor], list[FakeActor]]:
        assert timeout == 0
        return [actor for actor in actors if actor.status is not None], []

    def get(self, actor: FakeActor) -> int:
        if actor.status == -1:
            raise RayError("lost")
        assert actor.status is not None
        return actor.status

    def kill(self, actor: FakeActor) -> None:
        actor.status = -1


def test_process_on_lost_node_is_started_elsewhere(tmp_path: Path) -> None:
    async def main() -> None:
        ray, events = FakeRay(), list[str]()
        start = make_ray_starter(ray, FakeActor, ["worker"], {"KEY": "k"}, {"num_cpus": 2})
        supervisor = Supervisor(lambda name, event: events.append(event))
        await supervisor.start(SupervisedProcess("w", [], tmp_path / "log", {}, start_elsewhere=start))
        assert ray.options["num_cpus"] == 2 and ray.options["max_restarts"] == 0
        ray.actors[0].status = -1
        async with asyncio.timeout(20):
            while len(ray.actors) < 2:
                await asyncio.sleep(0.01)
        assert events[1].startswith(f"ended with status {LOST_STATUS}; restarts now")
        assert ray.actors[1].command == ["worker"] and ray.actors[1].environment == {"KEY": "k"}
        await supervisor.stop()
        assert ray.actors[1].status == 0 and len(ray.actors) == 2

    asyncio.run(main())


def test_router_must_be_reachable_from_all_nodes() -> None:
    nodes = RayNodes(FakeRay(), "10.0.0.1", frozenset({"10.0.0.1", "10.0.0.2"}), 2, 0)
    with pytest.raises(InvalidRequest, match=r"other nodes.*--host 0\.0\.0\.0"):
        nodes.router_host(RouterConfig())
    assert nodes.router_host(RouterConfig(host="0.0.0.0")) == "10.0.0.1"
    assert nodes.worker_options(RouterConfig(host="0.0.0.0"), []) == ["--host", "0.0.0.0", "--threads", "2", "--device",
                                                                     "cpu"]  # fmt: skip
    alone = RayNodes(FakeRay(), "10.0.0.1", frozenset({"10.0.0.1"}), 2, 1)
    assert alone.router_host(RouterConfig()) == "127.0.0.1"
    assert alone.worker_options(RouterConfig(), []) == ["--host", "127.0.0.1"]


@pytest.mark.parametrize(("cpus", "gpus"), [(0, 0), (1, -1)])
def test_resources_of_a_worker(cpus: int, gpus: int) -> None:
    with pytest.raises(InvalidRequest, match="at least 1 and 0"):
        RayNodes.connect(argparse.Namespace(ray_cpus=cpus, ray_gpus=gpus, ray_address=None))
