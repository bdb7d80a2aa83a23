"""The ops that models and samplers call.

Tensors on a GPU go to `gpu`. Others go to the native kernels if these could be built, and to plain torch otherwise.
`ref` defines the meaning of each op. (`gpu` is imported inside functions: it needs triton, which a machine without a
GPU may lack.)

As in torch, the native library and its thread pool are global to the process. `start_backend` sets them up; otherwise
the first op does so with defaults. A forked child has no pool threads, so worker processes must be started by spawn.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from emberline.kernels import ref
from emberline.kernels.attention_plan import AttentionPlan, AttentionPlanner, max_prefill_tiles
from emberline.kernels.backend import (
    Backend,
    current_backend,
    mark_progress,
    progress_count,
    set_threads,
    start_backend,
)
from emberline.kernels.cpu.library import NativeStep
from emberline.kernels.dense_stack import DenseLayer, DenseStack
from emberline.kernels.packed_weight import PackedWeight, WeightLayout
from emberline.kernels.row_ops import apply_penalties, count_tokens, edit_logits, fill_newest_tokens
from emberline.kernels.weight_unpacker import WeightUnpacker

__all__ = [
    "AttentionPlan",
    "AttentionPlanner",
    "Backend",
    "DenseLayer",
    "DenseStack",
    "PackedWeight",
    "WeightUnpacker",
    "apply_bitmask",
    "apply_penalties",
    "count_tokens",
    "current_backend",
    "edit_logits",
    "embed",
    "fill_newest_tokens",
    "gate_up_silu",
    "linear",
    "log_probs",
    "mark_progress",
    "max_prefill_tiles",
    "pack_linear",
    "paged_attention",
    "progress_count",
    "rope_and_cache",
    "run_dense_layers",
    "sample",
    "sample_with_seed",
    "set_threads",
    "start_backend",
]  # fmt: skip

STORE, ADD, GATED = 0, 1, 2


def pack_linear(weight: Tensor, *, gated: bool = False) -> PackedWeight:
    """Return the weight [n, k] in the layout that `linear` or, with gated=True, `gate_up_silu` reads.

    On a CPU bf16 stays bf16, and float16 becomes float32. With AMX, the inputs of a bf16 weight are rounded to bf16
    too. On a GPU rows stay as they are. The gate and up rows of a gated weight must be interleaved in groups of
    `attention_plan.GATE_GROUP_ROWS` there, if their number is a multiple of it.
    """
    if weight.is_cuda:
        from emberline.kernels import gpu

        return gpu.pack_linear(weight, gated=gated)
    library = current_backend().library
    if library is None:
        return ref.pack_linear(weight, gated=gated)
    assert not gated or weight.shape[0] % 2 == 0
    rows = (weight if weight.dtype == torch.bfloat16 else weight.float()).contiguous()
    narrow = WeightLayout.AMX if library.ember_amx() else WeightLayout.BF16
    layout = narrow if weight.dtype == torch.bfloat16 else WeightLayout.F32
    (n, k), panel = rows.shape, library.ember_panel()
    depth = -(-k // 32) * 32 if layout is WeightLayout.AMX else k
    data = torch.empty(-(-n // panel) * panel * depth, dtype=rows.dtype)
    library.ember_pack(rows.data_ptr(), data.data_ptr(), layout, n, k, gated)
    return PackedWeight(data, n, k, weight.dtype, layout, gated, data.data_ptr())


def empty_weight(n: int, k: int, dtype: torch.dtype, device: torch.device, *, gated: bool = False) -> PackedWeight:
    """Return a GPU weight without values; `fill_weight` sets them later."""
    return PackedWeight(torch.empty(0, dtype=dtype, device=device), n, k, dtype, WeightLayout.ROWS, gated)


def fill_weight(empty: PackedWeight, values: Tensor) -> int:
    """Store the values in `empty`, losslessly as uw12 if that is smaller, and return the bytes they take."""
    from emberline.kernels import gpu

    return gpu.fill_weight(empty, values)


def add_packed_copy(weight: PackedWeight) -> int:
    """Add a uw12 copy to a GPU weight, for steps of few rows, if it is smaller.

    Return the bytes of the copy.
    """
    from emberline.kernels import gpu

    return gpu.add_packed_copy(weight)


def linear(
    x: Tensor,
    w: PackedWeight,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    add_to: Tensor | None = None,
    out: Tensor | None = None,
    float32_output: bool = False,
    unpacker: WeightUnpacker | None = None,
) -> Tensor:
    """Return norm(x) @ w^T + bias, as `ref.linear` defines it.

    `float32_output`: the result is float32 whatever the dtype of x. `unpacker`: unpacks uw12 weights for cuBLAS.
    """
    if x.is_cuda:
        from emberline.kernels import gpu

        return gpu.linear(
            x, w, bias, norm=norm, eps=eps, add_to=add_to, out=out, float32_output=float32_output, unpacker=unpacker
        )
    if w.layout < 0:
        return ref.linear(x, w, bias, norm=norm, eps=eps, add_to=add_to, out=out)
    m, k = x.shape
    assert k == w.k and not w.gated and x.is_contiguous()
    y = add_to if add_to is not None else _output(out, m, w.n)
    assert y.is_contiguous()
    mode = STORE if add_to is None else ADD
    current_backend().library.ember_linear(  # type: ignore[union-attr]
        x.data_ptr(), w.ptr, w.layout, m, w.n, k, _ptr(bias), _ptr(norm), eps, y.data_ptr(), mode
    )
    return y


def gate_up_silu(
    x: Tensor,
    w: PackedWeight,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
    unpacker: WeightUnpacker | None = None,
) -> Tensor:
    if x.is_cuda:
        from emberline.kernels import gpu

        return gpu.gate_up_silu(x, w, norm=norm, eps=eps, out=out, unpacker=unpacker)
    if w.layout < 0:
        return ref.gate_up_silu(x, w, norm=norm, eps=eps, out=out)
    m, k = x.shape
    assert k == w.k and w.gated and x.is_contiguous()
    y = _output(out, m, w.n // 2)
    current_backend().library.ember_linear(  # type: ignore[union-attr]
        x.data_ptr(), w.ptr, w.layout, m, w.n, k, None, _ptr(norm), eps, y.data_ptr(), GATED
    )
    return y


def embed(ids: Tensor, table: Tensor | PackedWeight) -> Tensor:
    """Return the rows `ids` of `table`, which may be the packed weight of a tied LM head."""
    if ids.is_cuda:
        from emberline.kernels import gpu

        return gpu.embed(ids, table)
    library = current_backend().library
    if library is None or (isinstance(table, PackedWeight) and table.layout < 0):
        return ref.embed(ids, table)
    if isinstance(table, PackedWeight):
        assert not table.gated
        pointer, layout, k, packed = table.ptr, table.layout, table.k, True
    elif table.dtype in (torch.bfloat16, torch.float32):
        assert table.is_contiguous()
        layout = WeightLayout.BF16 if table.dtype == torch.bfloat16 else WeightLayout.F32
        pointer, k, packed = table.data_ptr(), table.shape[1], False
    else:
        return ref.embed(ids, table)
    y = torch.empty(len(ids), k)
    library.ember_embed(ids.data_ptr(), len(ids), pointer, layout, k, packed, y.data_ptr())
    return y


def rope_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    if qkv.is_cuda:
        from emberline.kernels import gpu

        gpu.rope_and_cache(
            qkv, positions, cos_sin, k_cache, v_cache, slots, q_heads, kv_heads, head_dim,
            q_norm=q_norm, k_norm=k_norm, eps=eps,
        )  # fmt: skip
        return
    library = current_backend().library
    if library is None:
        ref.rope_and_cache(
            qkv, positions, cos_sin, k_cache, v_cache, slots, q_heads, kv_heads, head_dim,
            q_norm=q_norm, k_norm=k_norm, eps=eps,
        )  # fmt: skip
        return
    assert positions.dtype == torch.int32 and slots.dtype == torch.int64 and qkv.is_contiguous()
    library.ember_rope(
        qkv.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), cos_sin.shape[1], _ptr(q_norm), _ptr(k_norm), eps,
        k_cache.data_ptr(), v_cache.data_ptr(), _is_f32(k_cache), k_cache.stride(0), v_cache.stride(0),
        slots.data_ptr(), len(positions), q_heads, kv_heads, head_dim, v_cache.shape[2],
    )  # fmt: skip


def paged_attention(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context: Tensor,
    scale: float,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    window: int = 0,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Return causal attention as `ref.paged_attention` defines it.

    `plan`: required on a GPU, ignored elsewhere.
    """
    if qkv.is_cuda:
        from emberline.kernels import gpu

        assert plan is not None
        return gpu.paged_attention(
            qkv, k_cache, v_cache, block_tables, query_start, context, scale, q_heads, kv_heads, head_dim,
            window=window, plan=plan,
        )  # fmt: skip
    library = current_backend().library
    if library is None:
        return ref.paged_attention(
            qkv, k_cache, v_cache, block_tables, query_start, context, scale, q_heads, kv_heads, head_dim,
            window=window,
        )  # fmt: skip
    assert block_tables.dtype == query_start.dtype == context.dtype == torch.int32 and qkv.is_contiguous()
    y = torch.empty(len(qkv), q_heads * head_dim)
    library.ember_attention(
        qkv.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), _is_f32(k_cache), k_cache.stride(0), v_cache.stride(0),
        block_tables.data_ptr(), block_tables.stride(0), query_start.data_ptr(), context.data_ptr(), len(context),
        scale, window, q_heads, kv_heads, head_dim, v_cache.shape[2], y.data_ptr(),
    )  # fmt: skip
    return y


