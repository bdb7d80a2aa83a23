"""Collectives of ranks that share one GPU, as streams or as processes: bits, graphs, and ranks that do not come.

`scripts/check-collectives` runs this file, also under compute-sanitizer.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
import torch
from collective_ranks import draw, make_ranks, sum_in_order
from torch import Tensor

from emberline.kernels import ops
from emberline.kernels.comm.communicator import CollectivesUnavailable, RankLost
from emberline.kernels.comm.connect import connect_device_group
from emberline.kernels.comm.gloo import GlooGroup
from emberline.kernels.comm.ipc import IpcGroup
from emberline.kernels.comm.rendezvous import Rendezvous
from emberline.kernels.comm.stream_ranks import StreamRanks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES = (1, 7, 8, 129, 4096, 4097, 100_003)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module", params=[1, 2, 3, 4, 5, 8], ids=lambda size: f"{size}ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[StreamRanks]:
    made = make_ranks(request.param, message_bytes=64 << 10, senders=range(request.param))
    yield made
    made.close()


@pytest.mark.parametrize("is_two_shot", [False, True], ids=["one-shot", "two-shot"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums(ranks: StreamRanks, dtype: torch.dtype, is_two_shot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels compute the same bits, also in tensors that are summed in several parts."""
    for comm in ranks.comms:
        monkeypatch.setattr(comm, "prefers_two_shot", lambda nbytes, ranks: is_two_shot)
    for count in (*SIZES, 700_001):
        parts = [draw(count, dtype=dtype, seed=rank) for rank in range(ranks.size)]
        expected, x = sum_in_order(parts), draw(count, dtype=dtype, seed=99)
        sums = ranks.run(lambda comm, parts=parts: comm.all_reduce(parts[comm.rank].clone()))
        assert all(torch.equal(each, expected) for each in sums), count
        added = ranks.run(lambda comm, x=x, parts=parts: comm.all_reduce_add(x.clone(), parts[comm.rank].clone()))
        assert all(torch.equal(each, x + expected) for each in added), count


def test_views_that_are_not_aligned(ranks: StreamRanks) -> None:
    parts = [draw(33, 9, seed=rank) for rank in range(ranks.size)]
    sums = ranks.run(lambda comm: comm.all_reduce(parts[comm.rank].view(-1)[1:]))
    assert all(torch.equal(each, sum_in_order([part.view(-1)[1:] for part in parts])) for each in sums)
    columns = ranks.run(lambda comm: comm.all_gather(parts[comm.rank][:, 2:7]))
    assert all(torch.equal(each, torch.cat([part[:, 2:7] for part in parts], 1)) for each in columns)


@pytest.mark.parametrize("columns", [100, 256, 576, 4096, 5120, 16384])
def test_norms(ranks: StreamRanks, columns: int) -> None:
    """The kernel with the norm computes the bits of the sum, the residual and Triton's norm."""
    weight = torch.rand(columns, device="cuda") + 0.5
    cases = [(1, torch.bfloat16), (5, torch.float16), (31, torch.bfloat16)]
    for rows, dtype in [*cases, (3, torch.float32)] if columns == 4096 else cases:
        parts = [draw(rows, columns, dtype=dtype, seed=rank) for rank in range(ranks.size)]
        x = draw(rows, columns, dtype=dtype, seed=99)
        expected_x = x + sum_in_order(parts)
        expected = ops.rms_norm(expected_x, weight, 1e-5, torch.empty_like(x))
        own = [x.clone() for _ in parts]
        found = ranks.run(
            lambda comm, own=own, parts=parts: comm.all_reduce_add_norm(
                own[comm.rank], parts[comm.rank].clone(), weight, 1e-5
            )
        )
        assert all(torch.equal(each, expected_x) for each in own), (rows, dtype)
        assert all(torch.equal(each, expected) for each in found), (rows, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8], ids=str)
def test_copies(ranks: StreamRanks, dtype: torch.dtype) -> None:
    size = ranks.size
    for rows, columns in ((0, 5), (1, 1), (3, 7), (65, 48), (7, 16_001), (1, 400_001)):
        parts = [draw(rows, columns, seed=rank).mul(9).to(dtype) for rank in range(size)]
        gathered = ranks.run(lambda comm, parts=parts: comm.all_gather(parts[comm.rank]))
        assert all(torch.equal(each, torch.cat(parts, 1)) for each in gathered), (rows, columns)
        source = rows % size
        copies = ranks.run(lambda comm, parts=parts, source=source: comm.broadcast(parts[comm.rank].clone(), source))
        assert all(torch.equal(each, parts[source]) for each in copies), (rows, columns)


