"""The calls that we make to cuBLAS, recorded by a fake library; tests/gpu uses the real one."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from emberline.kernels.cuda import cublas
from emberline.kernels.cuda.cublas import CublasError, Matmul, MatmulProblem, ProductKind

PROBLEM = MatmulProblem(3, 64, 128, ProductKind.ADD)
SIZES = ((3, 128), (64, 128), (3, 64))


class FakeCublas:
    """A fake cuBLAS that proposes the algorithms 10, 11, .. and records calls."""

    def __init__(self, proposals: int) -> None:
        self.proposals, self.status = proposals, 0
        self.limits, self.ran = dict[int, int](), list[tuple[int, float]]()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0  # calls that create or set something

    def cublasLtMatmulPreferenceSetAttribute(self, _: Any, what: int, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self.limits[what] = value._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        *_, most, proposals, found = arguments
        found._obj.value = min(most, self.proposals)
        for i in range(found._obj.value):
            proposals[i].algorithm[0] = 10 + i
        return 0

    def cublasLtMatmul(self, *arguments: Any) -> int:
        assert len(arguments) == 16
        self.ran.append((arguments[12]._obj[0], arguments[7]._obj.value))
        return self.status


@pytest.fixture
def fake_cublas(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(proposals: int) -> FakeCublas:
        library = FakeCublas(proposals)
        monkeypatch.setattr(cublas, "_library", lambda: library)
        monkeypatch.setattr(cublas, "_cublas_handle", ctypes.c_void_p)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
        monkeypatch.setattr(cublas, "choices", {})
        cublas._get_matmul.cache_clear()
        return library

    yield install
    cublas._get_matmul.cache_clear()


def tensors() -> tuple[torch.Tensor, ...]:
    whole = (torch.zeros(rows * columns + 128, dtype=torch.bfloat16) for rows, columns in SIZES)
    return tuple(
        t.as_strided(size, (size[1], 1), -t.data_ptr() % cublas.ALIGNMENT_BYTES // 2)
        for t, size in zip(whole, SIZES, strict=True)
    )


def test_proposals_are_requested_without_splitting_k(fake_cublas: Any) -> None:
    library = fake_cublas(3)
    matmul = Matmul(PROBLEM)
    assert library.limits == {
        cublas.PREFERENCE_MAX_WORKSPACE: cublas.WORKSPACE_BYTES,
        cublas.PREFERENCE_REDUCTION_SCHEMES: 0,
    }, "k is not to be cut: sums would be others, and what is measured must not decide on results"
    for proposal in range(len(matmul)):
        matmul(*tensors(), proposal)
    assert library.ran == [(10, 1.0), (11, 1.0), (12, 1.0)]


def test_measured_choice_is_used(fake_cublas: Any) -> None:
    library = fake_cublas(3)
    x, w, out = tensors()
    cublas.multiply(x, w, out=out)
    cublas.choices.update({PROBLEM: 2})
    cublas.multiply(x, w, out=out, kind=ProductKind.ADD)
    assert library.ran == [(10, 0.0), (12, 1.0)], "and only what is added to counts"
    cublas.choices.update({PROBLEM: 7})
    cublas.multiply(x, w, out=out, kind=ProductKind.ADD)
    assert library.ran[-1] == (10, 1.0), "a choice that is no longer proposed falls back to the first"


def test_rejected_call_raises(fake_cublas: Any) -> None:
    fake_cublas(0)
    with pytest.raises(CublasError, match="proposes no algorithm"):
        Matmul(PROBLEM)
    library = fake_cublas(1)
    library.status = 15
    with pytest.raises(CublasError, match="15"):
        Matmul(PROBLEM)(*tensors())
