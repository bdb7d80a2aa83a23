"""Inputs and expected results of collectives on a GPU, and ranks with random delays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.comm.stream_ranks import StreamRanks, prepare_process

prepare_process()

SLOT_BYTES = 1 << 20
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8)


def make_ranks(size: int, *, seed: int = 0, **options: Any) -> StreamRanks:
    """Return ranks that start their calls in random order, and small slots, so that tensors need several kernels."""
    load_torch_kernels()
    load_collective_kernels()
    return StreamRanks(size, delays=random.Random(seed), **{"slot_bytes": SLOT_BYTES} | options)


@cache
def load_torch_kernels() -> None:
    """Run what tests run between collectives: loading a kernel might wait for one that waits for other ranks."""
    torch.cuda._sleep(1)
    for dtype in DTYPES:
        x = torch.zeros(4, 64, dtype=dtype, device="cuda")
        _ = x.clone(), x[:, 1:9].contiguous(), x.view(-1)[1:].clone(), x + x, x + 1, torch.cat([x, x], 1)
        count = (x != x).sum()
        count += count
    torch.cuda.synchronize()


@cache
def load_collective_kernels() -> None:
    """Run our kernels, and those of torch that follow them in a call, on one rank, which waits for no other."""
    ranks = StreamRanks(1, message_bytes=4096, senders=[0], slot_bytes=SLOT_BYTES)
    (comm,) = ranks.comms
    for dtype in DTYPES:
        comm.all_gather(torch.zeros(1, SLOT_BYTES // dtype.itemsize + 1, dtype=dtype, device="cuda"))  # in parts
    for columns in (1, 2, 4, 8):
        x = torch.zeros(4, columns, dtype=torch.bfloat16, device="cuda")
        comm.all_gather(x)
        comm.all_to_all(x, [4], [4])
    comm.broadcast(x, 0)
    comm.send(x, 0)
    comm.receive(x, 0)
    torch.cuda.synchronize()
    comm.check()
    ranks.close()


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Return what `all_reduce` must return, bit by bit."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Return random numbers of very different sizes, whose sum depends on the order."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, device="cuda", generator=generator)
    return (x * torch.randint(-6, 7, shape, device="cuda", generator=generator).exp2()).to(dtype)