def test_exchanged_rows(ranks: StreamRanks) -> None:
    """Numbers of rows differ between ranks, and some parts need several rounds."""
    size = ranks.size
    for scale, columns in ((0, 8), (3, 7), (40, 64), (300, 2048)):
        counts = [[(7 * a + 3 * b) % 5 * scale for b in range(size)] for a in range(size)]
        parts = [draw(sum(counts[rank]), columns, seed=rank) for rank in range(size)]
        split = [part.split(count) for part, count in zip(parts, counts, strict=True)]

        def exchange(comm: IpcGroup, parts: list[Tensor] = parts, counts: list[list[int]] = counts) -> Tensor:
            return comm.all_to_all(parts[comm.rank], counts[comm.rank], [each[comm.rank] for each in counts])

        for rank, found in enumerate(ranks.run(exchange)):
            assert torch.equal(found, torch.cat([each[rank] for each in split])), (scale, rank)


def test_messages(ranks: StreamRanks) -> None:
    """A message to the next rank, of one kernel and of several; the inbox has room for two."""
    if ranks.size == 1:
        return
    for count in (1, 1000, 32_768, 200_001):
        parts = [draw(count, seed=rank) for rank in range(ranks.size)]

        def pass_on(comm: IpcGroup, parts: list[Tensor] = parts) -> Tensor:
            x = torch.empty_like(parts[0])
            if comm.rank:
                comm.receive(x, comm.rank - 1)
            if comm.rank + 1 < comm.size:
                comm.send(parts[comm.rank], comm.rank + 1)
            return x

        found = ranks.run(pass_on)
        assert all(torch.equal(found[rank], parts[rank - 1]) for rank in range(1, ranks.size)), count


def run_mixed(comm: IpcGroup, x: Tensor, weight: Tensor) -> list[Tensor]:
    """Run several calls that depend on each other."""
    total = comm.all_reduce(x.clone())
    normed = comm.all_reduce_add_norm(total, x.clone(), weight, 1e-5)
    gathered = comm.all_gather(normed[:, :24].contiguous())
    return [total, normed, comm.broadcast(gathered + comm.rank, comm.size - 1)]


def make_inputs(size: int, rows: int = 4) -> tuple[list[Tensor], Tensor]:
    """Return the parts of all ranks and a weight, the same in all processes."""
    weight = torch.rand(1024, device="cuda", generator=torch.Generator("cuda").manual_seed(9))
    return [draw(rows, 1024, seed=rank) for rank in range(size)], weight


def expect_mixed(parts: list[Tensor], weight: Tensor) -> list[Tensor]:
    sums = sum_in_order(parts)
    total = sums + sums
    normed = ops.rms_norm(total, weight, 1e-5, torch.empty_like(total))
    return [total, normed, torch.cat([normed[:, :24]] * len(parts), 1) + (len(parts) - 1)]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_thousand_repetitions_with_delays(size: int) -> None:
    ranks = make_ranks(size, seed=size)
    parts, weight = make_inputs(size)
    scaled = [[part * (2.0**step) for part in parts] for step in range(3)]
    expected = [expect_mixed(each, weight) for each in scaled]
    errors = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(size)]

    def step_rank(comm: IpcGroup, step: int) -> None:
        for found, right in zip(run_mixed(comm, scaled[step][comm.rank], weight), expected[step], strict=True):
            errors[comm.rank] += (found != right).sum()

    torch.cuda.synchronize()
    for turn in range(250):  # of four calls
        ranks.start(lambda comm, turn=turn: step_rank(comm, turn % 3))
    torch.cuda.synchronize()
    for comm in ranks.comms:
        comm.check()
    assert [int(error) for error in errors] == [0] * size
    ranks.close()


@pytest.mark.parametrize("size", [2, 4])
def test_captured_graphs(size: int) -> None:
    """Graphs of two shapes are replayed in any order, with other calls between them."""
    ranks = make_ranks(size, seed=3)
    inputs = [make_inputs(size, rows) for rows in (1, 6)]
    ranks.run(lambda comm: [run_mixed(comm, parts[comm.rank], weight) for parts, weight in inputs])
    graphs = [
        ranks.capture(lambda comm, parts=parts, weight=weight: run_mixed(comm, parts[comm.rank], weight))
        for parts, weight in inputs
    ]
    for turn in range(60):
        which = turn * 7 % 5 % 2
        for parts, _ in inputs:
            for part in parts:
                part.mul_(-1)
        ranks.run(lambda comm, which=which: graphs[which][comm.rank][0].replay())
        expected = expect_mixed(*inputs[which])
        for rank in range(size):
            assert all(map(torch.equal, graphs[which][rank][1], expected)), (turn, rank)
        if turn % 3 == 0:
            sums = ranks.run(lambda comm: comm.all_reduce(inputs[0][0][comm.rank].clone()))
            assert torch.equal(sums[0], sum_in_order(inputs[0][0]))
    ranks.close()


