"""PortableBackend: runs the ops on any NVIDIA GPU of compute capability 8.0 or later, with Triton and cuBLAS.

Matrix products with up to 64 rows of x, where reading the weights takes most of the time, use `triton/linear.py`, or
cuBLAS where that was measured to be faster. With uw12 weights (compressed to 12 bits) they use
`triton/packed_linear.py`. These two Triton kernels also add the bias and the residual, or compute silu(gate) * up.
Products with more rows use cuBLAS, for which uw12 weights are unpacked first. `quantised_linear.py` multiplies by codes
of narrow formats. Attention is computed by Triton kernels for every shape. Sampling and the unpacking of weights are
CUDA C++ that is compiled for the GPU's architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.kernels import quantised_linear, weight_unpacker
from emberline.kernels.arguments import (
    AttentionInputs,
    AttentionLayer,
    AttentionMetadata,
    LatentInputs,
    LatentProducts,
    LinearLayer,
    LinearOutput,
    PerHeadWeights,
    PositionShift,
)
from emberline.kernels.attention_plan import AttentionPlan
from emberline.kernels.cuda import cublas, latent, uw12
from emberline.kernels.cuda import sample as sampling
from emberline.kernels.cuda.cublas import OWN_KERNEL, MatmulProblem, ProductKind
from emberline.kernels.cuda.driver import count_sms
from emberline.kernels.cuda.expert_layer import ExpertLayer
from emberline.kernels.delta_rule import DeltaGates, DeltaLayer, LayerStates
from emberline.kernels.mixture import LocalExpertSums, Mixture, SelectedExperts
from emberline.kernels.op_backend import OpBackend
from emberline.kernels.packed_weight import PackedExperts, PackedWeight, WeightLayout
from emberline.kernels.quantised_matrix import QuantisedMatrix
from emberline.kernels.sampling_arguments import LogProbs, SamplingTensors
from emberline.kernels.triton import (
    activation,
    attention,
    cache_slots,
    convolution,
    delta,
    norm,
    output_gate,
    packed_linear,
    rope,
    token_gather,
)
from emberline.kernels.triton import decode as split_decode
from emberline.kernels.triton import linear as few_rows
from emberline.kernels.weight_unpacker import WeightUnpacker, is_packed
from emberline.kernels.work_limits import GATE_GROUP_ROWS, MAX_UNPACKED_WEIGHTS


class PortableBackend(OpBackend):
    def __init__(self) -> None:
        self._expert_layer = ExpertLayer(self)

    def pack_linear(self, weight: Tensor, *, gated: bool = False) -> PackedWeight:
        """Return the weight without rearranging its rows.

        With `gated`, the caller must have interleaved groups of `work_limits.GATE_GROUP_ROWS` gate rows with groups of
        as many up rows, if the number of gate rows is a multiple of the group size.
        """
        n, k = weight.shape
        return PackedWeight(weight, n, k, weight.dtype, WeightLayout.ROWS, gated, weight.data_ptr())

    def fill_weight(self, weight: PackedWeight, values: Tensor) -> int:
        """Store the values in the empty weight and return the device memory used, in bytes.

        The values are stored as uw12 (12 bits per weight) if that is smaller.
        """
        if values.dtype is torch.bfloat16 and (packed := uw12.pack(values)):
            weight.data, weight.handle, weight.layout = packed.planes, packed, WeightLayout.UW12
            weight.ptr = packed.planes.data_ptr()
            return packed.nbytes
        return super().fill_weight(weight, values)

    def keeps_quantised(self, matrix: QuantisedMatrix) -> bool:
        return quantised_linear.supports(matrix)

    def pack_quantised(self, matrix: QuantisedMatrix, *, gated: bool = False) -> PackedWeight:
        if not quantised_linear.supports(matrix):
            return super().pack_quantised(matrix, gated=gated)
        layout, address = WeightLayout.QUANTISED, matrix.codes.data_ptr()
        return PackedWeight(matrix.codes, matrix.n, matrix.k, torch.bfloat16, layout, gated, address, matrix)

    def pack_quantised_experts(self, matrices: QuantisedMatrix, *, gated: bool = False) -> Tensor | PackedExperts:
        if not quantised_linear.supports(matrices):
            return super().pack_quantised_experts(matrices, gated=gated)
        count, layout = len(matrices.codes), WeightLayout.QUANTISED
        return PackedExperts(count, matrices.n, matrices.k, layout, matrices, matrices.nbytes)

    def arrange_gate_rows(self, weight: Tensor) -> Tensor:
        width, columns = len(weight) // 2, weight.shape[1]
        group = gate_group(width)
        return weight.view(2, width // group, group, columns).transpose(0, 1).reshape(weight.shape)

    def linear(self, x: Tensor, layer: LinearLayer, output: LinearOutput) -> Tensor:
        x, w, bias = apply_norm(x, layer), layer.weight, layer.bias
        add_to, out, is_float32, unpacker = output
        if isinstance(w.handle, QuantisedMatrix):
            y = add_to if add_to is not None else make_output(x, w, is_float32) if out is None else out
            return quantised_linear.multiply_quantised(x, w.handle, out=y, bias=bias, residual=add_to)
        kind = ProductKind.STORE if add_to is None else ProductKind.ADD
        if product := _find_few_rows_kernel(x, w, None if is_float32 else kind):
            y = add_to if add_to is not None else make_output(x, w, is_float32) if out is None else out
            return product(out=y, bias=bias, residual=add_to, pdl=True)
        if is_float32:
            return multiply_float32(x, w, bias, out)
        with unpacked_rows(w, unpacker, lambda following: True) as rows_:
            if add_to is not None:
                add_product(x, rows_, add_to)
                return add_to if bias is None else add_to.add_(bias)
            y = matmul(x, rows_) if bias is None else F.linear(x, rows_, bias.to(x.dtype))
        return y if out is None else out.copy_(y)

    def gate_up_silu(
        self, x: Tensor, layer: LinearLayer, out: Tensor | None = None, unpacker: WeightUnpacker | None = None
    ) -> Tensor:
        x, w = apply_norm(x, layer), layer.weight
        width = w.n // 2
        y, group = x.new_empty(len(x), width) if out is None else out, gate_group(width)
        if isinstance(w.handle, QuantisedMatrix):
            return quantised_linear.multiply_gated(x, w.handle, y)
        if group == GATE_GROUP_ROWS and (product := _find_few_rows_kernel(x, w, ProductKind.GATED)):
            return product(out=y, group=group, pdl=True)
        with unpacked_rows(w, unpacker, lambda following: True) as rows_:
            gate_and_up = matmul(x, rows_, ProductKind.GATED)
        return activation.silu_mul(gate_and_up, y, group, pdl=True)

    def gate_up_gelu(
        self, x: Tensor, layer: LinearLayer, out: Tensor | None = None, unpacker: WeightUnpacker | None = None
    ) -> Tensor:
        """Return gelu(gate) * up. Our product kernels have no gelu, so a separate kernel applies it."""
        width, is_quantised = layer.weight.n // 2, isinstance(layer.weight.handle, QuantisedMatrix)
        gate_and_up = self.linear(x, layer, LinearOutput(unpacker=unpacker))
        y = x.new_empty(len(x), width) if out is None else out
        return activation.gelu_mul(gate_and_up, y, width if is_quantised else gate_group(width), pdl=True)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        return norm.rms_norm(x, weight, eps, out, pdl=True)

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        return norm.layer_norm(x, weight, eps, out, pdl=True)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return x.div_(cap).tanh_().mul_(cap)

    def embed(self, ids: Tensor, table: Tensor | PackedWeight) -> Tensor:
        if isinstance(table, PackedWeight) and isinstance(table.handle, uw12.UW12Weight):
            out = torch.empty(len(ids), table.k, dtype=table.dtype, device=ids.device)
            return uw12.gather_rows(ids, table.handle, out)
        return torch.index_select(table.data if isinstance(table, PackedWeight) else table, 0, ids)

    def rope_and_cache(
        self, qkv: Tensor, layer: AttentionLayer, keys: Tensor, values: Tensor, metadata: AttentionMetadata
    ) -> None:
        rope.rope_and_cache(qkv, layer, keys, values, metadata, pdl=True)

    def paged_attention(self, inputs: AttentionInputs, plan: AttentionPlan | None = None) -> Tensor:
        assert plan is not None, "attention on a GPU needs a plan"
        out = allocate_attention_output(inputs)
        for tiles in (plan.prefill_tiles, plan.unwidened_tiles):
            if tiles is not None and len(tiles):
                attention.paged_attention(inputs, tiles, out=out, pdl=True)
        if plan.decode_work is not None:
            run_split_decode(inputs, plan, out)
        return out

    def pack_latent_products(self, matrix: Tensor, heads: int, plain_dim: int) -> LatentProducts:
        """Return views of the matrix, whose values may be loaded later."""
        (n, k), pairs = matrix.shape, matrix.view(heads, -1, matrix.shape[1])
        keys, values = pairs[:, :plain_dim].transpose(1, 2), pairs[:, plain_dim:]
        whole = PackedWeight(matrix, n, k, matrix.dtype, WeightLayout.ROWS, ptr=matrix.data_ptr())
        return LatentProducts(PerHeadWeights(keys), PerHeadWeights(values), LinearLayer(whole))

    def latent_attention(
        self, inputs: LatentInputs, plan: AttentionPlan | None = None, rows: Tensor | None = None
    ) -> Tensor:
        assert plan is not None, "attention on a GPU needs a plan"
        return latent.latent_attention(inputs, plan, rows, lambda x, layer: self.linear(x, layer, LinearOutput()))

    def convolve(self, x: Tensor, layer: DeltaLayer, states: LayerStates) -> Tensor:
        return convolution.convolve(x, layer, states, pdl=True)

    def compute_delta_rule(self, mixed: Tensor, gates: DeltaGates, layer: DeltaLayer, states: LayerStates) -> Tensor:
        return delta.compute_delta_rule(mixed, gates, layer, states, pdl=True)

    def norm_and_gate(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return output_gate.norm_and_gate(x, gate, weight, eps, pdl=True)

    def apply_sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return output_gate.apply_sigmoid_gate(x, gate, pdl=True)

    def run_mixture(self, x: Tensor, mixture: Mixture, out: Tensor | None = None) -> Tensor:
        return self._expert_layer.run(x, mixture, x if out is None else out)

    def select_experts(self, x: Tensor, mixture: Mixture) -> SelectedExperts:
        return self._expert_layer.select(x, mixture)

    def run_experts(self, x: Tensor, experts: Tensor, mixture: Mixture) -> Tensor:
        return self._expert_layer.run_assigned_experts(x, experts, mixture)

    def add_shared_expert(self, out: Tensor, normed: Tensor, mixture: Mixture) -> Tensor:
        assert mixture.shared is not None
        return self._expert_layer.add_shared(out, normed, mixture.shared)

    def sum_local_experts(self, x: Tensor, mixture: Mixture) -> LocalExpertSums:
        return self._expert_layer.sum_local(x, mixture)

    def sample_with_seed(self, logits: Tensor, settings: SamplingTensors, seed: Tensor, position: Tensor) -> Tensor:
        ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        return sampling.sample(logits, settings, seed, position, ids)

    def log_probs(self, logits: Tensor, ids: Tensor, top_n: int) -> LogProbs:
        return sampling.log_probs(logits, ids, top_n)

    def apply_bitmask(self, logits: Tensor, mask: Tensor, rows: Tensor) -> None:
        sampling.apply_bitmask(logits, mask, rows)

    def edit_logits(self, logits: Tensor, rows: Tensor, ids: Tensor, divide: Tensor, add: Tensor) -> None:
        sampling.edit_logits(logits, rows, ids, divide, add)

    def apply_penalties(self, logits: Tensor, rows: Tensor, slots: Tensor, penalties: Tensor, counts: Tensor) -> None:
        sampling.apply_penalties(logits, rows, slots, penalties, counts)

    def count_tokens(self, counts: Tensor, slots: Tensor, rows: Tensor, tokens: Tensor) -> None:
        sampling.count_tokens(counts, slots, rows, tokens)

    def fill_newest_tokens(self, tokens: Tensor, rows: Tensor, newest: Tensor) -> Tensor:
        return token_gather.gather_tokens(tokens, rows, newest, torch.empty_like(tokens), pdl=True)

    def find_slots(self, position: Tensor, limits: Tensor, tables: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        return cache_slots.find_slots(position, limits, tables, block_size)

    def shift_positions(self, shift: PositionShift) -> None:
        cache_slots.shift_positions(shift)


def _find_few_rows_kernel(x: Tensor, w: PackedWeight, kind: ProductKind | None) -> Callable[..., Tensor] | None:
    """Return our kernel for few rows, bound to x and w, or None if it does not support them or cuBLAS is faster.

    Our kernel is used if tuning did not compare both. `kind`: None for a float32 result, which is not tuned."""
    m = len(x)
    if isinstance(w.handle, uw12.UW12Weight):
        return partial(packed_linear.linear, x, w.handle) if packed_linear.supports(m) else None
    if not few_rows.supports(m, w.n, w.k, x.dtype) or w.data.dtype is not x.dtype:
        return None
    choice = OWN_KERNEL if kind is None else cublas.choices.get(MatmulProblem(m, w.n, w.k, kind), OWN_KERNEL)
    return partial(few_rows.linear, x, w.data) if choice == OWN_KERNEL else None


def allocate_attention_output(inputs: AttentionInputs) -> Tensor:
    qkv, layer = inputs.qkv, inputs.layer
    if layer.latent_dim:
        raise NotImplementedError("paged_attention does not support latents on a GPU: use latent_attention")
    return qkv.new_empty(len(qkv), layer.q_heads * layer.head_dim)


def run_split_decode(inputs: AttentionInputs, plan: AttentionPlan, out: Tensor) -> None:
    """Compute attention of the plan's decode rows into `out` with the Triton kernel."""
    assert plan.decode_work is not None and plan.decode_scratch is not None
    split_decode.split_decode_attention(
        inputs, plan.decode_work, plan.decode_scratch, count_sms(out.device), out=out,
        max_queries=plan.max_queries, pdl=True,
    )  # fmt: skip


