"""HopperBackend: runs the ops on an NVIDIA H100 or H200, with kernels only for these GPUs where they are faster.

Matrix products with up to 256 rows of x, where reading the weights takes most of the time, use our own kernels:
`cuda/linear.py` up to 32 rows, and `cuda/wide.py` above that where it is faster than cuBLAS. These kernels also add the
bias and the residual, or compute silu(gate) * up. They read uw12 weights (compressed to 12 bits) directly and return
the same bits as for plain weights. Products of up to 384 rows with uw12 weights compute half of the rows at a time.
Products with more rows use cuBLAS, for which uw12 weights are unpacked first; with a `WeightUnpacker`, the next matrix
is unpacked during the current product. If a weight is kept both plain and as uw12, each product reads the faster form.
A weight with `fixed_order` uses `cuda/fixed_order.py` for any number of rows, so that a row's result does not depend on
the other rows. `fp8.py` has the products with float8 weights, `narrow_linear.py` those with 4-bit weights. Our kernels
use programmatic dependent launch: they may start before the preceding kernel in the stream has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.kernels import worklist
from emberline.kernels.arguments import AttentionInputs, LayerProducts, LinearLayer, LinearOutput
from emberline.kernels.attention_plan import AttentionPlan
from emberline.kernels.attention_support import ScoreKind
from emberline.kernels.cuda import (
    chain,
    cublas,
    decode,
    fixed_order,
    fp8,
    fp8_weight,
    gemm,
    narrow_experts,
    narrow_layout,
    narrow_linear,
    prefill,
    uw12,
    wide,
    wide_halves,
)
from emberline.kernels.cuda import linear as skinny
from emberline.kernels.cuda.cublas import OWN_KERNEL, MatmulProblem, ProductKind
from emberline.kernels.cuda.driver import count_sms
from emberline.kernels.cuda.expert_layer import ExpertLayer
from emberline.kernels.cuda.expert_matrices import pack_experts
from emberline.kernels.cuda.fp8_weight import FP8Weight
from emberline.kernels.cuda.narrow_layout import FourBitWeight
from emberline.kernels.packed_weight import PackedExperts, PackedWeight, WeightLayout
from emberline.kernels.portable_backend import (
    PortableBackend,
    add_product,
    allocate_attention_output,
    apply_norm,
    gate_group,
    matmul,
    multiply_float32,
    run_split_decode,
    unpacked_rows,
)
from emberline.kernels.quantised_matrix import QuantisedMatrix
from emberline.kernels.triton import activation, attention, narrow, widen
from emberline.kernels.weight_unpacker import WeightUnpacker
from emberline.kernels.work_limits import GATE_GROUP_ROWS

# Pairs (n * k, m): a matrix of more than n * k elements that is kept in both forms is read as uw12 up to m rows of x.
MAX_PACKED_ROWS = ((4096 * 16384, 128), (4096 * 4096, 64), (0, 32))
MIN_GEMM_ROWS = 1024  # rows of x from which our GEMM mostly beats cuBLAS followed by a kernel for silu(gate) * up


class HopperBackend(PortableBackend):
    def __init__(self) -> None:
        super().__init__()
        self._expert_layer = ExpertLayer(self, uses_hopper=True)

    def pack_linear(self, weight: Tensor, *, gated: bool = False) -> PackedWeight:
        """Return the weight without rearranging its rows.

        With `gated`, the caller must have interleaved groups of `work_limits.GATE_GROUP_ROWS` gate rows with groups of
        as many up rows, if the number of gate rows is a multiple of the group size.
        """
        n, k = weight.shape
        has_own_kernel = weight.dtype is torch.bfloat16 and skinny.supports(1, n, k)
        handle = skinny.BF16Weight(weight) if has_own_kernel else None
        return PackedWeight(weight, n, k, weight.dtype, WeightLayout.ROWS, gated, weight.data_ptr(), handle)

    def keeps_quantised(self, matrix: QuantisedMatrix) -> bool:
        return fp8_weight.supports(matrix) or narrow.supports(matrix) or super().keeps_quantised(matrix)

    def count_quantised_bytes(self, matrix: QuantisedMatrix) -> int:
        return narrow_layout.count_bytes(matrix) or super().count_quantised_bytes(matrix)

    def pack_quantised(self, matrix: QuantisedMatrix, *, gated: bool = False) -> PackedWeight:
        if packed := fp8.pack(matrix, gated=gated) or narrow_linear.pack_weight(matrix, gated=gated):
            return packed
        return super().pack_quantised(matrix, gated=gated)

    def pack_quantised_experts(self, matrices: QuantisedMatrix, *, gated: bool = False) -> Tensor | PackedExperts:
        packed = narrow_experts.pack_experts(matrices, gated=gated)
        return packed or super().pack_quantised_experts(matrices, gated=gated)

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
        if isinstance(layer.weight.handle, FP8Weight):
            return fp8.linear(x, layer, output)
        if isinstance(layer.weight.handle, QuantisedMatrix):
            return super().linear(x, layer, output)
        x, w, bias = apply_norm(x, layer), layer.weight, layer.bias
        add_to, out, is_float32, unpacker = output
        if product := _find_custom_kernel(x, w):
            dtype = torch.float32 if is_float32 else x.dtype
            y = add_to if add_to is not None else x.new_empty(len(x), w.n, dtype=dtype) if out is None else out
            return product(out=y, bias=bias, residual=add_to)
        if is_float32 and w.fixed_order:
            y = x.new_empty(len(x), w.n, dtype=torch.float32) if out is None else out
            handle: Any = w.handle
            return fixed_order.linear(x, handle, out=y, bias=bias)
        if is_float32 and isinstance(w.handle, FourBitWeight):
            w = narrow_linear.unpack(w)
        if is_float32:
            return multiply_float32(x, w, bias, out)
        with _unpacked_rows(x, w, unpacker) as rows_:
            if w.fixed_order:
                y = add_to if add_to is not None else x.new_empty(len(x), w.n) if out is None else out
                # `pdl` is off: weights unpacked by the preceding kernel must not be read before it ends.
                plain = skinny.BF16Weight(rows_)
                return fixed_order.linear(x, plain, out=y, bias=bias, residual=add_to, pdl=False)
            if add_to is not None:
                add_product(x, rows_, add_to)
                return add_to if bias is None else add_to.add_(bias)
            y = matmul(x, rows_) if bias is None else F.linear(x, rows_, bias.to(x.dtype))
        return y if out is None else out.copy_(y)

    def gate_up_silu(
        self, x: Tensor, layer: LinearLayer, out: Tensor | None = None, unpacker: WeightUnpacker | None = None
    ) -> Tensor:
        if isinstance(layer.weight.handle, FP8Weight):
            return fp8.gate_up_silu(x, layer, out)
        if isinstance(layer.weight.handle, QuantisedMatrix):
            return super().gate_up_silu(x, layer, out)
        x, w = apply_norm(x, layer), layer.weight
        width = w.n // 2
        y = x.new_empty(len(x), width) if out is None else out
        if width % GATE_GROUP_ROWS == 0 and (product := _find_custom_kernel(x, w)):
            return product(out=y, gated=True)
        group = gate_group(width)
        with _unpacked_rows(x, w, unpacker) as rows_:
            if w.fixed_order:
                return fixed_order.linear(x, skinny.BF16Weight(rows_), out=y, gated=True, pdl=False)
            if w.handle is not None and group == GATE_GROUP_ROWS and _uses_custom_gemm(len(x), w):
                plain = w.handle if isinstance(w.handle, skinny.BF16Weight) else skinny.BF16Weight(rows_)
                early = plain is w.handle  # weights unpacked by the preceding kernel must not be read before it ends
                return gemm.linear(x, plain, out=y, gated=True, pdl=early)
            gate_and_up = matmul(x, rows_, ProductKind.GATED)
        return activation.silu_mul(gate_and_up, y, group, pdl=True)

    def gate_up_gelu(
        self, x: Tensor, layer: LinearLayer, out: Tensor | None = None, unpacker: WeightUnpacker | None = None
    ) -> Tensor:
        w = layer.weight
        if not isinstance(w.handle, FourBitWeight) or not (product := _find_custom_kernel(apply_norm(x, layer), w)):
            return super().gate_up_gelu(x, layer, out, unpacker)
        return product(out=x.new_empty(len(x), w.n // 2) if out is None else out, gated=True, gelu=True)

    def run_layer_products(self, mixed: Tensor, x: Tensor, products: LayerProducts) -> Tensor | None:
        return chain.run_layer_products(mixed, x, products)

    def paged_attention(self, inputs: AttentionInputs, plan: AttentionPlan | None = None) -> Tensor:
        assert plan is not None, "attention on a GPU needs a plan"
        layer, out = inputs.layer, allocate_attention_output(inputs)
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
            run_split_decode(inputs, plan, out)
        if plan.unwidened_tiles is not None:
            attention.paged_attention(inputs, plan.unwidened_tiles, out=out, pdl=True)
        return out


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
        num_ctas = ctas * count_sms(out.device)
        parts = worklist.count_window_parts(rows_, layer.kv_heads, num_ctas, layer.window)
    # The queries are the first tokens of the step. How many they are is known to the device only, by `query_start`.
    decode.decode_attention(
        qkv, maps[address], metadata.block_tables[:rows_], metadata.context[:rows_], plan.decode_work, layer.scale,
        layer.q_heads, layer.kv_heads, layer.head_dim, window=layer.window,
        kind=ScoreKind(layer.chunked, layer.softcap, layer.sinks), out=out, scratch=plan.decode_scratch,
        overlaps_prefill=overlaps_prefill, max_queries=queries, pdl=plan.reads_early,
        query_start=metadata.query_start[: rows_ + 1], window_parts=parts,
    )  # fmt: skip


def _find_custom_kernel(x: Tensor, w: PackedWeight) -> Callable[..., Tensor] | None:
    """Return one of our kernels, bound to x and w, or None if none supports them or cuBLAS is faster."""
    m = len(x)
    if w.handle is None or x.dtype is not torch.bfloat16:
        return None
    if isinstance(w.handle, FourBitWeight):
        return narrow_linear.find_product(x, w)
    handle: Any = w.uw12_copy if w.uw12_copy is not None and m <= _max_rows_for_uw12(w) else w.handle
    if w.fixed_order:
        needs_unpacking = m > wide.MAX_ROWS and isinstance(handle, uw12.UW12Weight)
        return None if needs_unpacking else partial(fixed_order.linear, x, handle)
    packed = isinstance(handle, uw12.UW12Weight)
    if wide.supports(m, w.n, w.k, packed=packed):
        return partial(wide.linear, x, handle)
    if packed and wide_halves.supports(m, w.n, w.k):
        return partial(wide_halves.linear, x, handle)
    return partial(skinny.linear, x, handle) if skinny.supports(m, w.n, w.k) else None


def _uses_custom_gemm(m: int, w: PackedWeight) -> bool:
    """Return whether our GEMM kernel computes this gate-and-up product of m rows, instead of cuBLAS.

    If tuning did not measure the shape, the GEMM kernel is used from MIN_GEMM_ROWS rows on.
    """
    choice = cublas.choices.get(MatmulProblem(m, w.n, w.k, ProductKind.GATED))
    return gemm.supports(m, w.n, w.k) and (m >= MIN_GEMM_ROWS if choice is None else choice == OWN_KERNEL)


def _max_rows_for_uw12(w: PackedWeight) -> int:
    """Return the most rows of x for which the uw12 copy of the weight is faster than its plain form."""
    return next(rows for weights, rows in MAX_PACKED_ROWS if w.n * w.k > weights)


def _unpacked_rows(x: Tensor, w: PackedWeight, unpacker: WeightUnpacker | None) -> AbstractContextManager[Tensor]:
    """Return a context manager that yields the weight as plain bf16 [n, k]; launch one product inside it."""
    return unpacked_rows(w, unpacker, lambda following: _find_custom_kernel(x, following) is None)
