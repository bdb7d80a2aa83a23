"""ParallelConfig: on how many ranks an engine computes a model, and how they divide it."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.errors import InvalidRequest
from emberline.core.options import option

MAX_RANKS = 64  # of one engine
MAX_PORT = 65535
LAUNCHERS = ("processes", "ray")
COLLECTIVES = ("auto", "ipc", "nccl", "gloo")
MAX_REDUNDANT_EXPERTS = 64  # of a group of ranks
MIN_RANK_TIMEOUT_S = 1.0  # several intervals between two heartbeats of a rank
MAX_RANK_TIMEOUT_S = 86400.0


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Settings of an engine on several ranks. A rank is a process that computes one part of the model."""

    tp: int = option(1, "Tensor parallelism: number of ranks among which each layer is divided.")
    pp: int = option(1, "Pipeline parallelism: number of stages into which the layers are divided, each on --tp ranks.")
    ep: int = option(
        1,
        "Expert parallelism: number of groups into which the --tp ranks are divided, each with experts of its own; "
        "1: each rank has a part of every expert.",
    )
    dp_attention: bool = option(
        False,
        "Data-parallel attention: each request belongs to one of the --tp ranks, which keeps its KV cache and attends "
        "with all heads. For models whose KV cache tensor parallelism replicates, such as DeepSeek and Kimi.",
    )
    pp_layers: str | None = option(
        None,
        "Number of layers of each --pp stage, from the first to the last, for example 14,16.",
        default_text="chosen from measured times of the layers on a CPU, from their weights on a GPU",
        metavar="N,N",
    )
    redundant_experts: int = option(
        0,
        "With --dp-attention and --ep: experts per layer that each group of ranks can keep in addition, as copies of "
        "those that most tokens select. The engine chooses them from the observed load while it is idle.",
    )
    rank_timeout: float = option(
        10.0, "Seconds without a heartbeat after which a rank counts as lost, and the engine restarts.", unit="s"
    )
    collectives: str = option(
        "auto",
        "How ranks exchange tensors. ipc: GPUs of one machine map each other's memory. nccl: NCCL, which sums in its "
        "own order. gloo: main memory, always on CPUs. auto: ipc, or else NCCL with our order of sums, or else gloo.",
        choices=COLLECTIVES,
    )
    nodes: int = option(1, "Number of nodes (machines) that run the ranks, the same number of ranks on each.")
    node_rank: int = option(
        0, "Number of this node, from 0 on. Node 0 has the API and the scheduler; the others only run their ranks."
    )
    master: str | None = option(
        None, "Address at which other nodes reach node 0, which also listens at the next port.", metavar="HOST:PORT"
    )
    node_address: str | None = option(
        None,
        "IP address of this node, at which ranks of other nodes connect to its ranks.",
        metavar="ADDRESS",
        default_text="the one from which it reaches --master",
    )
    node_timeout: float = option(
        300.0,
        "Seconds that node 0 waits for the other nodes, and they for node 0, at a start and after a node was lost.",
        unit="s",
    )
    ranks_per_gpu: int = 1  # that share a GPU, for tests without enough GPUs

    launcher: str = option(
        "processes",
        "How the ranks of other nodes are started. processes: by the same command on every node, with its --node-rank; "
        "ray: by this command, on nodes of the Ray cluster to which this machine belongs.",
        choices=LAUNCHERS,
    )
    ray_address: str | None = option(
        None,
        "Address of the Ray cluster for --launcher ray.",
        metavar="HOST:PORT",
        default_text="auto: the cluster that runs on this machine",
    )

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "ranks_per_gpu"):
            if not 1 <= (value := getattr(self, name)) <= MAX_RANKS:
                raise InvalidRequest(f"{name} is {value}; it must be from 1 to {MAX_RANKS}", param=name)
        if self.num_ranks > MAX_RANKS:
            message = f"tp is {self.tp} and pp is {self.pp}: {self.num_ranks} ranks; at most {MAX_RANKS} are allowed"
            raise InvalidRequest(message, param="tp", hint="lower --tp or --pp")
        if self.tp % self.ep:
            message = f"ep is {self.ep}, which does not divide tp, which is {self.tp}"
            raise InvalidRequest(message, param="ep", hint="set --ep to a divisor of --tp")
        if self.dp_attention and self.tp == 1:
            message = "dp_attention is set, but tp is 1: there is one rank, which attends to all requests"
            raise InvalidRequest(message, param="dp_attention", hint="set --tp, or drop --dp-attention")
        if self.dp_attention and self.pp > 1:
            message = f"dp_attention is set and pp is {self.pp}: they do not work together yet"
            raise InvalidRequest(message, param="dp_attention", hint="drop --pp or --dp-attention")
        if self.pp_layers is not None:
            self._check_stages(self.pp_layers)
        if not 0 <= self.redundant_experts <= MAX_REDUNDANT_EXPERTS:
            message = f"redundant_experts is {self.redundant_experts}; it must be from 0 to {MAX_REDUNDANT_EXPERTS}"
            raise InvalidRequest(message, param="redundant_experts")
        if self.redundant_experts and not (self.dp_attention and self.ep > 1):
            message = "redundant_experts is set, but tokens are sent to experts only with dp_attention and ep above 1"
            hint = "set --dp-attention and --ep, or drop --redundant-experts"
            raise InvalidRequest(message, param="redundant_experts", hint=hint)
        if not MIN_RANK_TIMEOUT_S <= self.rank_timeout <= MAX_RANK_TIMEOUT_S:
            limits = f"from {MIN_RANK_TIMEOUT_S:g} to {MAX_RANK_TIMEOUT_S:g} s"
            raise InvalidRequest(f"rank_timeout is {self.rank_timeout:g} s; it must be {limits}", param="rank_timeout")
        if self.collectives not in COLLECTIVES:
            message = f"collectives is {self.collectives!r}; it must be one of {', '.join(COLLECTIVES)}"
            raise InvalidRequest(message, param="collectives")
        if self.collectives != "auto" and self.num_ranks == 1:
            message = f"collectives is {self.collectives}, but there is one rank, which exchanges tensors with none"
            raise InvalidRequest(message, param="collectives", hint="set --tp or --pp, or drop --collectives")
        self._check_nodes()
        self._check_launcher()

    def _check_launcher(self) -> None:
        if self.launcher not in LAUNCHERS:
            message = f"launcher is {self.launcher!r}; it must be one of {', '.join(LAUNCHERS)}"
            raise InvalidRequest(message, param="launcher")
        if self.launcher != "ray":
            if self.ray_address is not None:
                message = f"ray_address is {self.ray_address}, but launcher is {self.launcher}"
                raise InvalidRequest(message, param="ray_address", hint="add --launcher ray, or drop --ray-address")
            return
        if self.num_ranks == 1:
            message = "launcher is ray, but an engine on one rank needs no other nodes"
            raise InvalidRequest(message, param="launcher", hint="add --tp or --pp, or drop --launcher")
        if self.nodes > 1:
            message = f"launcher is ray, which chooses the nodes, but nodes is {self.nodes}"
            raise InvalidRequest(message, param="nodes", hint="drop --nodes, --node-rank and --master, or --launcher")

    def _check_nodes(self) -> None:
        if self.nodes < 1 or self.num_ranks % self.nodes:
            message = (
                f"nodes is {self.nodes}, which does not divide {self.num_ranks} ranks (tp {self.tp}, pp {self.pp})"
            )
            raise InvalidRequest(
                message, param="nodes", hint="choose --tp and --pp so that --nodes divides their product"
            )
        if not 0 <= self.node_rank < self.nodes:
            message = (
                f"node_rank is {self.node_rank}; it must be from 0 to {self.nodes - 1}, because nodes is {self.nodes}"
            )
            raise InvalidRequest(message, param="node_rank")
        if not self.node_timeout > 0:
            raise InvalidRequest(f"node_timeout is {self.node_timeout:g}; it must be above 0", param="node_timeout")
        if self.nodes == 1:
            for name in ("master", "node_address"):
                if (value := getattr(self, name)) is not None:
                    message = f"{name} is {value}, but nodes is 1"
                    raise InvalidRequest(message, param=name, hint=f"add --nodes, or drop --{name.replace('_', '-')}")
            return
        if self.master is None:
            message = f"nodes is {self.nodes}, but master is not set"
            raise InvalidRequest(message, param="master", hint="add --master HOST:PORT with the address of node 0")
        self.parse_master()

    def parse_master(self) -> tuple[str, int]:
        """Return the host and the port of `master`."""
        host, _, port = (self.master or "").rpartition(":")
        if not (host and port.isascii() and port.isdigit() and 0 < int(port) < MAX_PORT):
            message = f"master is {self.master!r}; it must be of the form HOST:PORT, with a port below {MAX_PORT}"
            raise InvalidRequest(message, param="master")
        return host.removeprefix("[").removesuffix("]"), int(port)

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def exchanging_ranks(self) -> int:
        """The number of ranks that exchange token rows in a step: `tp` with data-parallel attention, else 1."""
        return self.tp if self.dp_attention else 1

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """The number of layers of each pipeline stage; () if `pp_layers` is not set."""
        return () if self.pp_layers is None else tuple(map(int, self.pp_layers.split(",")))

    def _check_stages(self, pp_layers: str) -> None:
        parts = pp_layers.split(",")
        if len(parts) != self.pp or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
            message = f"pp_layers is {pp_layers!r}; it must have {self.pp} numbers from 1 on, one for each stage of pp"
            raise InvalidRequest(message, param="pp_layers", hint="for example --pp 2 --pp-layers 14,16")