def make_output(x: Tensor, w: PackedWeight, is_float32: bool) -> Tensor:
    return x.new_empty(len(x), w.n, dtype=torch.float32 if is_float32 else x.dtype)


def gate_group(width: int) -> int:
    """Return how many gate rows alternate with as many up rows in a weight of `width` gate rows."""
    return GATE_GROUP_ROWS if width % GATE_GROUP_ROWS == 0 else width


def apply_norm(x: Tensor, layer: LinearLayer) -> Tensor:
    return x if layer.norm is None else norm.rms_norm(x, layer.norm, layer.eps, pdl=True)


def matmul(x: Tensor, weight_rows: Tensor, kind: ProductKind = ProductKind.STORE) -> Tensor:
    if not cublas.can_use_tuned_algorithm(x, weight_rows, kind):
        return F.linear(x, weight_rows)
    return cublas.multiply(x, weight_rows, out=x.new_empty(len(x), len(weight_rows)), kind=kind)


def add_product(x: Tensor, weight_rows: Tensor, target: Tensor) -> None:
    if cublas.can_use_tuned_algorithm(x, weight_rows, ProductKind.ADD, target):
        cublas.multiply(x, weight_rows, out=target, kind=ProductKind.ADD)
    else:
        target.addmm_(x, weight_rows.t())


