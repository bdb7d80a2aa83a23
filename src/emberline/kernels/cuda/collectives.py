"""Launches of the collective kernels of `collectives.cu`, on torch's current stream.

`signature` is a hash of a call. A kernel gives up if another rank makes a call with a different signature.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import CudaKernel, CudaModule

FILE = "collectives.cu"
MAX_RANKS, MAX_BLOCKS, MAX_THREADS = 8, 32, 512  # as in barrier.cuh
HEADER_BYTES = 64 << 10  # at least the size of the kernels' struct Header
REPORT_WORDS = 2  # 64-bit words in host memory: what a kernel reports, and the host's request to stop
# What a kernel reports in the low 8 bits. Above them are the rank because of which it gave up, and the call.
TIMED_OUT, OTHER_CALL, STOPPED, ANOTHER_GAVE_UP = 1, 2, 3, 4

ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "float"}
UNITS = {16: "uint4", 4: "u32", 1: "u8"}  # types of memory units, by their bytes
NORM_DTYPES = (torch.bfloat16, torch.float16)
NORM_CHUNKS = (1, 2, 4)  # packs of 8 elements of a row that a thread may have

RANK_LIMITS = (2, 4, 8)  # the most ranks that a variant of a kernel sums


def _list_variants(rank_limits: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the kernels. Those that sum have a variant for each of `rank_limits`.

    A variant supports groups of at most that many ranks."""
    norms = [f"{ELEMENTS[dtype]}, {chunks}" for dtype in NORM_DTYPES for chunks in NORM_CHUNKS]
    return (
        *(f"reduce_{kind}_shot<{x}, {m}>" for m in rank_limits for kind in ("one", "two") for x in ELEMENTS.values()),
        *(f"reduce_add_norm<{norm}, {most}>" for most in rank_limits for norm in norms),
        *(f"{name}<{unit}>" for name in ("gather_rows", "exchange_parts") for unit in UNITS.values()),
        "broadcast",
        "send_message",
        "receive_message",
    )


VARIANTS = _list_variants(RANK_LIMITS)


