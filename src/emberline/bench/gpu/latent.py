"""Measures the attention of all layers of DeepSeek-V2-Lite, with random weights and without the rest of the model.

A layer is the norm, the projections, latent attention, and the output's product with the residual. Run it with
`python -m emberline.bench.gpu kernels --only latent`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emberline.bench.gpu.timing import time_graph_replay
from emberline.bench.report import BenchReport
from emberline.kernels import ops
from emberline.models.forward import ForwardBatch
from emberline.models.latent_attention import RANK_NORM_EPS, LatentAttention

LAYERS, HIDDEN, HEADS, PLAIN, ROTARY, RANK, VALUES, BLOCK_SIZE = 27, 2048, 16, 128, 64, 512, 128, 64
CACHED = ROTARY + RANK
KEYS_PER_ROW, BATCHES, PROMPTS = 640, (1, 8, 32, 64), (2048, 8192)
CHUNK_AFTER = (1024, 7168)  # tokens of a chunk, and tokens cached before it
BYTES_PER_S, FLOPS = 4.39e12, 758e12  # read bandwidth and dense bf16 products of an H200, measured
WEIGHTS_PER_LAYER = HIDDEN * (HEADS * (PLAIN + ROTARY) + CACHED + HEADS * VALUES) + HEADS * (PLAIN + VALUES) * RANK


def measure(report: BenchReport) -> None:
    for dtype, suffix in ((torch.bfloat16, ""), (torch.float8_e4m3fn, "_float8")):
        stack = LatentStack(dtype, max(*PROMPTS, max(BATCHES) * KEYS_PER_ROW))
        for batch in BATCHES:
            call = stack.make_call([KEYS_PER_ROW - 1] * batch, [1] * batch, decode_rows=batch)
            size = LAYERS * (2 * WEIGHTS_PER_LAYER + batch * KEYS_PER_ROW * CACHED * dtype.itemsize)
            _add(report, f"latent_decode_b{batch}{suffix}", call, size / BYTES_PER_S)
        for tokens in PROMPTS if not suffix else ():
            call = stack.make_call([0], [tokens], decode_rows=0)
            _add(report, f"latent_prefill_{tokens}", call, count_prefill_flop(tokens, 0) / FLOPS)
        new, before = CHUNK_AFTER
        call = stack.make_call([before], [new], decode_rows=0)
        _add(report, f"latent_prefill_{new}_after_{before}{suffix}", call, count_prefill_flop(new, before) / FLOPS)
        del stack, call
        torch.cuda.empty_cache()


def _add(report: BenchReport, name: str, call: Callable[[], object], limit_s: float) -> None:
    ms = time_graph_replay([call]) / 1e3
    report.add(name, ms, "ms", limit=limit_s * 1e3)
    print(f"{name}: {ms:.4g} ms for {LAYERS} layers, {limit_s * 1e3 / ms:.0%} of what is possible", flush=True)


def count_prefill_flop(new: int, before: int) -> float:
    """Return the floating-point operations of all layers, with the keys and values of each head."""
    pairs = new * before + new * (new + 1) / 2
    return LAYERS * 2.0 * (new * WEIGHTS_PER_LAYER + pairs * HEADS * (PLAIN + ROTARY + VALUES))


class LatentStack:
    """The attention of all layers, and a KV cache for `tokens` tokens."""

    def __init__(self, dtype: torch.dtype, tokens: int) -> None:
        blocks = -(-tokens // BLOCK_SIZE)
        self.keys = torch.randn(LAYERS, blocks, 1, BLOCK_SIZE, CACHED, device="cuda", dtype=torch.bfloat16).to(dtype)
        self.layers = [_make_layer() for _ in range(LAYERS)]
        self._tables = torch.randperm(blocks, device="cuda", dtype=torch.int32)
        self._planner = ops.LatentPlanner((HEADS, 1, CACHED), self.keys, torch.bfloat16, max(BATCHES))

    def make_call(self, context: list[int], counts: list[int], *, decode_rows: int) -> Callable[[], Tensor]:
        """Return a function that runs all layers for sequences with these cached and new tokens."""
        before, new = np.array(context, np.int32), np.array(counts, np.int32)
        width, total = -(-int((before + new).max()) // BLOCK_SIZE), int(new.sum())
        starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        positions = np.arange(total, dtype=np.int32) - np.repeat(starts[:-1] - before, new)
        tables = self._tables[: width * len(new)].view(len(new), width)
        rows = torch.from_numpy(np.repeat(np.arange(len(new)), new)).cuda()
        at = torch.from_numpy(positions).cuda().long()
        slots = tables[rows, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
        metadata = ops.AttentionMetadata(at.int(), slots, _to_gpu(starts), _to_gpu(before), tables)
        plan = self._planner.plan(before, new, decode_rows, _to_gpu)
        x = torch.randn(total, HIDDEN, device="cuda", dtype=torch.bfloat16)
        batch = ForwardBatch(slots, metadata, None, self.keys, self.keys[..., :0], plan)

        def run() -> Tensor:
            y = x.clone()
            for layer, keys in zip(self.layers, self.keys.unbind(), strict=True):
                y = layer(y, keys, keys[..., :0], batch)
            return y

        return run


def _make_layer() -> LatentAttention:
    def linear(n: int, k: int, **options: Any) -> ops.LinearLayer:
        return ops.LinearLayer(ops.pack_linear(_random_matrix(n, k)), **options)

    attention = ops.AttentionLayer(
        HEADS, 1, CACHED, (PLAIN + ROTARY) ** -0.5, torch.randn(16384, ROTARY, device="cuda"), latent_dim=RANK,
        interleaved=True,
    )  # fmt: skip
    products = ops.pack_latent_products(_random_matrix(HEADS * (PLAIN + VALUES), RANK), HEADS, PLAIN)
    norm = torch.ones(RANK, device="cuda")
    return LatentAttention(
        qkv=linear(HEADS * (PLAIN + ROTARY) + CACHED, HIDDEN, norm=torch.ones(HIDDEN, device="cuda"), eps=1e-6),
        q_up=None,
        latent=ops.LatentLayer(attention, norm, RANK_NORM_EPS, PLAIN, VALUES, products),
        o=linear(HIDDEN, HEADS * VALUES),
    )


def _random_matrix(n: int, k: int) -> Tensor:
    return torch.randn(n, k, device="cuda", dtype=torch.bfloat16).mul_(k**-0.5)


def _to_gpu(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).cuda()


if __name__ == "__main__":
    measure(BenchReport("latent"))
