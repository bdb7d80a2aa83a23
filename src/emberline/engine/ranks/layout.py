"""Layout: how the ranks of an engine divide a model. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from emberline.core.parallel_config import ParallelConfig
from emberline.models.config import ModelConfig
from emberline.models.shard import Shard
from emberline.models.stage import Stage


@dataclass(frozen=True, slots=True)
class Layout:
    """How ranks divide a model. They are numbered by stage: rank = stage * tp + rank within the stage."""

    tp: int = 1
    pp: int = 1
    ep: int = 1  # groups of a stage's ranks; each expert belongs to one group, whose ranks divide it
    nodes: int = 1  # machines, which have the same number of ranks each
    dp_attention: bool = False  # whether ranks attend to different requests, with all heads
    redundant_experts: int = 0  # further experts of which each of the `ep` groups can keep copies
    stage_layers: tuple[int, ...] = ()  # number of layers of each stage; empty: stages get about equally many weights
    gathers_rows: bool = False  # whether ranks that attend to different requests compute experts for the rows of all

    @staticmethod
    def from_config(config: ParallelConfig) -> Layout:
        names = ("tp", "pp", "ep", "nodes", "dp_attention", "redundant_experts", "stage_layers")
        return Layout(**{name: getattr(config, name) for name in names})

    @staticmethod
    def of_gpus(config: ParallelConfig) -> Layout:
        """Return the layout of ranks with a GPU each.

        With data-parallel attention, ranks send each row (token) to all ranks, and not only to those that have its
        experts. Otherwise the number of rows to exchange would depend on data, and steps could not be captured."""
        return replace(Layout.from_config(config), gathers_rows=config.dp_attention)

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def leader(self) -> int:
        """The rank that runs in the engine process: the first one of the last stage, which has logits to sample."""
        return (self.pp - 1) * self.tp

    @property
    def followers(self) -> list[int]:
        """The ranks that have processes of their own."""
        return [rank for rank in range(self.num_ranks) if rank != self.leader]

    def node_of(self, rank: int) -> int:
        """Return the node of a rank. Node 0 has the last stages, and so the leader. The last node has stage 0."""
        stage, tensor_rank = divmod(rank, self.tp)
        return ((self.pp - 1 - stage) * self.tp + tensor_rank) // self.ranks_per_node

    def ranks_of(self, node: int) -> list[int]:
        return [rank for rank in range(self.num_ranks) if self.node_of(rank) == node]

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.nodes

    def stage(self, rank: int, config: ModelConfig) -> Stage:
        """Return the rank's stage of a model. Raises InvalidRequest if the model cannot be divided so."""
        return Stage.from_config(config, rank // self.tp, self.pp, self.stage_layers)

    def shard(self, rank: int) -> Shard:
        return Shard(
            rank % self.tp,
            self.tp,
            self.ep,
            divides_attention=not self.dp_attention,
            redundant_experts=self.redundant_experts,
            gathers_rows=self.gathers_rows,
        )

    def describe(self, rank: int) -> str:
        """Return the rank's number and place for error messages, such as `rank 1 of 4 (stage 0, tensor rank 1)`."""
        node = f", node {self.node_of(rank)}" if self.nodes > 1 else ""
        return f"rank {rank} of {self.num_ranks} (stage {rank // self.tp}, tensor rank {rank % self.tp}{node})"

    def describe_node(self, node: int) -> str:
        """Return the node's number and ranks for error messages, such as `node 1 (ranks 0, 1 of 4)`."""
        ranks = self.ranks_of(node)
        return f"node {node} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {self.num_ranks})"

    @property
    def numerics_name(self) -> str:
        """The name of this division for Numerics.ranks; empty if it gives the same bits as one rank.

        Stages give the same bits. Sums of the results of several ranks (tp > 1) do not."""
        if self.tp == 1:
            return ""
        return f"tp{self.tp}{self._suffix}"

    @property
    def num_caches(self) -> int:
        """The number of ranks that have KV caches for requests of their own; 1: all ranks have parts of one cache."""
        return self.tp if self.dp_attention else 1

    @property
    def _suffix(self) -> str:
        sums = "-exact-sums" if self.gathers_rows and self.redundant_experts else ""  # so that experts may move
        return (f"-ep{self.ep}" if self.ep > 1 else "") + ("-dp-attention" if self.dp_attention else "") + sums

    def __str__(self) -> str:
        return f"tp{self.tp}-pp{self.pp}" + self._suffix
