"""layer_bytes, LogitMemory: what a step allocates in one of its layers, and for its logits.

A layer frees what it allocated, and the logits are computed after the last layer, so a step's peak is the larger of
both. This module needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emberline.engine.gpu.shape import max_step_rows
from emberline.engine.scheduler import MAX_SCORED_TOKENS
from emberline.engine.step_sizes import StepSizes
from emberline.kernels.step_memory import ExpertNetwork, StepKernels
from emberline.kernels.work_limits import MAX_DEQUANTISED_WEIGHTS, MAX_UNPACKED_WEIGHTS
from emberline.models.outline import ModelOutline
from emberline.models.weight_formats import NarrowSize
from emberline.models.weight_parts import list_weight_parts

BF16_BYTES, F32_BYTES = 2, 4
# Rows of logits for each request in a step that is not captured: its own, a copy without the rows that score prompts,
# and one that sampling leaves unchanged, for log-probabilities.
COPIES_OF_SAMPLED_ROWS = 3
COPIES_OF_SCORED_ROWS = 2  # their own, and a copy that the host reads later
COPIES_ON_RANKS = 3  # of all rows, before sampling: the logits, the parts of all ranks, and the rank's own, padded


def choose_step_kernels(
    outline: ModelOutline, kernels: str, dtype_bytes: int, *, packed: bool = False, narrow: Sequence[NarrowSize] = ()
) -> StepKernels:
    """Return the kernels for a model's weights; see `StepKernels.of`. `narrow`: matrices that are kept quantised."""
    matrices = {(each.kind, each.rows, each.columns, each.group_columns) for each in narrow}
    parts = [part for part in list_weight_parts(outline) if part.kind == "routed experts"]
    # The rows of gate and up may be stored in two matrices.
    shapes = {(rows, part.columns) for part in parts for rows in (part.rows, part.rows // 2)}
    kept = sum(each.rows * each.columns * each.num_matrices for each in narrow if (each.rows, each.columns) in shapes)
    are_narrow = bool(parts) and kept >= sum(part.num_weights for part in parts)
    return StepKernels.of(kernels, dtype_bytes, packed=packed, narrow=matrices, are_experts_narrow=are_narrow)


def layer_bytes(
    sizes: StepSizes, kernels: StepKernels, rows: int, max_tuned_rows: int, *, has_ranks: bool = False
) -> int:
    """Return what the largest layer allocates for so many rows of the hidden state, with that state.

    Attention needs the state, a normed copy, queries, keys, values and its outputs, which are freed before the
    feed-forward network. `has_ranks`: whether outputs of several ranks are summed. Then inputs and outputs of products
    are tensors of their own, and what communicators allocate for sums is covered by not taking turns."""
    state, values = kernels.dtype_bytes * rows * sizes.hidden, kernels.dtype_bytes * rows * sizes.attention_values
    network = network_bytes(sizes, kernels, rows, max_tuned_rows)
    if has_ranks:
        return (sizes.state_copies + 1) * state + values + network
    return max(sizes.state_copies * state + values, (sizes.state_copies - 1) * state + network)


def network_bytes(sizes: StepSizes, kernels: StepKernels, rows: int, max_tuned_rows: int) -> int:
    """Return what the largest feed-forward network allocates beside the hidden state, with the normed copy of it."""
    return max(
        kernels.expert_bytes(network, rows, max_tuned_rows)
        if isinstance(network, ExpertNetwork)
        else kernels.gated_bytes(network, rows, max_tuned_rows)
        for network in sizes.networks
    )


def exchange_bytes(
    sizes: StepSizes, kernels: StepKernels, ranks: int, own: int, total: int, max_tuned_rows: int
) -> int:
    """Return the bytes that a step needs for rows of other ranks, if ranks attend to requests of their own.

    `own`: rows of this rank. `total`: of all ranks. Feed-forward networks compute these: there are their inputs, and
    outputs that are not summed yet. A rank copies its inputs for each rank that it sends them to, and later receives an
    output of each of its rows from every rank, which it sums in float32."""
    if ranks == 1:
        return 0
    copies = kernels.dtype_bytes * (2 * total + ranks * own) + F32_BYTES * own
    of_others = network_bytes(sizes, kernels, total, max_tuned_rows) - network_bytes(
        sizes, kernels, own, max_tuned_rows
    )
    return sizes.hidden * copies + of_others


def unpacked_bytes(sizes: StepSizes, kernels: StepKernels) -> int:
    """Return the maximum bytes of weights that are unpacked at the same time, in steps with many rows.

    These are two matrices of a layer, since one is unpacked while the other is used, and a part of the output head or
    of another matrix."""
    whole = 2 * sizes.widest_matrix if kernels.unpacks_matrices else 0
    head = min(MAX_UNPACKED_WEIGHTS, sizes.vocab * sizes.hidden) if kernels.packs_head else 0
    part = min(MAX_DEQUANTISED_WEIGHTS, sizes.widest_matrix) if kernels.dequantises_parts else 0
    return BF16_BYTES * (whole + max(head, part))


@dataclass(frozen=True, slots=True)
class LogitMemory:
    """The bytes of logits, in float32."""

    kept: int  # between steps: of captured steps and drafts, and rows that score prompts until the host has read them
    of_step: int  # of the largest step that is not captured, with the copies that sampling makes

    @staticmethod
    def of(vocab: int, max_running: int, *, has_draft_model: bool = False, has_ranks: bool = False) -> LogitMemory:
        running, scored = max_running, MAX_SCORED_TOKENS
        kept = max_step_rows(running) + scored + has_draft_model * running
        step = COPIES_OF_SAMPLED_ROWS * running + COPIES_OF_SCORED_ROWS * scored
        if has_ranks:
            step = max(step, COPIES_ON_RANKS * (running + scored))
        return LogitMemory(F32_BYTES * vocab * kept, F32_BYTES * vocab * step)
