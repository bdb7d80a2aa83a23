"""UW12Weight: a bf16 weight stored losslessly in a little over 12 bits per element.

`uw12.cuh` describes the layout.

The products of `cuda/linear.py` and `cuda/wide.py` read it directly. For products with more rows it is unpacked first.
`gather_rows` looks up embeddings in it. All functions except `pack` can be captured into a CUDA graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import CudaKernel, CudaModule

FILE = "uw12.cu"
VARIANTS = ("pack_units", "list_escapes", "unpack", "gather")
BLOCK_ROWS, UNIT_K = 16, 64  # rows and columns (k) of a unit
UNIT_BYTES = 1536
STARTS_OFFSET = 64  # bytes in a header before the start indices: the scales of its rows
MAX_BITS = 13.5  # per weight with headers; if more are needed, plain bf16 is not much larger
MAX_HEADER_BYTES = 24 << 10  # kernels hold the headers of a tile's rows twice in shared memory
PACK_THREADS, UNPACK_THREADS, GATHER_THREADS = 512, 256, 128
UNPACK_K = 256  # columns (k) that a CTA unpacks


@dataclass(frozen=True, slots=True)
class UW12Weight:
    """A weight [n, k] in the uw12 format.

    `planes` holds the 12-bit codes, as bytes [n / 64, k / 64, 4, 1536]. `headers` holds, for each block of 16 rows, the
    scales and the escapes (weights without a 12-bit code), as bytes [n / 16, header_stride].
    """

    planes: Tensor
    headers: Tensor
    n: int
    k: int

    @property
    def header_stride(self) -> int:
        return self.headers.shape[1]

    @property
    def nbytes(self) -> int:
        return self.planes.nbytes + self.headers.nbytes

    def slice_rows(self, begin: int, end: int) -> UW12Weight:
        """Return a view of the rows [begin, end), without a copy. Both must be multiples of 64."""
        assert begin % 64 == end % 64 == 0
        planes, headers = self.planes[begin // 64 : end // 64], self.headers[begin // BLOCK_ROWS : end // BLOCK_ROWS]
        return UW12Weight(planes, headers, end - begin, self.k)


class PackedUnits(ctypes.Structure):
    """A packed weight as a kernel parameter, passed by value: `PackedUnits` of linear.cu."""

    _fields_ = (
        ("planes", ctypes.c_void_p),
        ("headers", ctypes.c_void_p),
        ("stride", ctypes.c_uint),
        ("blocks", ctypes.c_int),
    )

    @staticmethod
    def from_weight(packed: UW12Weight) -> PackedUnits:
        headers = packed.headers
        return PackedUnits(packed.planes.data_ptr(), headers.data_ptr(), headers.shape[1], packed.n // BLOCK_ROWS)


def supports(n: int, k: int) -> bool:
    return n > 0 and n % 64 == 0 and k > 0 and k % UNIT_K == 0


def escapes_offset(k: int) -> int:
    """Return the byte offset in a header at which the escapes (weights without a 12-bit code) begin."""
    return -(-(STARTS_OFFSET + 2 * (k // UNIT_K + 1)) // 16) * 16


def header_bytes(k: int, max_escapes: int) -> int:
    """Return the size of the header of 16 rows, in bytes.

    `max_escapes` is the largest number of escapes (weights without a 12-bit code) in any block of 16 rows.
    """
    return escapes_offset(k) + -(-4 * max_escapes // 16) * 16


def is_worth_packing(n: int, k: int, max_escapes: int, max_bits: float = MAX_BITS) -> bool:
    """Return whether packing needs fewer than `max_bits` per weight, with headers that kernels support."""
    stride = header_bytes(k, max_escapes)
    size = n * k * 3 // 2 + n // BLOCK_ROWS * stride
    return max_escapes < 1 << 16 and stride <= MAX_HEADER_BYTES and 8 * size < max_bits * n * k


def pack(weight: Tensor, *, max_bits: float = MAX_BITS) -> UW12Weight | None:
    """Return the packed weight, or None if the shape is unsupported or packing does not save enough.

    The packed weight must need less than `max_bits` bits per element. This waits for the device, and needs n * k / 128
    bytes of scratch memory.
    """
    n, k = weight.shape
    return pack_pieces(n, k, lambda: (weight,), weight.device, max_bits=max_bits)


def pack_pieces(
    n: int, k: int, make_pieces: Callable[[], Iterable[Tensor]], device: torch.device, *, max_bits: float = MAX_BITS
) -> UW12Weight | None:
    """Do the same as `pack` for a weight whose rows come in pieces of a multiple of 64 rows.

    `make_pieces` returns the pieces in order; it is called twice.
    """
    if not supports(n, k):
        return None
    units = k // UNIT_K
    planes = torch.empty(n // 64, units, 4, UNIT_BYTES, dtype=torch.uint8, device=device)
    bases = torch.empty(n, dtype=torch.uint8, device=device)
    counts = torch.empty(n // BLOCK_ROWS, units, dtype=torch.int32, device=device)
    for piece, at in _iter_places(make_pieces()):
        own = planes[at // 64 :], bases[at:], counts[at // BLOCK_ROWS :]
        _get_kernel("pack_units")((len(piece) // BLOCK_ROWS, 1, 1), PACK_THREADS, (piece, *own, k))
    ends = counts.cumsum(1, dtype=torch.int32)
    max_escapes = int(ends[:, -1].max())
    if not is_worth_packing(n, k, max_escapes, max_bits):
        return None
    headers = torch.zeros(n // BLOCK_ROWS, header_bytes(k, max_escapes), dtype=torch.uint8, device=device)
    for piece, at in _iter_places(make_pieces()):
        own = bases[at:], ends[at // BLOCK_ROWS :], headers[at // BLOCK_ROWS :]
        grid = (len(piece) // BLOCK_ROWS, 1, 1)
        _get_kernel("list_escapes")(grid, PACK_THREADS, (piece, *own, headers.shape[1], k))
    torch.cuda.current_stream().synchronize()  # with PDL, kernels read weights before preceding ones end
    return UW12Weight(planes, headers, n, k)


def _iter_places(pieces: Iterable[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """Yield each piece with the number of rows before it, which must be a multiple of 64."""
    at = 0
    for piece in pieces:
        assert piece.dtype is torch.bfloat16 and piece.is_contiguous() and at % 64 == 0
        yield piece, at
        at += len(piece)


def unpack(packed: UW12Weight, out: Tensor, *, pdl: bool = True) -> Tensor:
    """Write the unpacked rows, bf16 [n, k], into `out` and return it.

    With `pdl`, writing starts only after the preceding kernel in the stream has ended, because it may still read `out`.
    """
    assert out.shape == (packed.n, packed.k) and out.dtype is torch.bfloat16 and out.is_contiguous()
    grid = (-(-packed.k // UNPACK_K), packed.n // 64, 1)
    arguments = (packed.planes, packed.headers, packed.header_stride, out, packed.k)
    _get_kernel("unpack")(grid, UNPACK_THREADS, arguments, pdl=pdl)
    return out


def gather_rows(ids: Tensor, packed: UW12Weight, out: Tensor, *, pdl: bool = True) -> Tensor:
    """Write the rows `ids` (int64, each below n) into `out`, bf16 [len(ids), k], and return it."""
    assert ids.dtype is torch.int64 and ids.is_contiguous()
    assert out.shape == (len(ids), packed.k) and out.dtype is torch.bfloat16 and out.is_contiguous()
    if len(ids):
        arguments = (ids, packed.planes, packed.headers, packed.header_stride, out, packed.k)
        _get_kernel("gather")((len(ids), 1, 1), GATHER_THREADS, arguments, pdl=pdl)
    return out


@cache
def _get_kernel(name: str) -> CudaKernel:
    return _get_module().kernel(name)


@cache
def _get_module() -> CudaModule:
    return CudaModule(FILE, VARIANTS)


def list_modules() -> list[CudaModule]:
    return [_get_module()]
