"""The ops that models and samplers call.

Each op runs on the backend of the device that holds its tensors. `op_backend.OpBackend` describes the ops, and
`reference.ReferenceBackend` defines their results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.kernels.arguments import (
    AttentionInputs,
    AttentionLayer,
    AttentionMetadata,
    LatentInputs,
    LatentLayer,
    LatentProducts,
    LinearLayer,
    LinearOutput,
    PerHeadWeights,
    PositionShift,
)
from emberline.kernels.attention_plan import AttentionPlan, AttentionPlanner, PlannerOptions, max_prefill_tiles
from emberline.kernels.backend import (
    backend_of,
    current_backend,
    mark_progress,
    progress_count,
    set_threads,
    start_backend,
)
from emberline.kernels.delta_rule import DeltaGates, DeltaLayer, LayerStates, StateDrafts, StateSaves
from emberline.kernels.dense_stack import DenseLayer, DenseStack
from emberline.kernels.gpu_choice import has_hopper_kernels, selected_gpu_kernels
from emberline.kernels.latent_planner import LatentPlanner
from emberline.kernels.mixture import Mixture
from emberline.kernels.packed_weight import PackedExperts, PackedWeight, WeightLayout
from emberline.kernels.quantised_matrix import QuantisedMatrix
from emberline.kernels.reference import ReferenceBackend
from emberline.kernels.sampling_arguments import LogProbs, SamplingTensors
from emberline.kernels.weight_unpacker import WeightUnpacker
from emberline.kernels.work_limits import max_latent_queries
from emberline.kernels.worklist import max_row_heads

__all__ = [
    "AttentionLayer",
    "AttentionMetadata",
    "AttentionPlan",
    "AttentionPlanner",
    "DeltaGates",
    "DeltaLayer",
    "DenseLayer",
    "DenseStack",
    "LatentInputs",
    "LatentLayer",
    "LatentPlanner",
    "LatentProducts",
    "LayerStates",
    "LinearLayer",
    "LogProbs",
    "Mixture",
    "PackedExperts",
    "PackedWeight",
    "PerHeadWeights",
    "PlannerOptions",
    "PositionShift",
    "ReferenceBackend",
    "SamplingTensors",
    "StateDrafts",
    "StateSaves",
    "WeightUnpacker",
    "add_packed_copy",
    "apply_bitmask",
    "apply_penalties",
    "apply_sigmoid_gate",
    "compute_delta_rule",
    "convolve",
    "count_quantised_bytes",
    "count_tokens",
    "current_backend",
    "edit_logits",
    "embed",
    "empty_experts",
    "empty_quantised_weight",
    "empty_weight",
    "fill_dequantised_weight",
    "fill_experts",
    "fill_newest_tokens",
    "fill_quantised_experts",
    "fill_quantised_weight",
    "fill_weight",
    "find_slots",
    "gate_up_gelu",
    "gate_up_silu",
    "has_hopper_kernels",
    "keeps_quantised",
    "latent_attention",
    "layer_norm",
    "linear",
    "log_probs",
    "mark_progress",
    "max_latent_queries",
    "max_prefill_tiles",
    "max_row_heads",
    "norm_and_gate",
    "pack_latent_products",
    "pack_linear",
    "paged_attention",
    "progress_count",
    "rms_norm",
    "rope_and_cache",
    "run_dense_layers",
    "run_mixture",
    "sample_with_seed",
    "selected_gpu_kernels",
    "set_threads",
    "shift_positions",
    "soft_cap",
    "start_backend",
]  # fmt: skip


def pack_linear(weight: Tensor, *, gated: bool = False) -> PackedWeight:
    """Return the weight [n, k] in the layout that `linear` or, with gated=True, `gate_up_silu` reads."""
    return backend_of(weight).pack_linear(weight, gated=gated)


def pack_gguf(blocks: Tensor, type_name: str, k: int, *, gated: bool = False) -> PackedWeight:
    """Return a matrix of GGUF blocks, uint8 [n, bytes of a row], as the products and `embed` read it.

    Raises UnsupportedBlocks if the type has no kernel or k is not a multiple of its block size.
    """
    return backend_of(blocks).pack_gguf(blocks, type_name, k, gated=gated)


def empty_weight(n: int, k: int, dtype: torch.dtype, device: torch.device, *, gated: bool = False) -> PackedWeight:
    """Return a GPU weight without memory; `fill_weight` allocates and sets its values later."""
    return PackedWeight(torch.empty(0, dtype=dtype, device=device), n, k, dtype, WeightLayout.ROWS, gated)


def fill_weight(weight: PackedWeight, values: Tensor) -> int:
    """Store the values in the empty weight, losslessly compressed if that is smaller.

    Return the bytes used.
    """
    return backend_of(values).fill_weight(weight, values)


def empty_experts(count: int, n: int, k: int, *, gated: bool = False) -> PackedExperts:
    """Return the experts of a layer on a GPU without memory; `fill_experts` sets their values later."""
    return PackedExperts(count, n, k, WeightLayout.ROWS, None, 0, gated)


def fill_experts(experts: PackedExperts, values: Tensor) -> int:
    """Store the values [count, n, k] in the empty experts, losslessly compressed if that is smaller.

    Return the bytes used.
    """
    return backend_of(values).fill_experts(experts, values)


def keeps_quantised(device: torch.device, matrix: QuantisedMatrix) -> bool:
    """Return whether the device's kernels read the codes of matrices like `matrix`. If not, load the values as bf16.

    `matrix` may be on any device, such as meta: only its sizes and dtypes are used.
    """
    return backend_of(torch.empty(0, device=device)).keeps_quantised(matrix)


def count_quantised_bytes(device: torch.device, matrix: QuantisedMatrix) -> int:
    """Return the bytes of a matrix like `matrix` on a device that keeps it quantised; see `keeps_quantised`."""
    return backend_of(torch.empty(0, device=device)).count_quantised_bytes(matrix)


def empty_quantised_weight(shape: QuantisedMatrix, device: torch.device, *, gated: bool = False) -> PackedWeight:
    """Return a GPU weight without memory, which `fill_quantised_weight` fills later.

    `shape`: a matrix on the meta device, with the sizes and dtypes of the matrix that will be stored.
    """
    data = torch.empty(0, dtype=torch.bfloat16, device=device)
    return PackedWeight(data, shape.n, shape.k, data.dtype, WeightLayout.QUANTISED, gated, handle=shape)


def fill_quantised_weight(weight: PackedWeight, matrix: QuantisedMatrix) -> int:
    """Store the matrix in the empty weight and return the device memory used, in bytes."""
    packed = backend_of(matrix.codes).pack_quantised(matrix, gated=weight.gated)
    weight.data, weight.ptr, weight.handle, weight.layout = packed.data, packed.ptr, packed.handle, packed.layout
    return int(getattr(packed.handle, "nbytes", 0)) or packed.data.nbytes


def fill_dequantised_weight(weight: PackedWeight, values: Tensor) -> int:
    """Store bf16 values in an empty quantised weight, which then is plain; return the bytes used."""
    backend = backend_of(values)
    packed = backend.pack_linear(backend.arrange_gate_rows(values) if weight.gated else values, gated=weight.gated)
    weight.data, weight.ptr, weight.handle, weight.layout = packed.data, packed.ptr, packed.handle, packed.layout
    return packed.data.nbytes


def fill_quantised_experts(experts: PackedExperts, matrices: QuantisedMatrix) -> int:
    """Store the matrices of all experts of a layer, and return the device memory used, in bytes."""
    packed = backend_of(matrices.codes).pack_quantised_experts(matrices, gated=experts.gated)
    if isinstance(packed, Tensor):
        experts.layout, experts.handle, experts.nbytes = WeightLayout.ROWS, packed, packed.nbytes
    else:
        experts.layout, experts.handle, experts.nbytes = packed.layout, packed.handle, packed.nbytes
    return experts.nbytes


def add_packed_copy(weight: PackedWeight) -> int:
    """Add a losslessly compressed copy to a GPU weight if that is smaller.

    Return its size in bytes, or 0. Products with few rows read the copy, because they are limited by memory bandwidth.
    """
    return 0 if weight.layout is WeightLayout.QUANTISED else backend_of(weight.data).add_packed_copy(weight)


def linear(
    x: Tensor,
    layer: LinearLayer,
    *,
    add_to: Tensor | None = None,
    out: Tensor | None = None,
    float32_output: bool = False,
    unpacker: WeightUnpacker | None = None,
) -> Tensor:
    """Return y = norm(x) @ W^T + bias. With `add_to`, add y to that tensor in place and return it."""
    return backend_of(x).linear(x, layer, LinearOutput(add_to, out, float32_output, unpacker))


def gate_up_silu(
    x: Tensor, layer: LinearLayer, *, out: Tensor | None = None, unpacker: WeightUnpacker | None = None
) -> Tensor:
    """Return silu(norm(x) Wg^T) * (norm(x) Wu^T), where the layer's weight holds Wg and Wu."""
    return backend_of(x).gate_up_silu(x, layer, out, unpacker)


