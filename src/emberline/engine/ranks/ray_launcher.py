"""RayLauncher: starts the nodes of an engine on a Ray cluster, and ends them with the engine.

Node 0 is this machine, which must be a node of the cluster: the engine process runs here, and connects to Ray as a
driver. On each of the other nodes an actor runs the ranks. Ray ends actors and frees their resources when the driver
ends, even by kill -9. Ray is imported when an engine is launched."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from emberline.core.engine_config import EngineConfig
from emberline.core.engine_packages import install_hint
from emberline.core.environment import visible_gpus
from emberline.core.errors import EmberlineError, EngineFailed, EngineUnavailable, InvalidRequest
from emberline.core.freeport import free_port
from emberline.core.parallel_config import MAX_RANKS
from emberline.engine.messages import Rejection
from emberline.engine.ranks.node_agent import run_node
from emberline.engine.ranks.ray_placement import CPU, GPU, Placement, RayNode, list_placements
from emberline.hub.checkpoint import Checkpoint

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

log = logging.getLogger("emberline.ranks")

CONNECT_TIMEOUT_S = 5.0  # to the address of a Ray cluster
PLACEMENT_TIMEOUT_S = 2.0  # for one placement, before another one is tried
ACTOR_TIMEOUT_S = 120.0  # for a process of Ray to start and to import this module
WAIT_LOG_INTERVAL_S = 15.0
NODE_ID_LABEL = "ray.io/node-id"  # that Ray gives to every node


class RayNodeActor:
    """Runs the ranks of one node, in a process of Ray."""

    def check_model(self, model: str) -> str:
        """Return why the files of a model cannot be read on this node; empty: they can."""
        try:
            Checkpoint.open(Path(model))
        except EmberlineError as error:
            return error.message
        except OSError as error:
            return str(error)
        return ""

    def list_gpus(self) -> list[str]:
        """Return the GPUs of this machine that Ray has reserved for this actor."""
        import ray

        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def run(self, encoded_config: bytes, cluster_key: str) -> bytes:
        """Run the ranks until node 0 shuts down; return an encoded Rejection if they cannot run."""
        import ray

        config = msgspec.msgpack.decode(encoded_config, type=EngineConfig)
        address = ray.util.get_node_ip_address()
        try:
            run_node(config.with_settings(node_address=address), (cluster_key,), threading.Event())
        except EmberlineError as error:
            return msgspec.msgpack.encode(Rejection.from_error("", error))
        return b""


class RayLauncher:
    def __init__(self, config: EngineConfig, kind: str = CPU, max_nodes: int = MAX_RANKS) -> None:
        """Reserve CPUs or GPUs on up to `max_nodes` nodes, and start the actors. The caller must call `close`.

        `self.config` is then the config of node 0, with the number of nodes. Raises EmberlineError if Ray is not usable
        or does not grant the resources within `node_timeout`."""
        ray = connect_to_ray(config.parallel.ray_address)
        self._actors: list[Any] = []  # of the other nodes
        self._keeper: Any = None  # on a GPU: the actor of this node, which keeps its GPUs reserved
        self._runs: dict[Any, int] = {}  # node by the reference to the result of its actor
        self.cluster_key = secrets.token_hex(16)
        self._group, placement = reserve(ray, config, kind, max_nodes)
        try:
            self.config = _with_placement(config, placement, ray.util.get_node_ip_address())
            self._start_actors(ray, placement)
        except BaseException:
            self.close()
            raise

    def _start_actors(self, ray: Any, placement: Placement) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor_class, bundle = ray.remote(RayNodeActor), placement.bundle

        def start_actor(node: int) -> Any:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
            options = {"max_restarts": 0, "num_cpus": bundle.get(CPU, 0), "num_gpus": bundle.get(GPU, 0)}
            return actor_class.options(scheduling_strategy=strategy, **options).remote()

        self._actors += [start_actor(node) for node in range(1, placement.num_nodes)]
        if placement.kind == GPU:
            self._keeper = start_actor(0)
            (gpus,) = _get_results(ray, [self._keeper.list_gpus.remote()])
            check_granted_gpus(gpus)
        model = str(Path(self.config.model).absolute())
        checks = [actor.check_model.remote(model) for actor in self._actors]
        for node, problem in enumerate(_get_results(ray, checks), start=1):
            if problem:
                address = self._address_of(ray, node)
                raise InvalidRequest(
                    f"node {node} at {address} cannot read the model {model}: {problem}",
                    param="model",
                    hint="put the model's files at the same path on all nodes, for example on a shared disk",
                )
        for node, actor in enumerate(self._actors, start=1):
            settings = replace(self.config.with_settings(node_rank=node), model=model)
            self._runs[actor.run.remote(msgspec.msgpack.encode(settings), self.cluster_key)] = node

    def _address_of(self, ray: Any, node: int) -> str:
        by_bundle = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return next((each.address for each in list_nodes(ray) if each.id == by_bundle[node]), "an unknown address")

    def check(self) -> None:
        """Raise an error if an actor has ended."""
        if not self._runs:
            return
        import ray

        ended, _ = ray.wait(list(self._runs), timeout=0)
        for each in ended:
            node = self._runs.pop(each)
            try:
                reply = ray.get(each)
            except ray.exceptions.RayError as error:
                hint = "see Ray's log of this node, and `ray status`"
                raise EngineFailed(f"node {node} was lost by Ray: {_first_line(error)}", hint=hint) from error
            if reply:
                raise msgspec.msgpack.decode(reply, type=Rejection).to_error()

    def close(self) -> None:
        """End the actors and free the resources. A second call does nothing."""
        if self._group is None:
            return
        import ray

        group, self._group = self._group, None
        self._runs.clear()
        with contextlib.suppress(Exception):  # the cluster may be gone, which frees everything too
            for actor in (*self._actors, *([] if self._keeper is None else [self._keeper])):
                ray.kill(actor)
            ray.util.remove_placement_group(group)


def connect_to_ray(address: str | None) -> Any:
    """Connect this process to a Ray cluster, and return the module ray. Raises InvalidRequest, EngineUnavailable."""
    try:
        import ray
    except ImportError as error:
        message = f"launcher is ray, but Ray cannot be imported: {error}"
        raise InvalidRequest(message, param="launcher", hint=f"on all nodes: {install_hint('ray')}") from error
    if ray.is_initialized():
        return ray
    address = address or "auto"
    if address != "auto":
        check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with _kept_signal_handlers():
        try:
            ray.init(address=address, configure_logging=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise EngineUnavailable(
                f"cannot connect to a Ray cluster at {address}: {_first_line(error)}",
                hint="this machine must be a node of the cluster: run `ray start --head` or `ray start --address=..`",
            ) from error
    return ray


def check_address(address: str) -> None:
    """Raise an error if nothing listens at the address. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and int(port) < 65536) or "/" in host:
        message = f"ray_address is {address!r}; it must be auto or of the form HOST:PORT"
        raise InvalidRequest(message, param="ray_address", hint="use the address that `ray start --head` prints")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        message = f"no Ray cluster answers at {address}: {error.strerror or error}"
        raise EngineUnavailable(message, hint="run `ray start --head` there, and check --ray-address") from error