class Group(ctypes.Structure):
    """The C struct `Group` of barrier.cuh: the number of this rank, and where the ranks' memory is."""

    _fields_ = (
        ("buffers", ctypes.c_uint64 * MAX_RANKS),
        ("peer_inboxes", ctypes.c_uint64 * MAX_RANKS),
        ("own_inboxes", ctypes.c_uint64 * MAX_RANKS),
        ("report", ctypes.c_uint64),
        ("data", ctypes.c_uint64),
        ("slot_bytes", ctypes.c_uint64),
        ("message_bytes", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("rank", ctypes.c_int),
        ("size", ctypes.c_int),
        ("can_overlap", ctypes.c_int),
        ("unused", ctypes.c_int),
    )


class _Counts(ctypes.Structure):
    _fields_ = (("sent", ctypes.c_int * MAX_RANKS), ("received", ctypes.c_int * MAX_RANKS))


def load_kernels(size: int) -> None:
    """Compile and load all kernels for a group of `size` ranks.

    Loading a kernel later might wait for a running kernel, which in turn waits for other ranks."""
    names = _list_variants([_limit_ranks(size)])
    modules = {_get_module(name.partition("<")[0], _limit_ranks(size)) for name in names}
    with ThreadPoolExecutor(len(modules), "nvrtc") as pool:  # the compiler releases the GIL
        list(pool.map(CudaModule.compile, modules))
    for name in names:
        _get_kernel(name, _limit_ranks(size)).load()


def _limit_ranks(size: int) -> int:
    return next(limit for limit in RANK_LIMITS if size <= limit)


def reduce(
    group: Group, x: Tensor, residual: Tensor | None, out: Tensor, signature: int, *, two_shot: bool, max_blocks: int
) -> None:
    """Write the sum of all ranks' x, or `residual` plus that sum, to `out`. All tensors are contiguous and aligned."""
    kind, packs = "two" if two_shot else "one", -(-x.nbytes // 16)
    _launch(
        group,
        f"reduce_{kind}_shot<{ELEMENTS[x.dtype]}, {_limit_ranks(group.size)}>",
        _count_blocks(packs // group.size if two_shot else packs, max_blocks),
        (x, residual, out, x.numel(), signature),
    )


def choose_norm_threads(columns: int) -> tuple[int, int]:
    """Return the threads of a CTA and the packs of 8 elements of each thread, as in the norm of triton/norm.py."""
    block = max(32, 1 << (columns - 1).bit_length())
    warps = min(max(block // 512, 1), 16)
    return 32 * warps, max(1, block // (32 * warps * 8))


def has_norm_order(device: torch.device) -> bool:
    """Return whether triton/norm.py adds squares in the order of `reduce_add_norm` on this GPU.

    From compute capability 10.0 on, Triton adds two squares with one instruction, in another order."""
    return torch.cuda.get_device_capability(device) < (10, 0)


def supports_norm(x: Tensor) -> bool:
    """Return whether `reduce_add_norm` computes the same bits for rows like those of x as triton/norm.py does."""
    columns = x.shape[1]
    return (
        x.dtype in NORM_DTYPES
        and columns % 16 == 0
        and columns >= 256
        and choose_norm_threads(columns)[1] in NORM_CHUNKS
    )


def reduce_add_norm(
    group: Group,
    partial: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    normed: Tensor,
    signature: int,
    max_blocks: int,
) -> None:
    """Add the sum of all ranks' `partial` to x, and write the RMS norm of x to `normed`."""
    (rows, columns), (threads, chunks) = x.shape, choose_norm_threads(x.shape[1])
    _launch(
        group,
        f"reduce_add_norm<{ELEMENTS[x.dtype]}, {chunks}, {_limit_ranks(group.size)}>",
        min(rows, max_blocks),
        (partial, x, weight, eps, normed, rows, columns, signature),
        threads,
    )


def gather_rows(group: Group, x: Tensor, out: Tensor, signature: int, max_blocks: int) -> None:
    """Write the rows of all ranks' x [rows, columns] to `out` [rows, ranks * columns]."""
    rows, row_bytes = len(x), x.nbytes // len(x)
    unit = _choose_unit(row_bytes)
    blocks = _count_blocks(x.nbytes // unit, max_blocks)
    _launch(group, f"gather_rows<{UNITS[unit]}>", blocks, (x, out, rows, row_bytes // unit, signature))


def broadcast(group: Group, x: Tensor, source: int, signature: int, max_blocks: int) -> None:
    """Overwrite x with the x of the rank `source`."""
    _launch(group, "broadcast", _count_blocks(-(-x.nbytes // 16), max_blocks), (x, x.nbytes, source, signature))


def exchange_rows(
    group: Group,
    x: Tensor,
    out: Tensor,
    row_bytes: int,
    sent: Sequence[int],
    received: Sequence[int],
    signature: int,
    blocks: int,
) -> None:
    """Send rows of x to all ranks, and write the rows that they sent to `out`.

    `sent`, `received`: rows to and from each rank. The number of blocks is the same on all ranks, which may exchange
    different numbers of rows.
    """
    unit = _choose_unit(row_bytes)
    counts = _Counts()
    counts.sent[: group.size] = [count * row_bytes // unit for count in sent]
    counts.received[: group.size] = [count * row_bytes // unit for count in received]
    _launch(group, f"exchange_parts<{UNITS[unit]}>", blocks, (x, out, counts, signature))


def send(group: Group, x: Tensor, to: int, signature: int, max_blocks: int) -> None:
    _launch(group, "send_message", _count_blocks(-(-x.nbytes // 16), max_blocks), (x, x.nbytes, to, signature))


def receive(group: Group, x: Tensor, source: int, signature: int, max_blocks: int) -> None:
    _launch(group, "receive_message", _count_blocks(-(-x.nbytes // 16), max_blocks), (x, x.nbytes, source, signature))


def _choose_unit(row_bytes: int) -> int:
    """Return the bytes of the largest memory unit that divides a row, which is the same on all ranks."""
    return next(unit for unit in UNITS if row_bytes % unit == 0)


def _count_blocks(units: int, max_blocks: int) -> int:
    """Return the number of CTAs of a launch, which is the same on all ranks."""
    return max(1, min(max_blocks, -(-units // MAX_THREADS)))


def _launch(group: Group, name: str, blocks: int, arguments: Sequence[object], threads: int = MAX_THREADS) -> None:
    kernel = _get_kernel(name, _limit_ranks(group.size))
    kernel((blocks, 1, 1), threads, (group, *arguments), pdl=True)  # type: ignore[arg-type]


@cache
def _get_kernel(name: str, rank_limit: int) -> CudaKernel:
    return _get_module(name.partition("<")[0], rank_limit).kernel(name)


@cache
def _get_module(function: str, rank_limit: int) -> CudaModule:
    """Return the module with all variants of a function for groups of at most `rank_limit` ranks."""
    return CudaModule(FILE, [name for name in _list_variants([rank_limit]) if name.partition("<")[0] == function])


def list_modules() -> list[CudaModule]:
    """Return the modules for groups of all sizes."""
    functions = {name.partition("<")[0] for name in VARIANTS}
    return [_get_module(function, limit) for limit in RANK_LIMITS for function in sorted(functions)]