def multiply_float32(x: Tensor, w: PackedWeight, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """Return the product as float32, without rounding its sums to bf16."""
    y = x.new_empty(len(x), w.n, dtype=torch.float32) if out is None else out
    if isinstance(w.handle, uw12.UW12Weight):
        step = max(64, MAX_UNPACKED_WEIGHTS // w.k // 64 * 64)
        for at in range(0, w.n, step):
            part = w.handle.slice_rows(at, min(at + step, w.n))
            torch.mm(x, unpack_weight(part).t(), out_dtype=torch.float32, out=y[:, at : at + part.n])
    elif x.dtype is torch.float32:
        torch.mm(x, w.data.t(), out=y)
    else:
        torch.mm(x, w.data.t(), out_dtype=torch.float32, out=y)
    return y if bias is None else y.add_(bias)


def unpacked_rows(
    w: PackedWeight, unpacker: WeightUnpacker | None, needs_unpacking: Callable[[PackedWeight], bool]
) -> AbstractContextManager[Tensor]:
    """Return a context manager that yields the weight as plain bf16 [n, k]; launch one product inside it.

    `needs_unpacking`: returns whether a product of the next weight (its argument) with as many rows of x needs that
    weight unpacked too. If so, it is unpacked while this product runs."""
    if not is_packed(w):
        return nullcontext(w.data)
    if unpacker is None:
        out = torch.empty(w.n, w.k, dtype=torch.bfloat16, device=w.data.device)
        return nullcontext(weight_unpacker.unpack_weight(w, out))
    following = unpacker.next_weight(w)
    unpack_next = following is not None and is_packed(following) and needs_unpacking(following)
    return unpacker.unpacked_rows(w, following if unpack_next else None)


def unpack_weight(packed: uw12.UW12Weight) -> Tensor:
    out = torch.empty(packed.n, packed.k, dtype=torch.bfloat16, device=packed.planes.device)
    return uw12.unpack(packed, out)