def check_granted_gpus(granted: list[str]) -> None:
    """Raise InvalidRequest unless these are the GPUs that this process uses: the first ones that it sees."""
    visible = visible_gpus()
    used = ([str(index) for index in range(len(granted))] if visible is None else visible)[: len(granted)]
    if sorted(used) != sorted(granted):
        raise InvalidRequest(
            f"the Ray cluster has reserved GPU {', '.join(granted)} of this machine, but this process uses "
            f"GPU {', '.join(used)}",
            param="launcher",
            hint=f"set CUDA_VISIBLE_DEVICES={','.join(granted)}",
        )


def reserve(ray: Any, config: EngineConfig, kind: str, max_nodes: int = MAX_RANKS) -> tuple[PlacementGroup, Placement]:
    """Return a Ray placement group with a bundle for each node, and its Placement. The first bundle is on this node.

    Waits for other programs to free resources, and for nodes to join the cluster. Raises EngineUnavailable after
    `node_timeout`."""
    timeout_s, here_id = config.parallel.node_timeout, ray.get_runtime_context().get_node_id()
    began = time.monotonic()
    next_log = began + PLACEMENT_TIMEOUT_S
    while True:
        nodes = list_nodes(ray)
        here = next((node for node in nodes if node.id == here_id), None)
        if here is None:
            raise EngineUnavailable("this machine's Ray node has died", hint="run `ray start` again")
        for placement in list_placements(config, kind, here, nodes, max_nodes):
            if (group := _try_placement(ray, placement, here)) is not None:
                return group, placement
            now = time.monotonic()
            if now - began > timeout_s:
                raise _no_resources(ray, config, placement, nodes)
            if now > next_log:
                next_log = now + WAIT_LOG_INTERVAL_S
                asked = placement.describe()
                log.warning("Waiting for Ray to grant resources: asked=%r timeout_s=%g", asked, timeout_s)