def test_rank_that_does_not_come() -> None:
    ranks = make_ranks(3, timeout_s=0.5)
    x = draw(100)
    began = time.monotonic()
    for rank in (0, 2):
        with torch.cuda.stream(ranks.streams[rank]):
            ranks.comms[rank].all_reduce(x.clone())
            ranks.comms[rank].all_gather(x)  # does not wait again
    torch.cuda.synchronize()
    assert 0.4 < time.monotonic() - began < 3.0
    for rank in (0, 2):
        with pytest.raises(RankLost, match=rf"rank {rank} of 3: in call 1, rank . (did not take part|has given up)"):
            ranks.comms[rank].check()
        with pytest.raises(RankLost):
            ranks.comms[rank].all_reduce(x.clone())
    ranks.close()


def test_aborted_group() -> None:
    ranks = make_ranks(2, timeout_s=60.0)
    began = time.monotonic()
    with torch.cuda.stream(ranks.streams[0]):
        ranks.comms[0].all_reduce(draw(100))
    ranks.comms[0].abort()
    torch.cuda.synchronize()
    assert time.monotonic() - began < 5.0
    with pytest.raises(RankLost, match="rank 1 was waited for when the group was aborted"):
        ranks.comms[0].check()
    ranks.close()


def test_ranks_that_make_different_calls() -> None:
    ranks = make_ranks(2)
    parts = [draw(100), draw(101)]
    ranks.start(lambda comm: comm.all_reduce(parts[comm.rank]))
    torch.cuda.synchronize()
    with pytest.raises(RankLost, match=r"made another call, or one with another shape or dtype|has given up"):
        for comm in ranks.comms:
            comm.check()
    ranks.close()


def run_process(rank: int, size: int, store: str, results: SimpleQueue[object], last_rank_leaves: bool) -> None:
    """Run one rank of a group of processes that share the GPU, and put what is wrong into `results`."""
    try:
        fd = os.open(store, os.O_RDWR)
        host = GlooGroup(Rendezvous(fd), "ranks", rank, size, connect_timeout_s=60.0, timeout_s=60.0)
        device, timeout_s = torch.device("cuda", 0), 2.0 if last_rank_leaves else 30.0
        on_host, moved = draw(3, 5, seed=rank), torch.zeros(3, 5, device="cuda", dtype=torch.bfloat16)
        parts = [draw(3, 5, seed=each) for each in range(size)]
        assert torch.equal(host.all_reduce(on_host), sum_in_order(parts)) and not host.can_capture
        assert torch.equal(host.all_gather(on_host), torch.cat(parts, 1))
        with pytest.raises(CollectivesUnavailable, match=r"ranks share a GPU|has no NCCL"):
            connect_device_group(host, device, "nccl", timeout_s=timeout_s)
        if rank == 0:
            host.send(on_host, 1)
        if rank == 1:
            host.receive(moved, 0)
            assert torch.equal(moved, parts[0])
        options = {"timeout_s": timeout_s, "message_bytes": 4096, "senders": [rank - 1] if rank else []}
        comm = connect_device_group(host, device, "auto", **options)
        assert isinstance(comm, IpcGroup) and comm.nbytes > 16 << 20
        check_process(comm)
        if last_rank_leaves:
            check_absence(comm)
        comm.close()
        results.put((rank, ""))
    except BaseException:
        results.put((rank, traceback.format_exc()))


def check_process(comm: IpcGroup) -> None:
    parts, weight = make_inputs(comm.size)
    expected = expect_mixed(parts, weight)
    for _ in range(10):
        assert all(map(torch.equal, run_mixed(comm, parts[comm.rank], weight), expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run_mixed(comm, parts[comm.rank], weight)
    for _ in range(10):
        graph.replay()
        assert all(map(torch.equal, outputs, expected))
    if comm.rank:
        x = torch.empty_like(parts[0])
        comm.receive(x, comm.rank - 1)
        assert torch.equal(x, parts[comm.rank - 1])
    if comm.rank + 1 < comm.size:
        comm.send(parts[comm.rank], comm.rank + 1)
    torch.cuda.synchronize()
    comm.check()


def check_absence(comm: IpcGroup) -> None:
    if comm.rank == comm.size - 1:
        return
    comm.all_reduce(draw(10))
    torch.cuda.synchronize()
    with pytest.raises(RankLost):
        comm.check()


@pytest.mark.parametrize(("size", "last_rank_leaves"), [(2, False), (3, True)])
def test_processes(size: int, last_rank_leaves: bool, tmp_path: Path) -> None:
    """Ranks that are processes map each other's memory. The GPU runs them in turns."""
    store, context = tmp_path / "store", multiprocessing.get_context("spawn")
    store.touch()
    results = context.SimpleQueue()
    arguments = [(rank, size, str(store), results, last_rank_leaves) for rank in range(size)]
    processes = [context.Process(target=run_process, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    late = [process.is_alive() for process in processes]
    for process in processes:
        process.kill()
    assert not any(late)
    found = dict(results.get() for _ in processes)
    assert found == dict.fromkeys(range(size), "")
