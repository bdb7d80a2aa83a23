"""Measures the attention of one layer, for model families whose attention differs from Llama's.

The cases are windows, chunks, sinks, capped scores and other head sizes, planned as in an engine step. Decode is
compared with the time to read the visible keys and values, and prefill with the time of the matrix products for the
visible scores. Run it with `python -m emberline.bench.gpu.attention_kinds`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from emberline.bench.gpu.decode import BYTES_PER_US
from emberline.bench.gpu.prefill import FLOPS
from emberline.bench.gpu.timing import count_input_sets, time_graph_replay
from emberline.bench.report import BenchReport
from emberline.kernels.arguments import AttentionInputs, AttentionLayer, AttentionMetadata
from emberline.kernels.attention_plan import AttentionPlan, AttentionPlanner
from emberline.kernels.cuda.hopper_backend import HopperBackend

BLOCK_SIZE = 64
MIN_LAYERS, MAX_LAYERS = 2, 128
DECODE_BATCHES = {"b1": (1, 30_000), "b64": (64, 4096)}  # sequences, and keys of each
PREFILL_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """The attention of a model family: heads, and fields of AttentionLayer."""

    heads: tuple[int, int, int]  # query heads, KV heads, head size
    window: int = 0
    chunked: bool = False
    softcap: float = 0.0
    has_sinks: bool = False

    def make_layer(self) -> AttentionLayer:
        sinks = torch.randn(self.heads[0], device="cuda") if self.has_sinks else None
        return AttentionLayer(
            *self.heads,
            scale=self.heads[2] ** -0.5,
            cos_sin=torch.empty(0, device="cuda"),
            window=self.window,
            chunked=self.chunked,
            softcap=self.softcap,
            sinks=sinks,
        )

    def count_visible_keys(self, context: int, new_tokens: int) -> np.ndarray:
        """Return how many keys each of the new tokens attends to."""
        position = np.arange(context, context + new_tokens)
        if not self.window:
            visible: np.ndarray = position + 1
        elif self.chunked:
            visible = position % self.window + 1
        else:
            visible = np.minimum(position + 1, self.window)
        return visible


KINDS = {
    "gpt_oss_window": AttentionKind((64, 8, 64), window=128, has_sinks=True),
    "gpt_oss_full": AttentionKind((64, 8, 64), has_sinks=True),
    "gemma3_window": AttentionKind((16, 8, 256), window=1024),
    "gemma3_full": AttentionKind((16, 8, 256)),
    "gemma2_full": AttentionKind((16, 8, 256), softcap=50.0),
    "llama4_chunks": AttentionKind((40, 8, 128), window=8192, chunked=True),
    "phi3": AttentionKind((32, 32, 96)),
    "llama3": AttentionKind((32, 8, 128)),  # for comparison
}


def measure(report: BenchReport) -> None:
    for name, kind in KINDS.items():
        for batch, (rows, keys) in DECODE_BATCHES.items():
            inputs = LayerSteps(kind, [keys - 1] * rows, [1] * rows)
            us, limit = time_graph_replay(inputs.make_calls()), inputs.bytes_read / BYTES_PER_US
            report.add(f"attention_{name}_decode_{batch}", us, "us", limit=limit)
            print(f"{name} decode {batch}: {us:.2f} us ({limit / us:.0%} of memory)", flush=True)
            del inputs
            torch.cuda.empty_cache()
        inputs = LayerSteps(kind, [0], [PREFILL_TOKENS])
        ms, limit = time_graph_replay(inputs.make_calls()) / 1e3, inputs.flop / FLOPS * 1e3
        report.add(f"attention_{name}_prefill_{PREFILL_TOKENS}", ms, "ms", limit=limit)
        print(f"{name} prefill: {ms:.4g} ms, {inputs.flop / ms / 1e9:.0f} TFLOP/s ({limit / ms:.0%})", flush=True)
        del inputs
        torch.cuda.empty_cache()


class LayerSteps:
    """Random queries, and KV caches of several layers, for sequences with cached keys and new tokens.

    If possible, there are so many layers that what they read does not fit into the L2 cache. Sequences with one new
    token are decode rows.
    """

    def __init__(self, kind: AttentionKind, context: list[int], new_tokens: list[int]) -> None:
        self.kind, self.layer = kind, kind.make_layer()
        q_heads, kv_heads, dim = kind.heads
        rows, tokens = len(context), sum(new_tokens)
        before, counts = np.array(context, np.int32), np.array(new_tokens, np.int32)
        visible = [kind.count_visible_keys(a, b) for a, b in zip(context, new_tokens, strict=True)]
        self.flop = 4.0 * dim * q_heads * float(sum(int(keys.sum()) for keys in visible))
        self.bytes_read = 4 * kv_heads * dim * int(sum(int(keys.max()) for keys in visible))
        self._layers = min(MAX_LAYERS, max(MIN_LAYERS, count_input_sets(self.bytes_read)))
        blocks = -(-(before + counts) // BLOCK_SIZE)
        tables = np.zeros((rows, int(blocks.max())), np.int32)
        order = np.random.default_rng(0).permutation(int(blocks.sum())).astype(np.int32)
        for row, numbers in zip(tables, np.split(order, np.cumsum(blocks)[:-1]), strict=True):
            row[: len(numbers)] = numbers
        cache = torch.empty(2, self._layers, int(blocks.sum()), kv_heads, BLOCK_SIZE, dim, device="cuda").bfloat16()
        for part in cache.flatten(0, 1):
            part.normal_()
        self.keys, self.values = cache[0], cache[1]
        self.qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16)
        starts, none = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), torch.empty(0, device="cuda")
        self.metadata = AttentionMetadata(none, none, _to_gpu(starts), _to_gpu(before), _to_gpu(tables))
        planner = AttentionPlanner(kind.heads, self.keys, torch.bfloat16, rows)
        self.plan = planner.plan(before, counts, int((counts == 1).sum()), _to_gpu)

    def layer_inputs(self) -> list[AttentionInputs]:
        caches = zip(self.keys, self.values, strict=True)
        return [AttentionInputs(self.qkv, self.layer, keys, values, self.metadata) for keys, values in caches]

    def make_calls(self, *, only_triton: bool = False) -> list[Callable[[], Tensor]]:
        """Return one function per layer that computes its attention; `only_triton`: without the CUDA kernels."""
        backend, plan = HopperBackend(), self.plan
        if only_triton:
            plan = replace(plan, has_decode_kernel=False, has_prefill_kernel=False)

        def make_call(inputs: AttentionInputs, plan: AttentionPlan) -> Callable[[], Tensor]:
            return lambda: backend.paged_attention(inputs, plan)

        return [make_call(inputs, plan) for inputs in self.layer_inputs()]


def _to_gpu(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).to("cuda")


if __name__ == "__main__":
    measure(BenchReport("attention-kinds"))
