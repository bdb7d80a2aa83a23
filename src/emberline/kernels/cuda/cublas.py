"""multiply: computes y = x w^T with the cuBLAS algorithm that the dict `choices` has for the shape.

cuBLAS proposes a few algorithms for every shape, its best guess first. The first is not always the fastest: for 896
rows and the down projection of Llama 8B, the third proposal takes 150 us and the first 173 us. `kernels/tuning.py`
measures the proposals that give the same bits as the first, and stores the fastest in `choices`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial

import torch
from torch import Tensor

MAX_PROPOSALS = 8  # algorithms that cuBLAS proposes for a shape, at most
WORKSPACE_BYTES = 1 << 20
ALIGNMENT_BYTES = 256  # alignment of addresses that the proposals assume
OWN_KERNEL = -1  # in place of a proposal's index: our own kernel is faster
# Constants of cublasLt.h: data types, and attributes of descriptors.
BF16, F32, COMPUTE_F32 = 14, 0, 68
ATTRIBUTE_TRANSPOSE_A, PREFERENCE_MAX_WORKSPACE, PREFERENCE_REDUCTION_SCHEMES = 3, 1, 3


class CublasError(Exception):
    """cuBLAS is missing or rejected a call."""


class ProductKind(StrEnum):
    """Whether a product is stored in the output, added to it, or followed by silu(gate) * up."""

    STORE, ADD, GATED = "store", "add", "gated"


@dataclass(frozen=True, slots=True)
class MatmulProblem:
    """The shape and the kind of a product of x [m, k] and w [n, k] transposed."""

    m: int
    n: int
    k: int
    kind: ProductKind = ProductKind.STORE


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Matmul:
    """A product described to cuBLAS in column-major order (w^T x^T), and the algorithms it proposes."""

    def __init__(self, problem: MatmulProblem) -> None:
        m, n, k = problem.m, problem.n, problem.k
        self._w, self._x, self._y = (_make_layout(*sizes) for sizes in ((k, n), (k, m), (n, m)))
        self._descriptor = ctypes.c_void_p()
        _check_status(_library().cublasLtMatmulDescCreate(ctypes.byref(self._descriptor), COMPUTE_F32, F32))
        _set_attribute(
            _library().cublasLtMatmulDescSetAttribute, self._descriptor, ATTRIBUTE_TRANSPOSE_A, ctypes.c_int(1)
        )
        self._alpha, self._beta = ctypes.c_float(1.0), ctypes.c_float(problem.kind is ProductKind.ADD)
        self._proposals = self._get_proposals()

    def __len__(self) -> int:
        """Return the number of algorithms that cuBLAS proposes."""
        return len(self._proposals)

    def __call__(self, x: Tensor, w: Tensor, out: Tensor, proposal: int = 0) -> Tensor:
        stream = torch.cuda.current_stream(out.device).cuda_stream
        space = _get_workspace(out.device, stream)
        y = ctypes.c_void_p(out.data_ptr())
        _check_status(
            _library().cublasLtMatmul(
                _cublas_handle(), self._descriptor,
                ctypes.byref(self._alpha),
                ctypes.c_void_p(w.data_ptr()), self._w, ctypes.c_void_p(x.data_ptr()), self._x,
                ctypes.byref(self._beta), y, self._y, y, self._y,
                ctypes.byref(self._proposals[proposal].algorithm),
                ctypes.c_void_p(space.data_ptr()), ctypes.c_size_t(space.nbytes),
                ctypes.c_void_p(stream),
            )
        )  # fmt: skip
        return out

    def _get_proposals(self) -> Sequence[_Proposal]:
        limits, found = ctypes.c_void_p(), ctypes.c_int()
        proposals = (_Proposal * MAX_PROPOSALS)()
        _check_status(_library().cublasLtMatmulPreferenceCreate(ctypes.byref(limits)))
        try:
            limit = partial(_set_attribute, _library().cublasLtMatmulPreferenceSetAttribute, limits)
            limit(PREFERENCE_MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES))
            limit(
                PREFERENCE_REDUCTION_SCHEMES, ctypes.c_uint32(0)
            )  # none: k is not split, so the order of sums is fixed
            _check_status(
                _library().cublasLtMatmulAlgoGetHeuristic(
                    _cublas_handle(), self._descriptor, self._w, self._x, self._y, self._y, limits, MAX_PROPOSALS,
                    proposals, ctypes.byref(found),
                )
            )  # fmt: skip
        finally:
            _library().cublasLtMatmulPreferenceDestroy(limits)
        usable = [candidate for candidate in proposals[: found.value] if candidate.status == 0]
        if not usable:
            raise CublasError("cuBLAS proposes no algorithm for this product")
        return usable


choices: dict[MatmulProblem, int] = {}  # index of the fastest proposal for each measured problem, or OWN_KERNEL


def can_use_tuned_algorithm(x: Tensor, w: Tensor, kind: ProductKind, out: Tensor | None = None) -> bool:
    """Return whether `multiply` can compute this product: tuned, with aligned and contiguous operands."""
    n, k = w.shape
    if choices.get(MatmulProblem(len(x), n, k, kind), OWN_KERNEL) == OWN_KERNEL:
        return False
    return all(map(_is_aligned_bf16, (x, w) if out is None else (x, w, out)))


def multiply(x: Tensor, w: Tensor, *, out: Tensor, kind: ProductKind = ProductKind.STORE) -> Tensor:
    """Write x [m, k] times w [n, k] transposed into out [m, n]; requires `can_use_tuned_algorithm`.

    With kind GATED, the gate and up columns are stored as they are: the caller computes silu(gate) * up afterwards.
    """
    n, k = w.shape
    problem = MatmulProblem(len(x), n, k, kind)
    assert x.shape[1] == k and out.shape == (problem.m, problem.n) and all(map(_is_aligned_bf16, (x, w, out)))
    matmul, choice = _get_matmul(problem), choices.get(problem, 0)
    return matmul(x, w, out, choice if 0 <= choice < len(matmul) else 0)


def _is_aligned_bf16(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bfloat16 and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT_BYTES == 0


@cache
def is_available() -> bool:
    try:
        _cublas_handle()
    except CublasError:
        return False
    return True


def library_version() -> int:
    return int(_library().cublasLtGetVersion())


@cache
def _get_matmul(problem: MatmulProblem) -> Matmul:
    return Matmul(problem)


def _make_layout(rows: int, columns: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
    _check_status(_library().cublasLtMatrixLayoutCreate(ctypes.byref(layout), BF16, *sizes))
    return layout


def _set_attribute(
    function: ctypes._NamedFuncPointer, descriptor: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData[int]
) -> None:
    _check_status(function(descriptor, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))))


def _check_status(status: int) -> None:
    if status:
        raise CublasError(f"a cuBLAS call failed with status {status}")


@cache
def _cublas_handle() -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _check_status(_library().cublasLtCreate(ctypes.byref(handle)))
    return handle


@cache
def _get_workspace(device: torch.device, stream: int) -> Tensor:
    """Return the cuBLAS workspace of a stream.

    Products on one stream run one after the other, so they share it.
    """
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@cache
def _library() -> ctypes.CDLL:
    """Return the cuBLAS library that torch has loaded."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError as missing:
        raise CublasError(str(missing)) from missing
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library
