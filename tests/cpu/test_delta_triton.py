"""The Triton kernels of recurrent layers without a GPU: in Triton's interpreter, and compiled for Hopper."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from delta_cases import DeltaCase, DraftCase, Row, Sizes
from test_triton import compiled, compiled_kernels, interpreted, rounding  # noqa: F401
from triton_cases import BF16, F32

from emberline.kernels.triton.convolution import convolve
from emberline.kernels.triton.delta import compute_delta_rule
from emberline.kernels.triton.output_gate import apply_sigmoid_gate, norm_and_gate

CPU = "cpu"


@interpreted
@pytest.mark.parametrize(
    ("sizes", "few", "chunks", "dtype"),
    [
        (Sizes(2, 4, 12, 10), [(3, 1), (0, 1), (9, 2)], [], F32),
        (Sizes(1, 2, 17, 37), [(5, 1), (0, 0)], [(0, 67), (8, 3), (0, 0)], F32),
        (Sizes(1, 1, 16, 16, 1), [], [(4, 7)], BF16),
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


@interpreted
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_drafts_in_the_interpreter(rounding: None, dtype: torch.dtype) -> None:  # noqa: F811
    DraftCase(Sizes(1, 2, 12, 10), CPU, dtype).check()


@compiled
def test_delta_kernels_compile(compiled_kernels: list[Any]) -> None:  # noqa: F811
    case = DeltaCase(Sizes(1, 2, 12, 10), [(9, 1)], [(0, 3)], CPU, BF16)
    layer, states = case.on_device()
    x, gate, gates = case.split(CPU)
    out = compute_delta_rule(convolve(x, layer, states, pdl=True), gates, layer, states, pdl=True)
    apply_sigmoid_gate(norm_and_gate(out, gate, case.norm, 1e-6, pdl=True), gate, pdl=True)
    assert len(compiled_kernels) == 9
    with_products = [kernel for kernel in compiled_kernels if "wgmma" in kernel.asm["ptx"]]
    assert len(with_products) == 2
    for code in (kernel.asm["sass"] for kernel in with_products):
        (*bases,) = set(re.findall(r"ULEA (UR\d+), UR\d+, UR\d+, 0x18", code))  # address of shared memory, in bytes
        assert bases and not re.search(rf"UIADD3 UR\d+, UP\d, ({'|'.join(bases)}), 0x", code), "not divided by 16"
    drafted = DraftCase(Sizes(1, 2, 12, 10), CPU, BF16)
    states = drafted.with_step(drafted.make_states(CPU, BF16), drafted.make_step(Random(1), [0, 0, 0])[1])
    compute_delta_rule(convolve(x, layer, states, pdl=True), gates, layer, states, pdl=True)
    assert len(compiled_kernels) == 9 + 3 + 5
