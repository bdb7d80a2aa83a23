"""product: y = x w^T by cuBLAS, by the algorithm that `choices` names.

cuBLAS proposes a few for every shape, its best guess first. That guess can be far off, since what the last wave of
tiles leaves idle depends on every size: of 896 rows and a Llama 8B's down projection the third proposal takes 150 us
where the first takes 173. `tuning` measures them, and says which it is to be: one with the first one's bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial

import torch
from torch import Tensor

MOST = 8  # proposals
WORKSPACE = 1 << 20  # bytes
ALIGNED = 256  # bytes, what cuBLAS takes for granted of addresses
OURS = -1  # in the place of a proposal: a kernel of our own is faster
# cuBLAS's own numbers: types, and attributes of what is described to it.
BF16, F32, COMPUTE_F32 = 14, 0, 68
TRANSPOSE_A, MOST_WORKSPACE, WAYS_OF_ADDING_PARTS = 3, 1, 3


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


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


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

    def __len__(self) -> int:
        """Proposals."""
        return len(self._proposals)

    def __call__(self, x: Tensor, w: Tensor, out: Tensor, proposal: int = 0) -> Tensor:
        stream = torch.cuda.current_stream(out.device).cuda_stream
        space = _workspace(out.device, stream)
        y = ctypes.c_void_p(out.data_ptr())
        _check(
            _library().cublasLtMatmul(
                _handle(), self._what,
                ctypes.byref(self._one), ctypes.c_void_p(w.data_ptr()), self._w, ctypes.c_void_p(x.data_ptr()), self._x,
                ctypes.byref(self._kept), y, self._y, y, self._y,
                ctypes.byref(self._proposals[proposal].algorithm),
                ctypes.c_void_p(space.data_ptr()), ctypes.c_size_t(space.nbytes),
                ctypes.c_void_p(stream),
            )
        )  # fmt: skip
        return out

    def _ask(self) -> Sequence[_Proposal]:
        limits, found = ctypes.c_void_p(), ctypes.c_int()
        proposals = (_Proposal * MOST)()
        _check(_library().cublasLtMatmulPreferenceCreate(ctypes.byref(limits)))
        try:
            limit = partial(_set, _library().cublasLtMatmulPreferenceSetAttribute, limits)
            limit(MOST_WORKSPACE, ctypes.c_uint64(WORKSPACE))
            limit(WAYS_OF_ADDING_PARTS, ctypes.c_uint32(0))  # none: k stays whole
            _check(
                _library().cublasLtMatmulAlgoGetHeuristic(
                    _handle(), self._what, self._w, self._x, self._y, self._y, limits, MOST, proposals,
                    ctypes.byref(found),
                )
            )  # fmt: skip
        finally:
            _library().cublasLtMatmulPreferenceDestroy(limits)
        good = [one for one in proposals[: found.value] if one.status == 0]
        if not good:
            raise CublasError("cuBLAS proposes nothing")
        return good


choices: dict[Problem, int] = {}  # what was measured: of a problem, which proposal is the fastest, or OURS


def chosen(x: Tensor, w: Tensor, kind: Kind, out: Tensor | None = None) -> bool:
    """Whether `product` serves: what nobody has measured is left to torch, and what does not lie as proposals want."""
    n, k = w.shape
    if choices.get(Problem(len(x), n, k, kind), OURS) == OURS:
        return False
    return all(map(_fits, (x, w) if out is None else (x, w, out)))


def product(x: Tensor, w: Tensor, *, out: Tensor, kind: Kind = Kind.STORE) -> Tensor:
    """x [m, k], w [n, k], out [m, n], as `chosen` wants them. Gates and ups are stored as they are: what makes them one
    is for the caller to launch."""
    n, k = w.shape
    problem = Problem(len(x), n, k, kind)
    assert x.shape[1] == k and out.shape == (problem.m, problem.n) and all(map(_fits, (x, w, out)))
    matmul, choice = _matmul(problem), choices.get(problem, 0)
    return matmul(x, w, out, choice if 0 <= choice < len(matmul) else 0)


def _fits(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bfloat16 and tensor.is_contiguous() and tensor.data_ptr() % ALIGNED == 0


@cache
def available() -> bool:
    try:
        _handle()
    except CublasError:
        return False
    return True


def version() -> int:
    return int(_library().cublasLtGetVersion())


@cache
def _matmul(problem: Problem) -> Matmul:
    return Matmul(problem)


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
def _workspace(device: torch.device, stream: int) -> Tensor:
    """Of a stream's products: they follow each other."""
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
