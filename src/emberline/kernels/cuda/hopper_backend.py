"""HopperBackend: runs the ops on an NVIDIA H100 or H200, and chooses a kernel for each shape.

Matrix products with up to 256 rows of x, where reading the weights takes most of the time, use our own kernels:
`cuda/linear.py` up to 32 rows, and `cuda/wide.py` above that where it is faster than cuBLAS. These kernels also add the
bias and the residual, or compute silu(gate) * up. They read uw12 weights (compressed to 12 bits) directly and return
the same bits as for plain weights. Up to 384 rows, products with uw12 weights are computed for two halves of the rows.
Products with more rows use cuBLAS, for which uw12 weights are unpacked first; with a `WeightUnpacker`, the next matrix
is unpacked during the current product. If a weight is kept both plain and as uw12, each product reads the faster form.
A weight with `fixed_order` uses `cuda/fixed_order.py` for any number of rows, so that a row's result does not depend on
the other rows. All our kernels use programmatic dependent launch: they may start before the preceding kernel in the
stream has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.kernels import worklist
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
from emberline.kernels.attention_plan import GATE_GROUP_ROWS, AttentionPlan
from emberline.kernels.attention_support import ScoreKind
from emberline.kernels.cuda import cublas, decode, fixed_order, gemm, latent, prefill, uw12, wide, wide_parts
from emberline.kernels.cuda import linear as skinny
from emberline.kernels.cuda import sample as sampling
from emberline.kernels.cuda.cublas import OWN_KERNEL, MatmulProblem, ProductKind
from emberline.kernels.cuda.expert_layer import ExpertLayer
from emberline.kernels.cuda.expert_matrices import pack_experts
from emberline.kernels.delta_rule import DeltaGates, DeltaLayer, LayerStates
from emberline.kernels.mixture import Mixture
from emberline.kernels.op_backend import OpBackend
from emberline.kernels.packed_weight import PackedExperts, PackedWeight, WeightLayout
from emberline.kernels.sampling_arguments import LogProbs, SamplingTensors
from emberline.kernels.triton import (
    activation,
    attention,
    cache_slots,
    convolution,
    delta,
    norm,
    output_gate,
    rope,
    token_gather,
    widen,
)
from emberline.kernels.triton import decode as split_decode
from emberline.kernels.weight_unpacker import WeightUnpacker

MAX_UNPACKED_WEIGHTS = 8192 * 4096  # elements of an LM head that are unpacked at a time, at most
# Pairs (n * k, m): a matrix of more than n * k elements that is kept in both forms is read as uw12 up to m rows of x.
MAX_PACKED_ROWS = ((4096 * 16384, 128), (4096 * 4096, 64), (0, 32))
MIN_GEMM_ROWS = 1024  # rows of x from which our GEMM mostly beats cuBLAS followed by a kernel for silu(gate) * up


class HopperBackend(OpBackend):
    def __init__(self) -> None:
        self._expert_layer = ExpertLayer(self)

    def pack_linear(self, weight: Tensor, *, gated: bool = False) -> PackedWeight:
        """Return the weight without rearranging its rows.

        With `gated`, the caller must have interleaved groups of `attention_plan.GATE_GROUP_ROWS` gate rows with groups
        of as many up rows, if the number of gate rows is a multiple of the group size.
        """
        n, k = weight.shape
        has_own_kernel = weight.dtype is torch.bfloat16 and skinny.supports(1, n, k)
        handle = skinny.BF16Weight(weight) if has_own_kernel else None
        return PackedWeight(weight, n, k, weight.dtype, WeightLayout.ROWS, gated, weight.data_ptr(), handle)

    def fill_weight(self, weight: PackedWeight, values: Tensor) -> int:
        """Store the values in the empty weight and return the device memory used, in bytes.

        The values are stored as uw12 (12 bits per weight) if that is smaller.
        """
        if values.dtype is torch.bfloat16 and (packed := uw12.pack(values)):
            weight.data, weight.handle, weight.layout = packed.planes, packed, WeightLayout.UW12
            return packed.nbytes
        return super().fill_weight(weight, values)

    def fill_experts(self, experts: PackedExperts, values: Tensor) -> int:
        """Store the values in the empty experts and return the device memory used, in bytes.

        The values are stored as uw12 (12 bits per weight) if that is smaller.
        """
        if (packed := pack_experts(values, gated=experts.gated)) is None:
            return super().fill_experts(experts, values)
        experts.handle, experts.layout, experts.nbytes = packed, WeightLayout.UW12, packed.nbytes
        return packed.nbytes

    def add_packed_copy(self, weight: PackedWeight) -> int:
        if weight.uw12_copy is not None or weight.dtype is not torch.bfloat16 or weight.handle is None:
            return 0  # a tied LM head is the embedding too, so it is visited twice
        if (packed := uw12.pack(weight.data)) is None:
            return 0
        weight.uw12_copy = packed
        return packed.nbytes

    def linear(self, x: Tensor, layer: LinearLayer, output: LinearOutput) -> Tensor:
        x, w, bias = _apply_norm(x, layer), layer.weight, layer.bias
        add_to, out, is_float32, unpacker = output
        if product := _find_custom_kernel(x, w):
            dtype = torch.float32 if is_float32 else x.dtype
            y = add_to if add_to is not None else x.new_empty(len(x), w.n, dtype=dtype) if out is None else out
            return product(out=y, bias=bias, residual=add_to)
        if is_float32:
            return _multiply_float32(x, w, bias, out)
        with _unpacked_rows(x, w, unpacker) as rows_:
            if w.fixed_order:
                y = add_to if add_to is not None else x.new_empty(len(x), w.n) if out is None else out
                # `pdl` is off: weights unpacked by the preceding kernel must not be read before it ends.
                plain = skinny.BF16Weight(rows_)
                return fixed_order.linear(x, plain, out=y, bias=bias, residual=add_to, pdl=False)
            if add_to is not None:
                _add_product(x, rows_, add_to)
                return add_to if bias is None else add_to.add_(bias)
            y = _matmul(x, rows_) if bias is None else F.linear(x, rows_, bias.to(x.dtype))
        return y if out is None else out.copy_(y)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        return norm.rms_norm(x, weight, eps, out, pdl=True)

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        return norm.layer_norm(x, weight, eps, out, pdl=True)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return x.div_(cap).tanh_().mul_(cap)

    def gate_up_silu(
        self, x: Tensor, layer: LinearLayer, out: Tensor | None = None, unpacker: WeightUnpacker | None = None
    ) -> Tensor:
        x, w = _apply_norm(x, layer), layer.weight
        width = w.n // 2
        y = x.new_empty(len(x), width) if out is None else out
        if width % GATE_GROUP_ROWS == 0 and (product := _find_custom_kernel(x, w)):
            return product(out=y, gated=True)
        group = _gate_group(width)
        with _unpacked_rows(x, w, unpacker) as rows_:
            if w.fixed_order:
                return fixed_order.linear(x, skinny.BF16Weight(rows_), out=y, gated=True, pdl=False)
            if w.handle is not None and group == GATE_GROUP_ROWS and _uses_custom_gemm(len(x), w):
                plain = w.handle if isinstance(w.handle, skinny.BF16Weight) else skinny.BF16Weight(rows_)
                early = plain is w.handle  # weights unpacked by the preceding kernel must not be read before it ends
                return gemm.linear(x, plain, out=y, gated=True, pdl=early)
            gate_and_up = _matmul(x, rows_, ProductKind.GATED)
        return activation.silu_mul(gate_and_up, y, group, pdl=True)

    def gate_up_gelu(
        self, x: Tensor, layer: LinearLayer, out: Tensor | None = None, unpacker: WeightUnpacker | None = None
    ) -> Tensor:
        """Return gelu(gate) * up. Our product kernels have no gelu, so a kernel of its own follows the product."""
        width = layer.weight.n // 2
        gate_and_up = self.linear(x, layer, LinearOutput(unpacker=unpacker))
        y = x.new_empty(len(x), width) if out is None else out
        return activation.gelu_mul(gate_and_up, y, _gate_group(width), pdl=True)

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
        qkv, layer = inputs.qkv, inputs.layer
        if layer.latent_dim:
            raise NotImplementedError("attention on latents is part of latent_attention on a GPU")
        out = qkv.new_empty(len(qkv), layer.q_heads * layer.head_dim)
        uses_cuda_prefill = plan.has_prefill_kernel
        row_heads = layer.q_heads // layer.kv_heads * plan.max_queries
        uses_cuda_decode = plan.has_decode_kernel and row_heads <= worklist.max_row_heads(layer.head_dim)
        has_prefill = plan.prefill_tiles is not None and len(plan.prefill_tiles) > 0
        overlaps = has_prefill and uses_cuda_prefill and uses_cuda_decode and plan.prefill_sms is not None
        if has_prefill and plan.prefill_tiles is not None:  # prefill first: decode then uses the SMs that are left
            if uses_cuda_prefill:
                _run_prefill_attention(inputs, plan, out, shares_sms=overlaps)
            else:
                attention.paged_attention(inputs, plan.prefill_tiles, out=out, pdl=True)
        if plan.decode_work is not None and uses_cuda_decode:
            _run_decode_attention(inputs, plan, out, overlaps_prefill=overlaps)
        elif plan.decode_work is not None:
            _run_split_decode(inputs, plan, out)
        if plan.unwidened_tiles is not None:
            attention.paged_attention(inputs, plan.unwidened_tiles, out=out, pdl=True)
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

    def run_mixture(self, x: Tensor, mixture: Mixture) -> Tensor:
        return self._expert_layer.run(x, mixture)

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


def _run_prefill_attention(inputs: AttentionInputs, plan: AttentionPlan, out: Tensor, *, shares_sms: bool) -> None:
    """Compute attention of the plan's prefill tiles into `out`. `shares_sms`: decode runs at the same time."""
    assert plan.prefill_tiles is not None
    qkv, layer, keys, values, metadata = inputs
    tables = metadata.block_tables
    if (widened := plan.widened) is not None and widened.tables is not None:
        widen.widen_blocks(keys, values, widened.keys, widened.values, tables, widened.sources, widened.count, pdl=True)
        keys, values, tables = widened.keys, widened.values, widened.tables
    maps, address = plan.tensor_maps.prefill, keys.data_ptr()
    if address not in maps:
        maps[address] = prefill.PrefillTensorMaps(keys, values)
    prefill.prefill_attention(
        qkv, maps[address], tables, metadata.query_start, metadata.context, plan.prefill_tiles, layer.scale,
        layer.q_heads, window=layer.window, kind=ScoreKind(layer.chunked, layer.softcap, layer.sinks), out=out,
        counters=plan.prefill_counters, num_sms=plan.prefill_sms if shares_sms else None,
    )  # fmt: skip


