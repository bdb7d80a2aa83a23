"""The Triton kernels of recurrent layers without a GPU: in Triton's interpreter, and compiled for Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from delta_cases import DeltaCase, Row, Sizes
from test_triton import compiled, compiled_kernels, interpreted, rounding, run_in_interpreter  # noqa: F401
from triton_cases import BF16, F32

from emberline.kernels.triton.convolution import convolve
from emberline.kernels.triton.delta import compute_delta_rule
from emberline.kernels.triton.output_gate import apply_sigmoid_gate, norm_and_gate

CPU, QWEN3_NEXT = "cpu", Sizes(16, 32, 128, 128)


@compiled
def test_all_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@interpreted
@pytest.mark.parametrize(
    ("sizes", "few", "chunks", "dtype"),
    [
        (Sizes(2, 4, 12, 10), [(3, 1), (0, 1), (9, 2)], [], F32),
        (Sizes(1, 3, 17, 37), [(5, 1), (0, 0)], [(0, 140), (8, 3), (0, 0), (2, 1), (70, 64)], F32),
        (Sizes(2, 2, 16, 16, 1), [], [(0, 5), (4, 7)], F32),
        (Sizes(1, 2, 16, 32, 2), [(1, 1)], [(0, 9)], BF16),
    ],
)
def test_delta_rule_in_the_interpreter(
    rounding: None,  # noqa: F811
    sizes: Sizes,
    few: list[Row],
    chunks: list[Row],
    dtype: torch.dtype,
) -> None:
    DeltaCase(sizes, few, chunks, CPU, dtype).check()


@compiled
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_delta_kernels_compile(compiled_kernels: list[Any], dtype: torch.dtype) -> None:  # noqa: F811
    case = DeltaCase(QWEN3_NEXT, [(9, 1)], [(0, 3)], CPU, dtype)
    layer, states = case.on_device()
    x, gate, gates = case.split(CPU)
    out = compute_delta_rule(convolve(x, layer, states, pdl=True), gates, layer, states, pdl=True)
    apply_sigmoid_gate(norm_and_gate(out, gate, case.norm, 1e-6, pdl=True), gate, pdl=True)
    assert len(compiled_kernels) == 9