def _try_placement(ray: Any, placement: Placement, here: RayNode) -> PlacementGroup | None:
    others = placement.num_nodes - 1
    group = ray.util.placement_group(
        [placement.bundle] * placement.num_nodes,
        strategy="STRICT_SPREAD" if others else "STRICT_PACK",
        bundle_label_selector=[{NODE_ID_LABEL: here.id}, *[{}] * others],
    )
    try:
        if group.wait(PLACEMENT_TIMEOUT_S):
            return group
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    ray.util.remove_placement_group(group)
    return None


def _no_resources(ray: Any, config: EngineConfig, placement: Placement, nodes: list[RayNode]) -> EngineUnavailable:
    parallel, free = config.parallel, ray.available_resources()
    have = ", ".join(node.describe() for node in nodes)
    return EngineUnavailable(
        f"the Ray cluster did not grant {placement.describe()}, this one and others with the same number of ranks, for "
        f"{parallel.num_ranks} ranks within {parallel.node_timeout:g} s; it has {have}; "
        f"{free.get(placement.kind, 0):g} {placement.kind}s are free",
        hint="add nodes with `ray start --address=..`, end other programs, or lower --threads, --tp or --pp",
    )


def list_nodes(ray: Any) -> list[RayNode]:
    """Return the live nodes of the cluster."""
    rows = [row for row in ray.nodes() if row["Alive"]]
    return [RayNode(row["NodeID"], row["NodeManagerAddress"], row["Resources"]) for row in rows]


def _with_placement(config: EngineConfig, placement: Placement, address: str) -> EngineConfig:
    """Return the config of node 0, with a free port at which the other nodes find it."""
    settings: dict[str, Any] = {"launcher": "processes", "ray_address": None}
    if placement.num_nodes > 1:
        master = f"{address}:{_find_port_pair(address)}"
        settings |= {"nodes": placement.num_nodes, "master": master, "node_address": address}
    threads = placement.units_per_rank if placement.kind == CPU else config.threads
    return replace(config, threads=threads, parallel=replace(config.parallel, **settings))


def _find_port_pair(address: str) -> int:
    """Return a port such that it and the next one are free."""
    while True:
        port = free_port(address)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((address, port + 1))
            return port


def _get_results(ray: Any, references: list[Any]) -> list[Any]:
    """Return the results of calls of actors that have just been created."""
    try:
        return list(ray.get(references, timeout=ACTOR_TIMEOUT_S))
    except ray.exceptions.RayError as error:
        hint = "install the same version of Emberline and of Python on all nodes"
        raise EngineUnavailable(f"an actor of Ray cannot start: {_first_line(error)}", hint=hint) from error


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:400]


@contextlib.contextmanager
def _kept_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers after the `with` block, because ray.init replaces the one for SIGTERM."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