def _run_decode_attention(inputs: AttentionInputs, plan: AttentionPlan, out: Tensor, *, overlaps_prefill: bool) -> None:
    """Compute attention of the plan's decode rows into `out`."""
    assert plan.decode_work is not None and plan.decode_scratch is not None
    qkv, layer, keys, values, metadata = inputs
    rows_, queries, maps, address = plan.decode_rows, plan.max_queries, plan.tensor_maps.decode, keys.data_ptr()
    if address not in maps:
        maps[address] = decode.DecodeTensorMaps(keys, values)
    parts = 0
    if layer.window and not plan.fixed_cuts:
        ctas = worklist.ctas_per_sm(layer.q_heads // layer.kv_heads, queries, layer.head_dim)
        num_ctas = ctas * decode.count_sms(out.device)
        parts = worklist.count_window_parts(rows_, layer.kv_heads, num_ctas, layer.window)
    # The queries are the first tokens of the step. How many they are is known to the device only, by `query_start`.
    decode.decode_attention(
        qkv, maps[address], metadata.block_tables[:rows_], metadata.context[:rows_], plan.decode_work, layer.scale,
        layer.q_heads, layer.kv_heads, layer.head_dim, window=layer.window,
        kind=ScoreKind(layer.chunked, layer.softcap, layer.sinks), out=out, scratch=plan.decode_scratch,
        overlaps_prefill=overlaps_prefill, max_queries=queries, pdl=plan.reads_early,
        query_start=metadata.query_start[: rows_ + 1], window_parts=parts,
    )  # fmt: skip


def _run_split_decode(inputs: AttentionInputs, plan: AttentionPlan, out: Tensor) -> None:
    """Compute attention of the plan's decode rows into `out` with the Triton kernel."""
    assert plan.decode_work is not None and plan.decode_scratch is not None
    split_decode.split_decode_attention(
        inputs, plan.decode_work, plan.decode_scratch, decode.count_sms(out.device), out=out,
        max_queries=plan.max_queries, pdl=True,
    )  # fmt: skip


def _gate_group(width: int) -> int:
    """Return how many gate rows alternate with as many up rows in a weight of `width` gate rows."""
    return GATE_GROUP_ROWS if width % GATE_GROUP_ROWS == 0 else width


def _apply_norm(x: Tensor, layer: LinearLayer) -> Tensor:
    return x if layer.norm is None else norm.rms_norm(x, layer.norm, layer.eps, pdl=True)


def _find_custom_kernel(x: Tensor, w: PackedWeight) -> Callable[..., Tensor] | None:
    """Return one of our kernels, bound to x and w, or None if none supports them or cuBLAS is faster."""
    m = len(x)
    if w.handle is None or x.dtype is not torch.bfloat16:
        return None
    handle: Any = w.uw12_copy if w.uw12_copy is not None and m <= _max_rows_for_uw12(w) else w.handle
    if w.fixed_order:
        needs_unpacking = m > wide.MAX_ROWS and isinstance(handle, uw12.UW12Weight)
        return None if needs_unpacking else partial(fixed_order.linear, x, handle)
    packed = isinstance(handle, uw12.UW12Weight)
    if wide.supports(m, w.n, w.k, packed=packed):
        return partial(wide.linear, x, handle)
    if packed and wide_parts.supports(m, w.n, w.k):
        return partial(wide_parts.linear, x, handle)
    return partial(skinny.linear, x, handle) if skinny.supports(m, w.n, w.k) else None


def _uses_custom_gemm(m: int, w: PackedWeight) -> bool:
    """Return whether our GEMM kernel computes this gate-and-up product of m rows, instead of cuBLAS.

    If tuning did not measure the shape, the GEMM kernel is used from MIN_GEMM_ROWS rows on.
    """
    choice = cublas.choices.get(MatmulProblem(m, w.n, w.k, ProductKind.GATED))
    return gemm.supports(m, w.n, w.k) and (m >= MIN_GEMM_ROWS if choice is None else choice == OWN_KERNEL)


def _matmul(x: Tensor, weight_rows: Tensor, kind: ProductKind = ProductKind.STORE) -> Tensor:
    if not cublas.can_use_tuned_algorithm(x, weight_rows, kind):
        return F.linear(x, weight_rows)
    return cublas.multiply(x, weight_rows, out=x.new_empty(len(x), len(weight_rows)), kind=kind)


def _add_product(x: Tensor, weight_rows: Tensor, target: Tensor) -> None:
    if cublas.can_use_tuned_algorithm(x, weight_rows, ProductKind.ADD, target):
        cublas.multiply(x, weight_rows, out=target, kind=ProductKind.ADD)
    else:
        target.addmm_(x, weight_rows.t())


def _max_rows_for_uw12(w: PackedWeight) -> int:
    """Return up to how many rows of x the uw12 copy of the weight is faster than its plain form."""
    return next(rows for weights, rows in MAX_PACKED_ROWS if w.n * w.k > weights)


def _multiply_float32(x: Tensor, w: PackedWeight, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """Return the product as float32, without rounding its sums to bf16."""
    y = x.new_empty(len(x), w.n, dtype=torch.float32) if out is None else out
    if w.fixed_order:
        handle: Any = w.handle
        return fixed_order.linear(x, handle, out=y, bias=bias)
    if isinstance(w.handle, uw12.UW12Weight):
        step = max(64, MAX_UNPACKED_WEIGHTS // w.k // 64 * 64)
        for at in range(0, w.n, step):
            part = w.handle.slice_rows(at, min(at + step, w.n))
            torch.mm(x, _unpack_weight(part).t(), out_dtype=torch.float32, out=y[:, at : at + part.n])
    elif x.dtype is torch.float32:
        torch.mm(x, w.data.t(), out=y)
    else:
        torch.mm(x, w.data.t(), out_dtype=torch.float32, out=y)
    return y if bias is None else y.add_(bias)


def _unpacked_rows(x: Tensor, w: PackedWeight, unpacker: WeightUnpacker | None) -> AbstractContextManager[Tensor]:
    """Return a context manager that yields the weight as plain bf16 [n, k]; launch one product inside it."""
    if not isinstance(w.handle, uw12.UW12Weight):
        return nullcontext(w.data)
    if unpacker is None:
        return nullcontext(_unpack_weight(w.handle))
    following = unpacker.next_weight(w)
    unpack_next = (
        following is not None and following.layout is WeightLayout.UW12 and _find_custom_kernel(x, following) is None
    )
    return unpacker.unpacked_rows(w, following if unpack_next else None)


def _unpack_weight(packed: uw12.UW12Weight) -> Tensor:
    out = torch.empty(packed.n, packed.k, dtype=torch.bfloat16, device=packed.planes.device)
    return uw12.unpack(packed, out)
