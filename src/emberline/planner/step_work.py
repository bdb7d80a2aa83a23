"""StepWork: what a step reads and computes on one GPU, from the memory plan of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from emberline.engine.gpu_plan import GPUPlan, WeightShare
from emberline.models.kv_groups import KVGroup
from emberline.models.outline import ModelOutline

PACKED_BITS = 12  # of a weight
NOT_MULTIPLIED = ("embedding", "norms")  # kinds of weights that are looked up, or too small to count


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one GPU, for its part of the model."""

    layers: int
    dense_bytes: int  # weights that every step reads
    dense_weights: int  # of the layers, multiplied with every token
    head_weights: int  # multiplied with the rows that are sampled
    head_bytes: int
    expert_bytes: int  # of all routed experts
    expert_weights: int  # of the experts that one token selects
    experts: int  # of a layer; 0: none
    chosen_experts: int
    weight_format: str  # of most weights
    pair_flops: int  # of one query with one key and its value, in all layers with attention
    groups: tuple[KVGroup, ...]

    @staticmethod
    def of_plan(plan: GPUPlan, outline: ModelOutline) -> StepWork:
        """Return the work of one GPU of the plan. `outline`: that of the whole model."""
        experts = outline.experts
        shares = [share for share in plan.weights if share.kind not in NOT_MULTIPLIED]
        routed = [share for share in shares if share.kind == "routed experts"]
        head_kind = "embedding" if outline.tie_embeddings else "head"
        head = sum(share.num_weights for share in plan.weights if share.kind == head_kind)
        head_bytes = sum(_read_bytes(share) for share in plan.weights if share.kind == head_kind)
        dense = [share for share in shares if share.kind not in ("routed experts", "head")]
        chosen_share = experts.chosen / experts.count if experts is not None else 0.0
        return StepWork(
            layers=len(outline.layers),
            dense_bytes=sum(map(_read_bytes, dense)) + head_bytes,
            dense_weights=sum(share.num_weights for share in dense),
            head_weights=head,
            head_bytes=head_bytes,
            expert_bytes=sum(map(_read_bytes, routed)),
            expert_weights=round(sum(share.num_weights for share in routed) * chosen_share),
            experts=0 if experts is None else experts.count,
            chosen_experts=0 if experts is None else experts.chosen,
            weight_format=max(shares, key=lambda share: share.num_weights).format,
            pair_flops=_pair_flops(outline) // plan.gpus.count,
            groups=plan.groups,
        )

    def times(self, stages: int) -> StepWork:
        """Return the work of all stages of a pipeline, of which this is one. Only the last computes the head."""
        head_bytes = self.head_bytes
        return replace(
            self,
            layers=self.layers * stages,
            dense_bytes=(self.dense_bytes - head_bytes) * stages + head_bytes,
            dense_weights=self.dense_weights * stages,
            expert_bytes=self.expert_bytes * stages,
            expert_weights=self.expert_weights * stages,
            pair_flops=self.pair_flops * stages,
            groups=tuple(
                replace(
                    group,
                    bytes_per_token=group.bytes_per_token * stages,
                    bytes_per_sequence=group.bytes_per_sequence * stages,
                )
                for group in self.groups
            ),
        )

    def weight_bytes(self, tokens: int) -> float:
        """Return the bytes of weights that a step with this many tokens reads, if its tokens select random experts."""
        if not self.experts:
            return float(self.dense_bytes)
        unselected = (1.0 - self.chosen_experts / self.experts) ** tokens
        return self.dense_bytes + self.expert_bytes * (1.0 - unselected)

    def kv_bytes(self, rows: int, context: float) -> float:
        """Return the bytes of keys, values and states of `rows` requests with this mean context."""
        each = 0.0
        for group in self.groups:
            kept = context if group.max_tokens is None else min(context, group.max_tokens)
            each += kept * group.bytes_per_token + 2 * group.bytes_per_sequence
        return rows * each

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.groups)


def _read_bytes(share: WeightShare) -> int:
    """Return the bytes that a step reads of these weights: of two copies, only the packed one."""
    return share.num_weights * PACKED_BITS // 8 if share.format.endswith("+uw12") else share.num_bytes


def _pair_flops(outline: ModelOutline) -> int:
    width = 2 * outline.head_dim
    if (latent := outline.latent) is not None:
        width = latent.plain_dim + latent.rotary_dim + latent.value_dim
    layers = sum(layer.attention != "state" for layer in outline.layers)
    return 2 * layers * outline.heads * width
