"""`emberline cluster up --launcher ray`: runs the workers of a cluster on the nodes of a Ray cluster."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emberline.core.config import RouterConfig
from emberline.core.errors import InvalidRequest
from emberline.core.keys import CLUSTER_KEY_VARIABLE, make_key_environment
from emberline.core.parallel_config import LAUNCHERS

if TYPE_CHECKING:
    from emberline.cluster.supervisor import SupervisedProcess

RAY_LOG_DIRECTORY = Path("/tmp/ray/session_latest/logs")  # on each node, unless Ray was started with another one
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def add_ray_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        default=LAUNCHERS[0],
        help="processes: workers on this machine; ray: on the nodes of a Ray cluster.",
    )
    parser.add_argument(
        "--ray-address", metavar="HOST:PORT", help="Ray cluster for --launcher ray. (default: that of this machine)"
    )
    parser.add_argument("--ray-cpus", type=int, default=1, help="CPUs that Ray reserves for each worker.")
    parser.add_argument("--ray-gpus", type=int, default=0, help="GPUs that Ray reserves for each worker; 0: CPU only.")


@dataclass(frozen=True, slots=True)
class RayNodes:
    """A Ray cluster, and the CPUs and GPUs that each worker gets."""

    ray: Any  # the module, connected to the cluster
    here: str  # address of this machine in the cluster
    addresses: frozenset[str]  # of all nodes
    cpus: int
    gpus: int

    @staticmethod
    def connect(args: argparse.Namespace) -> RayNodes:
        """Connect to the Ray cluster. Raises InvalidRequest or EngineUnavailable."""
        from emberline.engine.ranks.ray_launcher import connect_to_ray, list_nodes

        if args.ray_cpus < 1 or args.ray_gpus < 0:
            raise InvalidRequest(
                f"--ray-cpus is {args.ray_cpus} and --ray-gpus is {args.ray_gpus}; they must be at least 1 and 0",
                param="ray_cpus" if args.ray_cpus < 1 else "ray_gpus",
            )
        ray = connect_to_ray(args.ray_address)
        addresses = frozenset(node.address for node in list_nodes(ray))
        return RayNodes(ray, ray.util.get_node_ip_address(), addresses, args.ray_cpus, args.ray_gpus)

    def router_host(self, config: RouterConfig) -> str:
        """Return the address under which the nodes reach the router. Raises InvalidRequest if they cannot."""
        if config.host in LOOPBACK and self.addresses - {self.here}:
            raise InvalidRequest(
                f"the router listens at {config.host}, which workers on other nodes of the Ray cluster cannot reach",
                param="host",
                hint="add --host 0.0.0.0 and --api-key KEY",
            )
        return self.here if config.host in ("0.0.0.0", "::") else config.host

    def worker_options(self, config: RouterConfig, options: Sequence[str]) -> list[str]:
        """Return the options of a worker on a node: the host where it listens, and its share of the node's CPUs."""
        host = "127.0.0.1" if config.host in LOOPBACK else "0.0.0.0"
        share = ["--threads", str(self.cpus), "--device", "cpu"]
        if self.gpus or any(word.startswith(("--threads", "--device")) for word in options):
            share = []
        return ["--host", host, *share]

    def run_workers_on_nodes(
        self, processes: Sequence[SupervisedProcess], cluster_keys: tuple[str, ...], api_keys: Sequence[str]
    ) -> None:
        """Let the supervisor start these worker processes on nodes of the Ray cluster."""
        from emberline.autoscaler.ray_fleet import RayWorkerActor
        from emberline.cluster.ray_process import make_ray_starter

        for process in processes:
            command = [*process.program, *process.arguments]
            environment = make_key_environment(cluster_keys, CLUSTER_KEY_VARIABLE) | make_key_environment(api_keys)
            resources = {"num_cpus": self.cpus, "num_gpus": self.gpus}
            process.start_elsewhere = make_ray_starter(self.ray, RayWorkerActor, command, environment, resources)
            process.log_file = RAY_LOG_DIRECTORY
