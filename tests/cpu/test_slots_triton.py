"""The kernels for experts that may move between ranks, without a GPU: results in the interpreter, and compilation."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from test_triton import BF16, F32, compiled, compiled_kernels, interpreted, rounding, seed

pytest.importorskip("triton")

import slot_cases
import triton_cases

from emberline.kernels.cuda import expert_layer
from emberline.kernels.reference import ReferenceBackend
from emberline.kernels.triton import norm, router
from emberline.kernels.triton.exact_sums import sum_exactly

__all__ = ["compiled_kernels", "rounding", "seed"]
CPU = "cpu"


@interpreted
@pytest.mark.parametrize(("name", "rows"), [("mixtral", 3), ("deepseek-v3", 9), ("llama4", 70)])
def test_slots_in_the_interpreter(rounding: None, name: str, rows: int) -> None:
    slot_cases.check_selected_slots(CPU, name, rows, 16)


@interpreted
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_exact_sums_in_the_interpreter(rounding: None, dtype: torch.dtype) -> None:
    slot_cases.check_exact_sums(CPU, dtype)


@interpreted
@pytest.mark.parametrize(("rows", "dtype"), [(5, F32), (20, BF16)])
def test_own_sums_in_the_interpreter(
    rounding: None, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = (
        (router, "norm_and_score"), (norm, "rms_norm"), (expert_layer, "select_slots"), (expert_layer, "sum_exactly"),
        (expert_layer.experts, "run_routed_experts"),
    )  # fmt: skip
    triton_cases.forbid_dependent_launches(monkeypatch, functions)
    layer = expert_layer.ExpertLayer(ReferenceBackend())
    slot_cases.check_own_sums(CPU, dtype, rows, (64, 32), layer)


@compiled
def test_exact_sums_compile(compiled_kernels: list[Any]) -> None:
    x = torch.zeros(64, 7168, dtype=BF16)
    sum_exactly(x, 8, shared=torch.zeros(8, 7168, dtype=BF16), pdl=True)
    sum_exactly(x.float(), 8, pdl=True)
    for kernel in compiled_kernels:  # a thread has 4 columns of 8 terms, each of which is rounded by 2 operations
        assert len(re.findall(r"\b(?:add|sub)(?:\.rn)?\.f64", kernel.asm["ptx"])) >= (2 * 8 + 7) * 4
