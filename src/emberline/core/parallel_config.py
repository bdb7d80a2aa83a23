"""ParallelConfig: on how many ranks an engine computes a model, and how they divide it."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.errors import InvalidRequest
from emberline.core.options import option

MAX_RANKS = 64  # of one engine on one machine
MIN_RANK_TIMEOUT_S = 1.0  # several intervals between two signs of life of a rank


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
    rank_timeout: float = option(
        10.0, "Seconds without a heartbeat after which a rank counts as lost, and the engine restarts.", unit="s"
    )

    ranks_per_gpu: int = 1  # that share a GPU, for tests without enough GPUs

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
        if not self.rank_timeout >= MIN_RANK_TIMEOUT_S:
            message = f"rank_timeout is {self.rank_timeout:g} s; it must be at least {MIN_RANK_TIMEOUT_S:g} s"
            raise InvalidRequest(message, param="rank_timeout")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp
