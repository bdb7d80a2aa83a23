"""Packed: a weight in 12 bits and a little, to the bit the bf16 that it was. `uw12.cuh` tells how it lies in memory.

Products read it as it is (`cuda.linear`, `cuda.wide`); for larger batches it is unpacked first, and embeddings are
gathered from it. All but `pack` may be captured into a graph.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import Kernel, Module

FILE = "uw12.cu"
VARIANTS = ("pack_units", "list_escapes", "unpack", "gather")
BLOCK, UNIT = 16, 64  # rows and k of a unit
UNIT_BYTES = 1536
STARTS_AT = 64  # in a header, after the scales of its rows
MOST_BITS = 13.5  # a weight, all included: beyond, plain bf16 is not much larger
MOST_STRIDE = 24 << 10  # headers of a tile's rows lie in shared memory, twice
PACK_THREADS, UNPACK_THREADS, GATHER_THREADS = 512, 256, 128
UNPACK_WIDTH = 256  # k that a CTA unpacks


@dataclass(frozen=True, slots=True)
class Packed:
    """w [n, k]. `planes`: [n / 64, k / 64, 4, 1536] bytes; `headers`: [n / 16, stride]."""

    planes: Tensor
    headers: Tensor
    n: int
    k: int

    @property
    def stride(self) -> int:
        return self.headers.shape[1]

    @property
    def nbytes(self) -> int:
        return self.planes.nbytes + self.headers.nbytes

    def rows(self, begin: int, end: int) -> Packed:
        """Some of them; multiples of 64."""
        assert begin % 64 == end % 64 == 0
        planes, headers = self.planes[begin // 64 : end // 64], self.headers[begin // BLOCK : end // BLOCK]
        return Packed(planes, headers, end - begin, self.k)


class Units(ctypes.Structure):
    """A packed weight as kernels take it, by value: `Units` of linear.cu."""

    _fields_ = (
        ("planes", ctypes.c_void_p),
        ("headers", ctypes.c_void_p),
        ("stride", ctypes.c_uint),
        ("blocks", ctypes.c_int),
    )

    @staticmethod
    def of(packed: Packed) -> Units:
        headers = packed.headers
        return Units(packed.planes.data_ptr(), headers.data_ptr(), headers.shape[1], packed.n // BLOCK)


def supports(n: int, k: int) -> bool:
    return n > 0 and n % 64 == 0 and k > 0 and k % UNIT == 0


def lists_at(k: int) -> int:
    """Where in a header the escapes begin."""
    return -(-(STARTS_AT + 2 * (k // UNIT + 1)) // 16) * 16


def stride_of(k: int, most: int) -> int:
    """The bytes of a header. `most`: the escapes of the 16 rows that have most."""
    return lists_at(k) + -(-4 * most // 16) * 16


def fits(n: int, k: int, most: int, most_bits: float = MOST_BITS) -> bool:
    """Whether it is worth packing, and kernels can read it."""
    stride = stride_of(k, most)
    size = n * k * 3 // 2 + n // BLOCK * stride
    return most < 1 << 16 and stride <= MOST_STRIDE and 8 * size < most_bits * n * k


def pack(weight: Tensor, *, most_bits: float = MOST_BITS) -> Packed | None:
    """None where it would take more bits a weight than that, or cannot be. Waits for the device. Scratch: n k / 128
    bytes."""
    n, k = weight.shape
    assert weight.dtype is torch.bfloat16 and weight.is_contiguous()
    if not supports(n, k):
        return None
    units, device = k // UNIT, weight.device
    planes = torch.empty(n // 64, units, 4, UNIT_BYTES, dtype=torch.uint8, device=device)
    bases = torch.empty(n, dtype=torch.uint8, device=device)
    counts = torch.empty(n // BLOCK, units, dtype=torch.int32, device=device)
    grid = (n // BLOCK, 1, 1)
    _kernel("pack_units")(grid, PACK_THREADS, (weight, planes, bases, counts, k))
    ends = counts.cumsum(1, dtype=torch.int32)
    most = int(ends[:, -1].max())
    if not fits(n, k, most, most_bits):
        return None
    headers = torch.zeros(n // BLOCK, stride_of(k, most), dtype=torch.uint8, device=device)
    _kernel("list_escapes")(grid, PACK_THREADS, (weight, bases, ends, headers, headers.shape[1], k))
    torch.cuda.current_stream().synchronize()  # kernels read weights before those before them have ended
    return Packed(planes, headers, n, k)


def unpack(packed: Packed, out: Tensor, *, pdl: bool = True) -> Tensor:
    """The rows as they were, bf16 [n, k], into `out`. A kernel before it may still read `out`: it is written when that
    has ended."""
    assert out.shape == (packed.n, packed.k) and out.dtype is torch.bfloat16 and out.is_contiguous()
    grid = (-(-packed.k // UNPACK_WIDTH), packed.n // 64, 1)
    arguments = (packed.planes, packed.headers, packed.stride, out, packed.k)
    _kernel("unpack")(grid, UNPACK_THREADS, arguments, pdl=pdl)
    return out


def gather(ids: Tensor, packed: Packed, out: Tensor, *, pdl: bool = True) -> Tensor:
    """The rows `ids` (int64, each below n) into `out`, bf16 [len(ids), k]."""
    assert ids.dtype is torch.int64 and ids.is_contiguous()
    assert out.shape == (len(ids), packed.k) and out.dtype is torch.bfloat16 and out.is_contiguous()
    if len(ids):
        arguments = (ids, packed.planes, packed.headers, packed.stride, out, packed.k)
        _kernel("gather")((len(ids), 1, 1), GATHER_THREADS, arguments, pdl=pdl)
    return out


@cache
def _kernel(name: str) -> Kernel:
    return _module().kernel(name)


@cache
def _module() -> Module:
    return Module(FILE, VARIANTS)
