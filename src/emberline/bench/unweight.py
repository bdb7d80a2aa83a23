"""`emberline bench unweight`: how small and how fast the weight codec is, compared with the entropy.

It reports the bits per weight on disk and in memory. Real weights are SmolLM2 (published with 4 bits, expanded to bf16)
and MiniLM (cast to bf16). Generated weights imitate an 8B Llama: some rows of every matrix are drawn from a Gaussian
and from Student's t distribution with 5 degrees of freedom, and stand for all rows of the matrix. The format in memory
is `uw12`, packed by the reference implementation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from emberline.bench.report import BenchReport
from emberline.bench.unweight_peers import PEERS, measure_peer
from emberline.core.cpus import core_count
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.source import resolve_model
from emberline.kernels.cpu.library import find_library
from emberline.kernels.uw12_ref import reference_pack
from emberline.models.weights import Weights
from emberline.unweight.codec import WeightCodec, select_weight_codec
from emberline.unweight.format import BLOCK_ELEMENTS, Bytes
from emberline.unweight.prefix_code import PrefixCode, entropy_bits

LLAMA_8B = {  # rows, columns, count
    "qkv": (6144, 4096, 32),
    "o": (4096, 4096, 32),
    "gate_up": (28672, 4096, 32),
    "down": (4096, 14336, 32),
    "embedding": (128256, 4096, 1),
    "lm_head": (128256, 4096, 1),
}
SAMPLED = 256  # rows of each matrix
SCALE, FREEDOM = 0.02, 5
TIMED = 512 * BLOCK_ELEMENTS  # weights for timing the codec
RUN = 32 * BLOCK_ELEMENTS
WARM_SECONDS = 0.5
FORMATS = {"float16": (torch.float16, 2), "float32": (torch.float32, 4), "float8_e4m3": (torch.float8_e4m3fn, 1)}


@dataclass(slots=True)
class CompressedSize:
    """The sizes of all matrices of a model, in bits."""

    weights: float = 0
    disk: float = 0
    memory: float = 0
    bound: float = 0

    def add_matrix(self, matrix: Tensor, codec: WeightCodec, multiplicity: float = 1) -> None:
        elements = as_bytes(matrix)
        counts = codec.count_symbols(elements, 2)
        coded, index = codec.encode(elements, 2, PrefixCode.from_counts(counts))
        packed = reference_pack(matrix)
        self.weights += multiplicity * matrix.numel()
        self.disk += multiplicity * 8 * (len(coded) + len(index))
        self.memory += multiplicity * (16 * matrix.numel() if packed is None else 8 * packed.nbytes)
        self.bound += multiplicity * matrix.numel() * (8 + entropy_bits(counts))


def bench(rounds: int, peers_dir: Path) -> BenchReport:
    codec = select_weight_codec(find_library())
    report = BenchReport(
        "unweight", {"codec": codec.name, "rounds": rounds, "cores": core_count(), "timed_weights": TIMED}
    )
    for model, matrices in matrices_by_model():
        size = CompressedSize()
        for matrix, times in matrices:
            size.add_matrix(matrix, codec, times)
        bound = size.bound / size.weights
        report.add(f"disk_bits_per_weight_{model}", size.disk / size.weights, "bit", limit=bound)
        report.add(f"memory_bits_per_weight_{model}", size.memory / size.weights, "bit", limit=bound)
        report.add(f"disk_saved_{model}", 100 * (1 - size.disk / size.weights / 16), "%")
        report.add(f"memory_saved_{model}", 100 * (1 - size.memory / size.weights / 16), "%")
    for name, (dtype, width) in FORMATS.items():
        numbers = draw_gaussian(64 * BLOCK_ELEMENTS)
        if width == 1:
            numbers *= torch.finfo(dtype).max / numbers.abs().max()  # scaled to the format's range
        _add_format_size(report, name, numbers.to(dtype), width, codec)
    _add_codec_speed(report, codec, rounds, peers_dir)
    return report


def matrices_by_model() -> Iterator[tuple[str, Iterator[tuple[Tensor, float]]]]:
    """Yield the name of each model and an iterator of its bf16 matrices.

    Each matrix comes with the number of model matrices that it stands for, which may be a fraction.
    """
    for name in ("smollm2", "minilm"):
        yield name, ((matrix, 1.0) for matrix in _checkpoint_matrices(resolve_model(name, as_safetensors=True)))
    yield "llama_8b_gaussian", _llama_matrices(draw_gaussian)
    yield "llama_8b_student", _llama_matrices(draw_student_t)


def draw_gaussian(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)) * SCALE


def draw_student_t(count: int) -> Tensor:
    values = np.random.default_rng(count).standard_t(FREEDOM, count) * SCALE
    return torch.from_numpy(values.astype(np.float32))


def as_bytes(tensor: Tensor) -> Bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def _checkpoint_matrices(directory: Path) -> Iterator[Tensor]:
    weights = Weights(Checkpoint.open(directory), torch.bfloat16)
    for name, info in weights.checkpoint.tensors.items():
        if len(info.shape) == 2 and info.dtype in ("BF16", "F32", "F16") and prod(info.shape) > BLOCK_ELEMENTS // 16:
            yield weights.load_matrix(name, *info.shape)


def _llama_matrices(draw_values: Callable[[int], Tensor]) -> Iterator[tuple[Tensor, float]]:
    for rows, columns, number in LLAMA_8B.values():
        yield draw_values(SAMPLED * columns).view(SAMPLED, columns).bfloat16(), number * rows / SAMPLED


def _add_format_size(report: BenchReport, name: str, tensor: Tensor, element_bytes: int, codec: WeightCodec) -> None:
    elements = as_bytes(tensor)
    counts = codec.count_symbols(elements, element_bytes)
    coded, index = codec.encode(elements, element_bytes, PrefixCode.from_counts(counts))
    bits = 8 * (len(coded) + len(index)) / tensor.numel()
    report.add(
        f"disk_bits_per_weight_gaussian_{name}", bits, "bit", limit=8 * (element_bytes - 1) + entropy_bits(counts)
    )


def _add_codec_speed(report: BenchReport, codec: WeightCodec, rounds: int, peers_dir: Path) -> None:
    """Add the GB/s of encoding and decoding to the report, counted in uncompressed bf16 bytes."""
    elements = as_bytes(draw_gaussian(TIMED).bfloat16())
    code = PrefixCode.from_counts(codec.count_symbols(elements, 2))
    runs = [elements[at : at + 2 * RUN] for at in range(0, len(elements), 2 * RUN)]
    coded = [codec.encode(run, 2, code) for run in runs]
    outs = [np.empty_like(run) for run in runs]
    pairs = list(zip(coded, outs, strict=True))

    def decode_pair(pair: tuple[tuple[Bytes, Bytes], Bytes], check: bool = True) -> None:
        assert codec.decode(*pair[0], 2, code, pair[1], verify_crc=check) == -1

    peers = {name: found for name in PEERS if (found := measure_peer(name, elements.tobytes(), rounds, peers_dir))}
    for threads, label in ((1, "1"), (core_count(), "all")):
        with ThreadPoolExecutor(threads) as pool:
            ours = {
                "count": lambda: list(pool.map(lambda run: codec.count_symbols(run, 2), runs)),
                "encode": lambda: list(pool.map(lambda run: codec.encode(run, 2, code), runs)),
                "decode": lambda: list(pool.map(decode_pair, pairs)),
                "decode_unchecked": lambda: list(pool.map(lambda pair: decode_pair(pair, False), pairs)),
            }
            for what, work in ours.items():
                theirs = {name: found[what] for name, found in peers.items() if label == "1" and what in found}
                rates = [len(elements) / seconds / 1e9 for seconds in _time_rounds(work, rounds)]
                report.add(f"{what}_{label}", rates, "GB/s", peer=max(map(max, theirs.values()), default=None))
                for name, figures in theirs.items():
                    report.add(f"{what}_{label}/{name}", figures, "GB/s")
    assert all(np.array_equal(out, run) for out, run in zip(outs, runs, strict=True))
    ours_bits = 8 * sum(len(data) + len(index) for data, index in coded) / TIMED
    report.add("bits", ours_bits, "bit", peer=min((found["bits"][0] for found in peers.values()), default=None))
    for name, found in peers.items():
        report.add(f"bits/{name}", found["bits"][0], "bit")


def _time_rounds(work: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds of each round.

    A warm-up gives the operating system time to spread the threads over the cores.
    """
    until = time.perf_counter() + WARM_SECONDS
    times: list[float] = []
    while len(times) < rounds:
        began = time.perf_counter()
        work()
        if began >= until:
            times.append(time.perf_counter() - began)
    return times
