"""The highest throughput that a machine allows for a model.

MachineLimits holds the measured memory bandwidth and arithmetic speed. TokenCost holds the bytes and operations that
one token of a model needs. The limit of a result follows from both. A model that fits into the last-level cache may
exceed the limit of main memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from emberline.bench.job import BenchJob
from emberline.bench.machine import NATIVE_BF16, describe_hardware, last_level_cache_bytes
from emberline.engine.state_plan import state_slot_bytes
from emberline.models.config import ModelConfig

MIN_BUFFER_BYTES = 256 << 20
SQUARE = 1024  # side of the matrices
ROUNDS = 7


@dataclass(frozen=True, slots=True)
class MachineLimits:
    how: dict[str, float]  # by method: read_NAME in GB/s, matmul_NAME in GFLOP/s

    @property
    def bandwidth(self) -> float:
        """The bytes per second that can be read from memory, the best of several measurements."""
        return 1e9 * max(v for name, v in self.how.items() if name.startswith("read"))

    @property
    def flops(self) -> float:
        """The floating-point operations per second of a large matrix product, in the CPU's fastest number format."""
        return 1e9 * max(v for name, v in self.how.items() if name.startswith("matmul"))

    def merge_maximum(self, other: MachineLimits) -> MachineLimits:
        return MachineLimits({name: max(value, other.how[name]) for name, value in self.how.items()})


@dataclass(frozen=True, slots=True)
class TokenCost:
    """The number of parameters that one token of a model is multiplied with, and the bytes of its keys and values."""

    layers: int  # parameters of all layers' matrices; of experts, those that one token uses
    head: int  # parameters of the output matrix; the embedding is looked up, not read
    attention: int  # multiply-adds of one query with one key and its value, all layers
    kv_bytes: int
    width: float  # bytes of a parameter
    other_experts: int = 0  # parameters of experts that a step reads besides those of one token
    state_bytes: int = 0  # of recurrent states, which a step reads and writes for each request

    @staticmethod
    def from_config(config: ModelConfig, bytes_per_parameter: int = 2) -> TokenCost:
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        ffns = [3 * config.ffn] * config.layers
        if (e := config.experts) is not None:
            used = sum(n * k for n, k in e.weight_shapes(config.hidden, e.chosen)[0]) // config.hidden
            ffns = [used if sparse else 3 * config.ffn for sparse in e.layers]
        parts = config.parts.attention
        full = config.layers - len(parts.state_layers)
        rows = full * ((3 if parts.has_output_gate else 2) * q + 2 * kv)
        if (state := parts.state) is not None:
            values = state.value_heads * state.value_dim
            rows += len(parts.state_layers) * (state.conv_channels + 2 * values + 2 * state.value_heads)
        return TokenCost(
            layers=config.hidden * (rows + sum(ffns)),
            head=config.vocab * config.hidden,
            attention=full * 2 * q,
            kv_bytes=full * 2 * kv * bytes_per_parameter,
            width=bytes_per_parameter,
            state_bytes=state_slot_bytes(config),
        )

    @property
    def weight_bytes(self) -> float:
        """The bytes of weights that a step reads: for one token, or with the experts that `with_experts` has added."""
        return (self.layers + self.other_experts + self.head) * self.width

    def with_experts(self, config: ModelConfig, distinct: float) -> TokenCost:
        """Return the cost of steps that read `distinct` experts of each layer with experts."""
        if (experts := config.experts) is None:
            return self
        others = max(0.0, distinct - experts.chosen) * 3 * experts.ffn * config.hidden * sum(experts.layers)
        return replace(self, other_experts=round(others))

    def max_prefill_rate(self, limits: MachineLimits, tokens: int) -> float:
        work = self._count_flops(0, tokens, 1)
        return tokens / max(work / limits.flops, self.weight_bytes / limits.bandwidth)

    def max_decode_rate(self, limits: MachineLimits, batch: int, context_tokens: int) -> float:
        read = self.weight_bytes + batch * (context_tokens * self.kv_bytes + 2 * self.state_bytes)
        work = batch * self._count_flops(context_tokens, context_tokens + 1, 1)
        return batch / max(work / limits.flops, read / limits.bandwidth)

    def max_output_rate(self, limits: MachineLimits, job: BenchJob) -> float:
        """Return the most output tokens per second of a job that the arithmetic speed allows.

        Memory bandwidth is ignored, because the number of times that weights are read depends on the batch sizes.
        """
        pairs = zip(job.prompts, job.outputs, strict=True)
        work = sum(self._count_flops(0, len(prompt) + output - 1, output) for prompt, output in pairs)
        return sum(job.outputs) / (work / limits.flops)

    def _count_flops(self, start: int, end: int, num_sampled: int) -> float:
        """Return the operations to compute the positions [start, end) and to sample `num_sampled` tokens."""
        keys = (end * (end + 1) - start * (start + 1)) // 2  # position p attends to p + 1 keys
        return 2.0 * ((end - start) * self.layers + num_sampled * self.head + keys * self.attention)


def measure_limits(threads: int) -> MachineLimits:
    import torch

    torch.set_num_threads(threads)
    data = torch.ones(max(MIN_BUFFER_BYTES, 4 * last_level_cache_bytes()) // 4)
    rows, ones = data.view(-1, 4096), torch.ones(4096)
    reads: dict[str, Callable[[], object]] = {
        "read_sum": data.sum,
        "read_max": data.amax,
        "read_matvec": lambda: torch.mv(rows, ones),
    }
    how = {name: data.nbytes / _shortest_seconds(read) / 1e9 for name, read in reads.items()}
    formats = [torch.float32]
    if NATIVE_BF16 & set(describe_hardware()["flags"]):
        formats.append(torch.bfloat16)
    for dtype in formats:
        matrix = torch.ones(SQUARE, SQUARE, dtype=dtype)
        seconds = _shortest_seconds(lambda m=matrix: m @ m)  # type: ignore[misc]
        how[f"matmul_{str(dtype).split('.')[1]}"] = 2 * SQUARE**3 / seconds / 1e9
    return MachineLimits(how)


def _shortest_seconds(work: Callable[[], object]) -> float:
    """Return the duration of the fastest of several runs, which was disturbed least."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
