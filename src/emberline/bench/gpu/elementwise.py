"""Measures the small kernels of a Llama 8B layer.

Each is compared with the shortest time in which GPU memory can move the kernel's inputs and outputs. Inputs of few rows
stay in the L2 cache between two calls, as they do between two kernels of a model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.bench.gpu.timing import count_input_sets, time_graph_replay
from emberline.bench.report import BenchReport
from emberline.kernels.arguments import AttentionLayer, AttentionMetadata
from emberline.kernels.triton.activation import silu_mul
from emberline.kernels.triton.norm import rms_norm
from emberline.kernels.triton.rope import rope_and_cache

ROWS = (1, 64, 256, 2048, 8192)
HIDDEN, FFN, HEADS = 4096, 14336, (32, 8, 128)
BYTES_PER_US = 4.39e6
MAX_COPIES = 32
BLOCK_SIZE = 64

Call = Callable[[], object]


def measure(report: BenchReport) -> None:
    for rows in ROWS:
        for name, make, size in (
            ("norm", _make_norm_calls, 4 * HIDDEN),
            ("rope", _make_rope_calls, 4 * (HEADS[0] + 2 * HEADS[1]) * HEADS[2]),
            ("silu_mul", _make_silu_calls, 6 * FFN),
        ):
            pairs = [make(rows) for _ in range(min(MAX_COPIES, count_input_sets(size * rows)))]
            peers = [peer for _, peer in pairs if peer is not None]
            us = time_graph_replay([ours for ours, _ in pairs])
            peer = time_graph_replay(peers) if peers else None
            report.add(f"{name}_{rows}", us, "us", limit=size * rows / BYTES_PER_US, peer=peer)


def _make_norm_calls(rows: int) -> tuple[Call, Call]:
    x, weight = _random_tensor(rows, HIDDEN), torch.rand(HIDDEN, device="cuda")
    out, same = torch.empty_like(x), weight.bfloat16()
    return lambda: rms_norm(x, weight, 1e-5, out, pdl=True), lambda: F.rms_norm(x, (HIDDEN,), same, 1e-5)


def _make_rope_calls(rows: int) -> tuple[Call, None]:
    q_heads, kv_heads, dim = HEADS
    qkv = _random_tensor(rows, (q_heads + 2 * kv_heads) * dim)
    layer = AttentionLayer(*HEADS, scale=1.0, cos_sin=torch.rand(rows, dim, device="cuda"))
    positions, slots = torch.arange(rows, device="cuda", dtype=torch.int32), torch.arange(rows, device="cuda")
    keys, values = _random_tensor(2, -(-rows // BLOCK_SIZE), kv_heads, BLOCK_SIZE, dim)
    unused = torch.empty(0, dtype=torch.int32, device="cuda")  # only attention reads these
    metadata = AttentionMetadata(positions, slots, query_start=unused, context=unused, block_tables=unused)
    return lambda: rope_and_cache(qkv, layer, keys, values, metadata, pdl=True), None


def _make_silu_calls(rows: int) -> tuple[Call, Call]:
    gate_up, out = _random_tensor(rows, 2 * FFN), _random_tensor(rows, FFN)
    gate, up = gate_up.chunk(2, dim=1)
    return lambda: silu_mul(gate_up, out, 16, pdl=True), lambda: F.silu(gate) * up


def _random_tensor(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
