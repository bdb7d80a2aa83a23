"""IpcGroup on a CPU: how it connects, divides tensors and launches kernels, which are compiled for the CPU here."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_kernels import compile_emulated
from torch import Tensor

from emberline.kernels.comm import ipc as ipc_group
from emberline.kernels.comm.communicator import CollectivesUnavailable, Communicator, RankLost
from emberline.kernels.comm.connect import connect_device_group
from emberline.kernels.comm.ipc import IpcGroup
from emberline.kernels.comm.thread_group import ThreadCommunicator, ThreadGroup
from emberline.kernels.cuda import collectives, driver, ipc
from emberline.kernels.cuda.driver import CudaDriverError, CudaKernel

RANKS, MAX_THREADS, DEVICE = 3, 8, torch.device("cuda", 0)
NORM_COLUMNS = 256


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("library")
    return ctypes.CDLL(str(compile_emulated(folder, "kernel_library.cpp", ["-O0", "-shared", "-fPIC"])))


class HostMemory:
    """Stands for AllocatedMemory."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = torch.zeros(size + 16, dtype=torch.uint8)
        self.address = -(-self.bytes.data_ptr() // 16) * 16

    def export(self) -> bytes:
        return bytes(64)

    def close(self) -> None:
        self.bytes = torch.empty(0)


@pytest.fixture(autouse=True)
def emulated(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def launch(kernel: CudaKernel, grid: tuple[int, int, int], threads: int, arguments: Any, **_: Any) -> None:
        values = [driver._to_c_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        threads = threads if kernel._name.startswith("reduce_add_norm") else MAX_THREADS
        assert library.launch_kernel(kernel._name.encode(), grid[0], threads, pointers) == 0, kernel._name

    zeros = torch.zeros
    monkeypatch.setattr(CudaKernel, "__call__", launch)
    monkeypatch.setattr(collectives, "load_kernels", lambda size: None)
    monkeypatch.setattr(collectives, "has_norm_order", lambda device: True)
    monkeypatch.setattr(ipc, "AllocatedMemory", HostMemory)
    monkeypatch.setattr(ipc, "get_device_uuid", lambda index: b"gpu")
    monkeypatch.setattr(ipc, "can_access_peer", lambda index, uuid: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(ipc_group.torch, "zeros", lambda *shape, pin_memory=False, **options: zeros(*shape, **options))
    yield


def run(function: Any, size: int = RANKS, **options: Any) -> list[Any]:
    """Return the results of the function on all ranks, which are threads."""
    defaults = {"timeout_s": 20.0, "slot_bytes": 1024, "message_bytes": 256, "max_blocks": 2}

    def run_rank(host: ThreadCommunicator) -> Any:
        senders = [rank for rank in range(size) if rank != host.rank]
        comm = IpcGroup(host, DEVICE, senders=senders, **defaults | options)
        host.all_gather(torch.zeros(1))  # all are connected
        try:
            return function(comm)
        finally:
            host.all_gather(torch.zeros(1))  # no rank uses the others' memory any more
            comm.close()

    return ThreadGroup(size).run(run_rank)


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sum_in_order(parts: list[Tensor]) -> Tensor:
    return (parts[0].float() + parts[1].float() + parts[2].float()).to(parts[0].dtype)


def test_struct_of_the_group(library: ctypes.CDLL) -> None:
    assert library.count_group_bytes() == ctypes.sizeof(collectives.Group)


@pytest.mark.parametrize("is_two_shot", [False, True])
def test_sums(is_two_shot: bool) -> None:
    """Also of tensors that are larger than a slot, not contiguous, or not aligned."""
    parts = [draw(41, 29, seed=rank) for rank in range(RANKS)]
    x, views = draw(41, 29, seed=9), [part.view(-1)[1:] for part in parts]

    def call(comm: IpcGroup) -> list[Tensor]:
        comm.prefers_two_shot = lambda nbytes, ranks: is_two_shot
        own = parts[comm.rank]
        transposed = comm.all_reduce(own.t())
        return [
            comm.all_reduce(own.clone()),
            comm.all_reduce_add(x.clone(), own),
            transposed,
            comm.all_reduce(views[comm.rank]),
        ]

    total = sum_in_order(parts)
    expected = [total, x + total, total.t(), sum_in_order(views)]
    for found in run(call):
        assert all(map(torch.equal, found, expected))


def test_norm() -> None:
    parts, weight = [draw(3, NORM_COLUMNS, seed=rank) for rank in range(RANKS)], torch.rand(NORM_COLUMNS) + 0.5
    x = draw(3, NORM_COLUMNS, seed=9)

    def call(comm: IpcGroup) -> tuple[Tensor, Tensor]:
        own = x.clone()
        return comm.all_reduce_add_norm(own, parts[comm.rank], weight, 1e-5), own

    added = x + sum_in_order(parts)
    expected = torch.nn.functional.rms_norm(added.float(), (NORM_COLUMNS,), eps=1e-5) * weight
    for normed, own in run(call, slot_bytes=4096):
        assert torch.equal(own, added)
        assert (normed.float() - expected).abs().max() < 0.05 and normed.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_copies(dtype: torch.dtype) -> None:
    for rows, columns in ((0, 3), (1, 1), (5, 7), (3, 16), (2, 900)):
        parts = [draw(rows, columns, seed=rank).mul(50).to(dtype) for rank in range(RANKS)]

        def call(comm: IpcGroup, parts: list[Tensor] = parts) -> tuple[Tensor, Tensor, Tensor]:
            moved = torch.empty_like(parts[0])
            comm.send(parts[comm.rank], (comm.rank + 1) % RANKS)
            comm.receive(moved, (comm.rank - 1) % RANKS)
            return comm.all_gather(parts[comm.rank]), comm.broadcast(parts[comm.rank].clone(), 1), moved

        # A sender waits until the message before the last was received: all parts of a message must fit.
        for rank, (gathered, copied, moved) in enumerate(run(call, message_bytes=16 << 10)):
            assert torch.equal(gathered, torch.cat(parts, 1)) and torch.equal(copied, parts[1])
            assert torch.equal(moved, parts[rank - 1])


def test_exchanged_rows() -> None:
    """Ranks send different numbers of rows, some of them more than fit into a slot."""
    counts = [[0, 3, 40], [7, 1, 0], [2, 0, 90]]
    for columns in (8, 3):
        parts = [draw(sum(counts[rank]), columns, seed=rank) for rank in range(RANKS)]
        split = [part.split(count) for part, count in zip(parts, counts, strict=True)]

        def call(comm: IpcGroup, parts: list[Tensor] = parts) -> Tensor:
            return comm.all_to_all(parts[comm.rank], counts[comm.rank], [each[comm.rank] for each in counts])

        for rank, found in enumerate(run(call)):
            assert torch.equal(found, torch.cat([each[rank] for each in split]))


def test_rank_that_does_not_come() -> None:
    def call(comm: IpcGroup) -> str:
        if comm.rank == 2:
            return ""
        comm.all_reduce(torch.ones(5))
        with pytest.raises(RankLost) as lost:
            comm.check()
        with pytest.raises(RankLost):
            comm.all_gather(torch.ones(5))
        return str(lost.value)

    messages = run(call, timeout_s=0.2)
    assert any("in call 1, rank 2 did not take part within 0.2 s" in message for message in messages[:2]), messages


def test_missing_inbox_is_refused() -> None:
    def call(comm: IpcGroup) -> None:
        with pytest.raises(ValueError, match="rank 0 has no memory for messages of rank 0"):
            comm.receive(torch.ones(1), comm.rank)

    run(call, size=1)


def connect(host: Communicator, collectives_setting: str) -> str:
    try:
        comm = connect_device_group(host, DEVICE, collectives_setting, timeout_s=1.0)
    except CollectivesUnavailable as error:
        return str(error)
    return type(comm).__name__


def test_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks choose the same way, even if only one of them knows that the others are impossible."""
    assert ThreadGroup(2).run(lambda host: connect(host, "auto")) == ["IpcGroup"] * 2
    assert ThreadGroup(2).run(lambda host: connect(host, "gloo")) == ["ThreadCommunicator"] * 2
    assert ThreadGroup(2).run(lambda host: connect(host, "nccl")) == ["torch on rank 0 has no NCCL"] * 2
    allocate = HostMemory

    def fail_once(size: int, device: torch.device) -> HostMemory:
        monkeypatch.setattr(ipc, "AllocatedMemory", allocate)
        raise CudaDriverError("out of memory")

    monkeypatch.setattr(ipc, "AllocatedMemory", fail_once)
    found = ThreadGroup(2, in_turns=True).run(lambda host: connect(host, "ipc"))
    assert len(set(found)) == 1 and "cannot share memory of its GPU: out of memory" in found[0]
    monkeypatch.setattr(ipc, "can_access_peer", lambda index, uuid: False)
    assert ThreadGroup(2).run(lambda host: connect(host, "auto")) == ["ThreadCommunicator"] * 2
    found = ThreadGroup(2).run(lambda host: connect(host, "ipc"))
    assert "cannot access" in found[0] and found[0] == found[1]