def run_dense_layers(
    x: Tensor,
    stack: DenseStack,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context: Tensor,
    rows: Tensor,
) -> Tensor:
    """Run all layers of the stack in one native call, without returning to Python between ops.

    Overwrites x.
    """
    first, (tokens, hidden) = stack.layers[0], x.shape
    if first.qkv.layout < 0:
        return ref.run_dense_layers(x, stack, keys, values, positions, slots, block_tables, query_start, context, rows)
    assert positions.dtype == block_tables.dtype == query_start.dtype == context.dtype == torch.int32
    assert slots.dtype == rows.dtype == torch.int64 and x.is_contiguous() and hidden == first.qkv.k
    assert len(keys) == len(values) == len(stack.layers)
    size = keys.element_size()
    step = NativeStep(
        stack.cos_sin.data_ptr(), positions.data_ptr(), slots.data_ptr(), block_tables.data_ptr(),
        query_start.data_ptr(), context.data_ptr(), rows.data_ptr(), keys.data_ptr(), values.data_ptr(),
        keys.stride(0) * size, values.stride(0) * size, keys.stride(1), values.stride(1), len(rows), tokens,
        len(context), block_tables.stride(0), _is_f32(keys[0]), stack.cos_sin.shape[1], values.shape[3], hidden,
        first.gate_up.n // 2, *stack.heads, stack.eps, stack.scale,
    )  # fmt: skip
    library = current_backend().library
    assert library is not None
    y = torch.empty(len(rows), hidden)
    library.ember_stack(ctypes.byref(step), stack.native, len(stack.layers), x.data_ptr(), y.data_ptr())
    return y


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    library = current_backend().library
    if library is None:
        return ref.sample(logits, temperature, top_k, top_p, min_p, uniform)
    assert top_k.dtype == torch.int32 and uniform.dtype == torch.float64 and logits.is_contiguous()
    assert temperature.dtype == top_p.dtype == min_p.dtype == torch.float32
    rows, n = logits.shape
    ids = torch.empty(rows, dtype=torch.int64)
    library.ember_sample(
        logits.data_ptr(), rows, n, temperature.data_ptr(), top_k.data_ptr(), top_p.data_ptr(), min_p.data_ptr(),
        uniform.data_ptr(), ids.data_ptr(),
    )  # fmt: skip
    return ids


