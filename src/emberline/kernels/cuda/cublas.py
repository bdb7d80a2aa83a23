"""product: y = x w^T by cuBLAS, by the algorithm that `choices` names where it names one.

cuBLAS proposes a few for every shape, its best guess first. That guess can be far off, since what the last wave of
tiles leaves idle depends on every size: of 896 rows and a Llama 8B's down projection the third proposal takes 150 us
where the first takes 173. Who has measured them (`tuning`) says which it is to be by a proposal's tile and options, as
cuBLAS numbers them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache

import torch
from torch import Tensor

MOST = 8  # proposals
WORKSPACE = 1 << 20  # bytes: too few to cut k into parts, so that sums stay in order
KEPT = 1024  # problems that are known at a time
# cuBLAS's own numbers: types, and attributes of what is described to it.
BF16, F32, COMPUTE_F32 = 14, 0, 68
TRANSPOSE_A, MOST_WORKSPACE, TILE, OPTIONS = 3, 1, 1, 5


class CublasError(Exception):
    """It refused, or there is none."""


class Kind(StrEnum):
    """What becomes of a product: it is stored, added to what is there, or gates and ups are made one."""

    STORE, ADD, GATED = "store", "add", "gated"


@dataclass(frozen=True, slots=True)
class Problem:
    m: int
    n: int
    k: int
    kind: Kind = Kind.STORE


@dataclass(frozen=True, slots=True)
class Choice:
    tile: int
    options: int


OURS = Choice(-1, -1)  # no algorithm of cuBLAS's: a kernel of our own is faster


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )

    @property
    def choice(self) -> Choice:
        values = []
        for attribute in (TILE, OPTIONS):
            value, size = ctypes.c_uint32(), ctypes.c_size_t()
            _check(
                _library().cublasLtMatmulAlgoConfigGetAttribute(
                    ctypes.byref(self.algorithm), attribute, ctypes.byref(value), ctypes.c_size_t(4), ctypes.byref(size)
                )
            )
            values.append(value.value)
        return Choice(*values)


class Matmul:
    """One problem as cuBLAS sees it: matrices by columns, so w^T x^T, and what it proposes."""

    def __init__(self, problem: Problem) -> None:
        m, n, k = problem.m, problem.n, problem.k
        self._w, self._x, self._y = (_layout(*sizes) for sizes in ((k, n), (k, m), (n, m)))
        self._what = ctypes.c_void_p()
        _check(_library().cublasLtMatmulDescCreate(ctypes.byref(self._what), COMPUTE_F32, F32))
        _set(_library().cublasLtMatmulDescSetAttribute, self._what, TRANSPOSE_A, ctypes.c_int(1))
        self._one, self._kept = ctypes.c_float(1.0), ctypes.c_float(problem.kind is Kind.ADD)
        self._proposals = self._ask()
        self.choices = [proposal.choice for proposal in self._proposals]

    def __call__(self, x: Tensor, w: Tensor, out: Tensor, proposal: int = 0) -> Tensor:
        space = _workspace(out.device)
        y = ctypes.c_void_p(out.data_ptr())
        _check(
            _library().cublasLtMatmul(
                _handle(), self._what,
                ctypes.byref(self._one), ctypes.c_void_p(w.data_ptr()), self._w, ctypes.c_void_p(x.data_ptr()), self._x,
                ctypes.byref(self._kept), y, self._y, y, self._y,
                ctypes.byref(self._proposals[proposal].algorithm),
                ctypes.c_void_p(space.data_ptr()), ctypes.c_size_t(space.nbytes),
                ctypes.c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
            )
        )  # fmt: skip
        return out

    def _ask(self) -> Sequence[_Proposal]:
        limits, found = ctypes.c_void_p(), ctypes.c_int()
        proposals = (_Proposal * MOST)()
        _check(_library().cublasLtMatmulPreferenceCreate(ctypes.byref(limits)))
        try:
            _set(_library().cublasLtMatmulPreferenceSetAttribute, limits, MOST_WORKSPACE, ctypes.c_uint64(WORKSPACE))
            _check(
                _library().cublasLtMatmulAlgoGetHeuristic(
                    _handle(), self._what, self._w, self._x, self._y, self._y, limits, MOST, proposals,
                    ctypes.byref(found),
                )
            )  # fmt: skip
        finally:
            _library().cublasLtMatmulPreferenceDestroy(limits)
        if not found.value:
            raise CublasError("cuBLAS proposes nothing")
        return proposals[: found.value]

    def __del__(self) -> None:
        for layout in (self._w, self._x, self._y):
            _library().cublasLtMatrixLayoutDestroy(layout)
        _library().cublasLtMatmulDescDestroy(self._what)


class Choices(dict[Problem, Choice]):
    """What was measured."""

    def learn(self, known: Mapping[Problem, Choice]) -> None:
        self.update(known)
        _planned.cache_clear()


choices = Choices()


def supports(x: Tensor, w: Tensor) -> bool:
    return x.dtype is w.dtype is torch.bfloat16 and x.is_contiguous() and w.is_contiguous() and available()


def product(x: Tensor, w: Tensor, *, out: Tensor, kind: Kind = Kind.STORE) -> Tensor:
    """x [m, k], w [n, k], out [m, n], all bf16 and contiguous. Gates and ups are stored as they are: what makes them
    one is for the caller to launch."""
    m, k = x.shape
    assert w.shape[1] == k and out.shape == (m, w.shape[0]) and out.is_contiguous() and out.dtype is torch.bfloat16
    if m:
        matmul, proposal = _planned(Problem(m, w.shape[0], k, kind))
        matmul(x, w, out, proposal)
    return out


@cache
def available() -> bool:
    try:
        _handle()
    except CublasError:
        return False
    return True


def version() -> int:
    return int(_library().cublasLtGetVersion())


@lru_cache(KEPT)
def _planned(problem: Problem) -> tuple[Matmul, int]:
    matmul, choice = Matmul(problem), choices.get(problem)
    return matmul, matmul.choices.index(choice) if choice in matmul.choices else 0


def _layout(rows: int, columns: int) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
    _check(_library().cublasLtMatrixLayoutCreate(ctypes.byref(made), BF16, *sizes))
    return made


def _set(
    function: ctypes._NamedFuncPointer, of: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData[int]
) -> None:
    _check(function(of, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))))


def _check(status: int) -> None:
    if status:
        raise CublasError(f"cuBLAS answers {status}")


@cache
def _handle() -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _check(_library().cublasLtCreate(ctypes.byref(handle)))
    return handle


@cache
def _workspace(device: torch.device) -> Tensor:
    """Of all products: they follow each other."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


@cache
def _library() -> ctypes.CDLL:
    """The one that torch has loaded."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError as missing:
        raise CublasError(str(missing)) from missing
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library
