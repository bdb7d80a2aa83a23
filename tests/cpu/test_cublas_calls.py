"""What cuBLAS is asked, without one: a library that notes it down stands in its place. tests/gpu has the real one."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from emberline.kernels.cuda import cublas
from emberline.kernels.cuda.cublas import CublasError, Kind, Matmul, Problem

PROBLEM = Problem(3, 64, 128, Kind.ADD)
SIZES = ((3, 128), (64, 128), (3, 64))


class Library:
    """It proposes algorithms 10, 11, ..; `parts` of k each."""

    def __init__(self, parts: list[int]) -> None:
        self.parts, self.ran, self.status = parts, list[tuple[int, float]](), 0

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0  # what is made and set

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        *_, most, proposals, found = arguments
        found._obj.value = min(most, len(self.parts))
        for i in range(found._obj.value):
            proposals[i].algorithm[0] = 10 + i
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(self, algorithm: Any, what: int, value: Any, *_: Any) -> int:
        assert what == cublas.PARTS_OF_K and isinstance(value._obj, ctypes.c_uint32)
        value._obj.value = self.parts[algorithm._obj[0] - 10]
        return 0

    def cublasLtMatmul(self, *arguments: Any) -> int:
        assert len(arguments) == 16
        self.ran.append((arguments[12]._obj[0], arguments[7]._obj.value))
        return self.status


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    def stand_in(parts: list[int]) -> Library:
        library = Library(parts)
        monkeypatch.setattr(cublas, "_library", lambda: library)
        monkeypatch.setattr(cublas, "_handle", ctypes.c_void_p)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
        monkeypatch.setattr(cublas, "choices", {})
        cublas._matmul.cache_clear()
        return library

    yield stand_in
    cublas._matmul.cache_clear()


def tensors() -> tuple[torch.Tensor, ...]:
    whole = (torch.zeros(rows * columns + 128, dtype=torch.bfloat16) for rows, columns in SIZES)
    return tuple(
        t.as_strided(size, (size[1], 1), -t.data_ptr() % cublas.ALIGNED // 2)
        for t, size in zip(whole, SIZES, strict=True)
    )


def test_none_that_cuts_k_is_taken(asked: Any) -> None:
    """Its sums would be others: what is measured must not decide on results."""
    library = asked([1, 4, 1, 0])
    matmul = Matmul(PROBLEM)
    assert len(matmul) == 3
    for proposal in range(3):
        matmul(*tensors(), proposal)
    assert library.ran == [(10, 1.0), (12, 1.0), (13, 1.0)]


def test_what_was_measured_is_what_runs(asked: Any) -> None:
    library = asked([1, 1, 1])
    x, w, out = tensors()
    cublas.product(x, w, out=out)
    cublas.choices.update({PROBLEM: 2})
    cublas.product(x, w, out=out, kind=Kind.ADD)
    assert library.ran == [(10, 0.0), (12, 1.0)], "and only what is added to counts"
    cublas.choices.update({PROBLEM: 7})
    cublas.product(x, w, out=out, kind=Kind.ADD)
    assert library.ran[-1] == (10, 1.0), "what is no longer proposed is not asked for"


def test_a_refusal_is_an_error(asked: Any) -> None:
    asked([])
    with pytest.raises(CublasError, match="proposes nothing"):
        Matmul(PROBLEM)
    library = asked([1])
    library.status = 15
    with pytest.raises(CublasError, match="15"):
        Matmul(PROBLEM)(*tensors())
