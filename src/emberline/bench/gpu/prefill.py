"""Measures prefill attention of one layer, compared with cuDNN on contiguous tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from emberline.bench.gpu.timing import time_graph_replay
from emberline.bench.report import BenchReport
from emberline.kernels.cuda import prefill

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 64
FLOPS = 758e12  # FLOP per second of a dense bf16 product on an H200, measured
SHAPES = {  # requests, new tokens of each, tokens before them
    "2048": (1, 2048, 0),
    "8192": (1, 8192, 0),
    "30000": (1, 30000, 0),
    "1024_after_3072": (1, 1024, 3072),
    "1024_after_29000": (1, 1024, 29000),
    "8x512": (8, 512, 0),
}


def measure(report: BenchReport) -> None:
    max_blocks = max(batch * -(-(new + before) // BLOCK_SIZE) for batch, new, before in SHAPES.values())
    cache = torch.randn(2, max_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    cached = prefill.PrefillTensorMaps(cache[0], cache[1])
    rates = report.config.setdefault("prefill_tflops", {})
    for name, (batch, new, before) in SHAPES.items():
        flop = count_causal_flop(batch, new, before)
        ms = time_graph_replay([_make_attention_call(cached, max_blocks, batch, new, before)]) / 1e3
        theirs = None if before else _time_cudnn_ms(batch, new)
        rates[name] = round(flop / ms / 1e9)
        report.add(f"prefill_{name}", ms, "ms", limit=flop / FLOPS * 1e3, peer=theirs)
        note = "" if theirs is None else f"; cuDNN {theirs:.4g} ms, {flop / theirs / 1e9:.0f} TFLOP/s"
        print(f"prefill_{name}: {ms:.4g} ms, {rates[name]} TFLOP/s{note}", file=sys.stderr, flush=True)


def count_causal_flop(batch: int, new_tokens: int, cached_tokens: int) -> float:
    """Return the floating-point operations of causal attention. Masked scores do not count."""
    return 4.0 * HEAD_DIM * Q_HEADS * batch * (new_tokens * cached_tokens + new_tokens * (new_tokens + 1) / 2)


def _make_attention_call(
    cache: prefill.PrefillTensorMaps, blocks: int, batch: int, new_tokens: int, cached_tokens: int
) -> Callable[[], Tensor]:
    row_blocks = -(-(new_tokens + cached_tokens) // BLOCK_SIZE)
    device = torch.device("cuda")
    tables = torch.randperm(blocks, device=device, dtype=torch.int32)[: batch * row_blocks].view(batch, row_blocks)
    bounds = torch.arange(0, batch * new_tokens + 1, new_tokens, device=device, dtype=torch.int32)
    context = torch.full((batch,), cached_tokens, device=device, dtype=torch.int32)
    work = torch.from_numpy(prefill.make_tiles(np.full(batch, new_tokens), np.full(batch, cached_tokens))).to(device)
    columns = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv = torch.randn(batch * new_tokens, columns, device=device, dtype=torch.bfloat16)
    out = torch.empty(batch * new_tokens, Q_HEADS * HEAD_DIM, device=device, dtype=torch.bfloat16)
    scale = HEAD_DIM**-0.5
    return lambda: prefill.prefill_attention(qkv, cache, tables, bounds, context, work, scale, Q_HEADS, out=out)


def _time_cudnn_ms(batch: int, new_tokens: int) -> float | None:
    """Return the milliseconds of cuDNN's attention, or None if it cannot run.

    The KV heads are repeated if cuDNN does not support grouped heads.
    """
    for kv_heads in (KV_HEADS, Q_HEADS):
        q, k, v = (
            torch.randn(batch, heads, new_tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
            for heads in (Q_HEADS, kv_heads, kv_heads)
        )

        def run_attention(q: Tensor = q, k: Tensor = k, v: Tensor = v, grouped: bool = kv_heads < Q_HEADS) -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

        try:
            return time_graph_replay([run_attention]) / 1e3
        except RuntimeError as error:
            print(f"cuDNN attention failed: kv_heads={kv_heads} error={error}", file=sys.stderr, flush=True)
    return None