def sample_with_seed(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    """Sample as `sample`, with each row's uniform number derived from its seed and the token's position."""
    if logits.is_cuda:
        from emberline.kernels import gpu

        return gpu.sample_with_seed(logits, temperature, top_k, top_p, min_p, seed, position)
    return sample(logits, temperature, top_k, top_p, min_p, ref.uniform_from_seed(seed, position))


def log_probs(logits: Tensor, ids: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if logits.is_cuda:
        from emberline.kernels import gpu

        return gpu.log_probs(logits, ids, top_n)
    library = current_backend().library
    if library is None:
        return ref.log_probs(logits, ids, top_n)
    assert logits.is_contiguous() and ids.dtype == torch.int64
    rows, n = logits.shape
    chosen, top = torch.empty(rows), torch.empty(rows, top_n)
    top_ids, rank = torch.empty(rows, top_n, dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
    library.ember_log_probs(
        logits.data_ptr(), rows, n, ids.data_ptr(), top_n, chosen.data_ptr(), top_ids.data_ptr(), top.data_ptr(),
        rank.data_ptr(),
    )  # fmt: skip
    return chosen, top_ids, top, rank


def apply_bitmask(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    if logits.is_cuda:
        from emberline.kernels import gpu

        gpu.apply_bitmask(logits, mask, rows)
        return
    library = current_backend().library
    if library is None:
        ref.apply_bitmask(logits, mask, rows)
        return
    assert mask.dtype == torch.int32 and rows.dtype == torch.int64 and logits.is_contiguous() and mask.is_contiguous()
    words = mask.shape[1]
    library.ember_bitmask(logits.data_ptr(), logits.shape[1], mask.data_ptr(), words, rows.data_ptr(), len(rows))


def _output(out: Tensor | None, rows: int, columns: int) -> Tensor:
    if out is None:
        return torch.empty(rows, columns)
    assert out.shape == (rows, columns) and out.is_contiguous() and out.dtype == torch.float32
    return out


def _ptr(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _is_f32(cache: Tensor) -> bool:
    _, _, size, dim = cache.shape
    assert cache.stride()[1:] == (size * dim, dim, 1)
    assert size >= 8 and (64 % size == 0 or size % 64 == 0)
    assert cache.dtype in (torch.bfloat16, torch.float32)
    return cache.dtype == torch.float32
