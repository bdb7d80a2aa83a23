"""layer_bytes, LogitMemory: what a step allocates in one of its layers, and for its logits.

A layer frees what it allocated, and the logits are computed after the last layer, so a step's peak is the larger of
both. This module needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emberline.engine.gpu.shape import max_step_rows
from emberline.engine.scheduler import MAX_SCORED_TOKENS
from emberline.engine.step_sizes import StepSizes
from emberline.kernels.step_memory import ExpertNetwork, GatedNetwork, QuantisedShape, StepKernels
from emberline.kernels.work_limits import MAX_DEQUANTISED_WEIGHTS, MAX_GATHERED_LOGITS, MAX_UNPACKED_WEIGHTS
from emberline.models.outline import ModelOutline
from emberline.models.weight_formats import QuantisedSize
from emberline.models.weight_matrices import list_weight_matrices

BF16_BYTES, F32_BYTES, F64_BYTES = 2, 4, 8
# Rows of logits for each request in a step that is not captured: its own, and a copy that sampling leaves unchanged,
# for log-probabilities.
COPIES_OF_SAMPLED_ROWS = 2
# Tensors of the hidden state's size that exist while a rank computes a feed-forward network: the state, the outputs
# before the ranks sum them, and the layer's first norm (with experts: zeros to which they add their outputs). A dense
# network may need one more, its normed input.
STATES_BESIDE_EXPERTS, STATES_BESIDE_DENSE = 3, 4
# Copies of logits that ranks exchange at a time, beside the result: all ranks' parts, and this rank's part, padded.
COPIES_OF_GATHERED_ROWS = 2


def choose_step_kernels(
    outline: ModelOutline,
    kernels: str,
    dtype_bytes: int,
    *,
    packed: bool = False,
    quantised: Sequence[QuantisedSize] = (),
) -> StepKernels:
    """Return the kernels for a model's weights; see `StepKernels.for_weights`. `quantised`: matrices kept quantised."""
    parts = [part for part in list_weight_matrices(outline) if part.kind == "routed experts"]
    # The rows of gate and up may be stored in two matrices.
    shapes = {(rows, part.columns) for part in parts for rows in (part.rows, part.rows // 2)}
    of_experts = [each for each in quantised if (each.rows, each.columns) in shapes]
    num_kept = sum(each.rows * each.columns * each.num_matrices for each in of_experts)
    num_routed = sum(part.num_weights for part in parts)
    # If more weights have these shapes than routed experts have, some are of shared experts or dense layers.
    others = [each for each in quantised if each not in of_experts or num_kept > num_routed]
    return StepKernels.for_weights(
        kernels,
        dtype_bytes,
        packed=packed,
        quantised={_describe_shape(each) for each in others},
        quantised_experts={_describe_shape(each) for each in of_experts},
        has_other_experts=num_kept < num_routed,
    )


def layer_bytes(
    sizes: StepSizes, kernels: StepKernels, rows: int, max_tuned_rows: int, *, has_ranks: bool = False
) -> int:
    """Return the peak bytes of the largest layer for this many rows, including the hidden state itself.

    Attention needs the state, a normed copy, queries, keys, values and its outputs. These are freed before the
    feed-forward network runs. `has_ranks`: whether outputs of several ranks are summed. Then each product has tensors
    of its own for its input and its output."""
    state, values = kernels.dtype_bytes * rows * sizes.hidden, kernels.dtype_bytes * rows * sizes.attention_values
    if not has_ranks:
        network = network_bytes(sizes, kernels, rows, max_tuned_rows)
        return max(sizes.state_copies * state + values, (sizes.state_copies - 1) * state + network)
    found = (sizes.state_copies + 1) * state + values
    for each in sizes.networks:
        beside = STATES_BESIDE_EXPERTS if isinstance(each, ExpertNetwork) else STATES_BESIDE_DENSE
        found = max(found, beside * state + _one_network_bytes(each, kernels, rows, max_tuned_rows))
    return found


def network_bytes(sizes: StepSizes, kernels: StepKernels, rows: int, max_tuned_rows: int) -> int:
    """Return the bytes that the largest feed-forward network allocates in a step.

    The normed copy of the hidden state is counted, the hidden state itself is not."""
    return max(_one_network_bytes(network, kernels, rows, max_tuned_rows) for network in sizes.networks)


def exchange_bytes(
    sizes: StepSizes, kernels: StepKernels, ranks: int, local: int, total: int, max_tuned_rows: int
) -> int:
    """Return the bytes that a step needs for rows of other ranks, if ranks attend to requests of their own.

    `local`: rows of this rank. `total`: rows of all ranks. This rank's feed-forward networks compute all of them, so it
    has their inputs, and outputs that are not summed yet. A rank copies its inputs for each rank that it sends them to,
    and later receives an output of each of its rows from every rank, which it sums in float32. If experts may move
    between ranks, these outputs and sums are in float64."""
    if ranks == 1:
        return 0
    output, sum_ = (F64_BYTES, F64_BYTES) if sizes.has_movable_experts else (kernels.dtype_bytes, F32_BYTES)
    copies = kernels.dtype_bytes * total + output * (total + ranks * local) + sum_ * local
    of_all, of_local = (network_bytes(sizes, kernels, rows, max_tuned_rows) for rows in (total, local))
    return sizes.hidden * copies + of_all - of_local


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

    kept: int  # between steps: of captured steps and drafts
    of_step: int  # of the largest step that is not captured, with the copies that sampling makes
    of_captured: int  # in the memory of captured steps

    @staticmethod
    def for_model(
        vocab: int, max_running: int, *, has_draft_model: bool = False, has_ranks: bool = False
    ) -> LogitMemory:
        rows, scored = max_step_rows(max_running), MAX_SCORED_TOKENS
        kept = rows + has_draft_model * max_running
        step, captured = COPIES_OF_SAMPLED_ROWS * max_running + scored, 0
        if has_ranks:
            gathered = min(MAX_GATHERED_LOGITS, max_running + scored)
            step = max(step, max_running + scored + COPIES_OF_GATHERED_ROWS * gathered)
            captured = COPIES_OF_GATHERED_ROWS * rows
        return LogitMemory(*(F32_BYTES * vocab * count for count in (kept, step, captured)))


def _describe_shape(quantised: QuantisedSize) -> QuantisedShape:
    return quantised.kind, quantised.rows, quantised.columns, quantised.group_columns


def _one_network_bytes(
    network: GatedNetwork | ExpertNetwork, kernels: StepKernels, rows: int, max_tuned_rows: int
) -> int:
    if isinstance(network, ExpertNetwork):
        return kernels.expert_bytes(network, rows, max_tuned_rows)
    return kernels.gated_bytes(network, rows, max_tuned_rows)
