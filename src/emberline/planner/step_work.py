"""StepWork: what a step reads and computes on one GPU, from the memory plan of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from emberline.engine.gpu_plan import GPUPlan, WeightShare
from emberline.models.kv_groups import KVGroup
from emberline.models.outline import ModelOutline

PACKED_BITS = 12  # bits of a packed weight
NOT_MULTIPLIED = ("embedding", "norms")  # kinds of weights that are looked up, or too small to count
VALUE_BYTES = 2  # bytes of a number that one layer passes to the next
# How often a routed expert's inputs and outputs are written and read: rows are sorted by expert, multiplied, and added
# to the residual. The values between an expert's two products are written once and read once.
HIDDEN_COPIES, INNER_COPIES = 4, 2
EXPERT_TILE_ROWS = 64  # rows of an expert that are multiplied together; the last tile is filled up


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one GPU reads and computes in a step, for its share of the model."""

    layers: int
    dense_bytes: int  # weights that every step reads
    dense_weights: int  # weights of the layers that are multiplied with every token
    head_weights: int  # weights that are multiplied with the rows that are sampled
    head_bytes: int
    expert_bytes: int  # bytes of all routed experts
    expert_weights: int  # weights of the experts that one token selects
    experts: int  # routed experts of a layer; 0: none
    chosen_experts: int
    expert_row_bytes: int  # bytes besides weights that the routed experts of one token read and write, in all layers
    weight_format: str  # format of most weights
    pair_flops: int  # operations for one query with one key and its value, in all layers with attention
    has_latents: bool  # whether keys and values of prompts are computed from latents
    groups: tuple[KVGroup, ...]

    @staticmethod
    def of_plan(plan: GPUPlan, outline: ModelOutline) -> StepWork:
        """Return the work of one GPU of the plan. `outline` describes all layers that the plan divides."""
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
            expert_row_bytes=_expert_row_bytes(outline, plan.gpus.count),
            weight_format=max(shares, key=lambda share: share.num_weights).format,
            pair_flops=_pair_flops(outline) // plan.gpus.count,
            has_latents=outline.latent is not None,
            groups=plan.groups,
        )

    def of_all_stages(self, stages: int) -> StepWork:
        """Return the work of all pipeline stages, if `self` is that of one. Only the last stage has the output head."""
        head_bytes = self.head_bytes
        return replace(
            self,
            layers=self.layers * stages,
            dense_bytes=(self.dense_bytes - head_bytes) * stages + head_bytes,
            dense_weights=self.dense_weights * stages,
            expert_bytes=self.expert_bytes * stages,
            expert_weights=self.expert_weights * stages,
            expert_row_bytes=self.expert_row_bytes * stages,
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
        return self.dense_bytes + self.expert_bytes * self._selected_share(tokens)

    def multiplied_weights(self, tokens: int) -> float:
        """Return how many multiplications with weights of the layers a step computes, for all its tokens.

        The rows of an expert are multiplied in tiles, and the last tile is filled up with empty rows: half a tile on
        average. If an expert has few rows, one empty row is counted for every two rows."""
        if not self.experts:
            return float(self.dense_weights * tokens)
        rows = tokens * self.chosen_experts / (self.experts * self._selected_share(tokens))  # rows of a selected expert
        padding = min(EXPERT_TILE_ROWS, rows) / 2
        return (self.dense_weights + self.expert_weights * (1.0 + padding / rows)) * tokens

    def _selected_share(self, tokens: int) -> float:
        """Return the share of the experts that at least one of the tokens selects."""
        return 1.0 - (1.0 - self.chosen_experts / self.experts) ** tokens

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
    """Return the bytes that a step reads of these weights. If they have a packed copy, it reads only that copy."""
    return share.num_weights * PACKED_BITS // 8 if share.format.endswith("+uw12") else share.num_bytes


def _expert_row_bytes(outline: ModelOutline, gpus: int) -> int:
    if (experts := outline.experts) is None:
        return 0
    values = HIDDEN_COPIES * outline.hidden + INNER_COPIES * experts.ffn // gpus
    return VALUE_BYTES * values * experts.chosen * sum(layer.has_experts for layer in outline.layers)


def _pair_flops(outline: ModelOutline) -> int:
    width = 2 * outline.head_dim
    if (latent := outline.latent) is not None:
        width = latent.plain_dim + latent.rotary_dim + latent.value_dim
    layers = sum(layer.attention != "state" for layer in outline.layers)
    return 2 * layers * outline.heads * width