def gate_up_gelu(
    x: Tensor, layer: LinearLayer, *, out: Tensor | None = None, unpacker: WeightUnpacker | None = None
) -> Tensor:
    """Return gelu(norm(x) Wg^T) * (norm(x) Wu^T), where gelu is the approximation by a tanh."""
    return backend_of(x).gate_up_gelu(x, layer, out, unpacker)


def embed(ids: Tensor, table: Tensor | PackedWeight) -> Tensor:
    """Return the rows `ids` of `table`, which may be the packed weight of a tied LM head."""
    return backend_of(ids).embed(ids, table)


def rope_and_cache(
    qkv: Tensor, layer: AttentionLayer, keys: Tensor, values: Tensor, metadata: AttentionMetadata
) -> None:
    """Rotate the queries inside `qkv`, and write the rotated keys and the values to the KV cache."""
    backend_of(qkv).rope_and_cache(qkv, layer, keys, values, metadata)


def paged_attention(
    qkv: Tensor,
    layer: AttentionLayer,
    keys: Tensor,
    values: Tensor,
    metadata: AttentionMetadata,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Return causal attention of the new queries over the cached keys. A GPU requires `plan`."""
    return backend_of(qkv).paged_attention(AttentionInputs(qkv, layer, keys, values, metadata), plan)


def pack_latent_products(matrix: Tensor, heads: int, plain_dim: int) -> LatentProducts:
    """Return each head's matrices from the weight [heads * (plain_dim + value size), rank] of latent attention.

    For each head, the weight has `plain_dim` rows that give the unrotated part of keys, then the rows that give values.
    """
    return backend_of(matrix).pack_latent_products(matrix, heads, plain_dim)


def latent_attention(inputs: LatentInputs, plan: AttentionPlan | None = None, rows: Tensor | None = None) -> Tensor:
    """Cache the latents of the new tokens, and return the attention of all of them, or of `rows` only."""
    return backend_of(inputs.q).latent_attention(inputs, plan, rows)


def run_dense_layers(
    x: Tensor, stack: DenseStack, keys: Tensor, values: Tensor, metadata: AttentionMetadata, rows: Tensor
) -> Tensor:
    """Run x through the stack's layers, overwriting x, and return `rows` of the last layer's output."""
    return backend_of(x).run_dense_layers(x, stack, keys, values, metadata, rows)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """Write the RMS norm of each row of x into `out`, whose rows may be parts of longer rows, and return it.

    `out` may be x.
    """
    return backend_of(x).rms_norm(x, weight, eps, out)


def layer_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """Write the layer norm (without bias) of each row of x into `out`, which may be x, and return it.

    With a `weight` [groups, width], each group of `width` columns of a row is normed separately.
    """
    return backend_of(x).layer_norm(x, weight, eps, out)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Replace each element of x by cap * tanh(x / cap) in place and return x."""
    return backend_of(x).soft_cap(x, cap)


def convolve(x: Tensor, layer: DeltaLayer, states: LayerStates) -> Tensor:
    """Return the silu of a causal convolution over each sequence, and store its last inputs in its slot."""
    return backend_of(x).convolve(x, layer, states)


def compute_delta_rule(mixed: Tensor, gates: DeltaGates, layer: DeltaLayer, states: LayerStates) -> Tensor:
    """Return the outputs of the gated delta rule, and advance the states. `mixed` may be overwritten."""
    return backend_of(mixed).compute_delta_rule(mixed, gates, layer, states)


def norm_and_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Replace each head of x, as wide as `weight`, by its RMS norm times the silu of the gate; return x."""
    return backend_of(x).norm_and_gate(x, gate, weight, eps)


def apply_sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply x by the sigmoid of the gate in place and return x."""
    return backend_of(x).apply_sigmoid_gate(x, gate)


def run_mixture(x: Tensor, mixture: Mixture, *, add_to: Tensor | None = None) -> Tensor:
    """Add the mixture-of-experts output for x to `add_to`, by default x, in place and return that tensor."""
    return backend_of(x).run_mixture(x, mixture, add_to)


def sample_with_seed(logits: Tensor, settings: SamplingTensors, seed: Tensor, position: Tensor) -> Tensor:
    """Return one sampled token id per row.

    It depends only on that row's logits, settings, seed and position. The logits may be overwritten.
    """
    return backend_of(logits).sample_with_seed(logits, settings, seed, position)


def log_probs(logits: Tensor, ids: Tensor, top_n: int) -> LogProbs:
    """Return for each row the log-probability and rank of its id in `ids`, and the `top_n` likeliest ids."""
    return backend_of(logits).log_probs(logits, ids, top_n)


def apply_bitmask(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """Set logits[rows[i], t] to -inf wherever bit t of mask[i] (little-endian int32 words) is 0."""
    backend_of(logits).apply_bitmask(logits, mask, rows)


def edit_logits(logits: Tensor, rows: Tensor, ids: Tensor, divide: Tensor, add: Tensor) -> None:
    """Scale single logits, logits[rows[i], ids[i]], by divide[i], then add add[i].

    Scaling divides a positive logit and multiplies any other. Each (row, id) may occur only once.
    """
    backend_of(logits).edit_logits(logits, rows, ids, divide, add)


def apply_penalties(logits: Tensor, rows: Tensor, slots: Tensor, penalties: Tensor, counts: Tensor) -> None:
    """Apply repetition, frequency and presence penalties (`penalties` [P, 3]) to logits[rows[i]].

    counts[slots[i]] says which tokens occurred, as `OpBackend.apply_penalties` describes.
    """
    backend_of(logits).apply_penalties(logits, rows, slots, penalties, counts)


def count_tokens(counts: Tensor, slots: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Add one occurrence of tokens[rows[i]] to counts[slots[i]]. Each slot may occur only once."""
    backend_of(counts).count_tokens(counts, slots, rows, tokens)


def fill_newest_tokens(tokens: Tensor, rows: Tensor, newest: Tensor) -> Tensor:
    """Return a copy of `tokens` in which each negative tokens[i] is replaced by newest[rows[i]]."""
    return backend_of(tokens).fill_newest_tokens(tokens, rows, newest)


def find_slots(position: Tensor, limits: Tensor, tables: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the position (int32) and the KV cache slot of one token for each row of the block tables `tables`.

    A position at or above the row's limit is replaced by limit - 1. If the limit is 0, the slot is -1."""
    return backend_of(position).find_slots(position, limits, tables, block_size)


def shift_positions(shift: PositionShift) -> None:
    """Correct positions and KV cache slots in place by counts on the device; see PositionShift."""
    backend_of(shift.positions).shift_positions(shift)
