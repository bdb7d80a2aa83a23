"""Ranks that are threads: sums in the order of ranks, messages, and calls that end if a rank does not take part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emberline.kernels.comm.communicator import Communicator, RankLost
from emberline.kernels.comm.thread_group import ThreadCommunicator, ThreadGroup


def test_sums_and_parts() -> None:
    def run(comm: ThreadCommunicator) -> list[Tensor]:
        own: Communicator = comm
        found = []
        for turn in range(3):  # a rank that is ahead does not change what others still read
            x = torch.full((2, 3), 10.0**comm.rank * (turn + 1), dtype=torch.bfloat16)
            total = own.all_reduce(x)
            x.zero_()
            found += [total, own.all_gather(torch.tensor([[comm.rank, turn]]))]
        return found

    results = ThreadGroup(3).run(run)
    for found in results:
        assert [float(found[2 * turn][1, 2]) for turn in range(3)] == [111.0, 222.0, 332.0]  # rounded to bfloat16
        assert found[1].tolist() == [[0, 0, 1, 0, 2, 0]] and found[5].tolist() == [[0, 2, 1, 2, 2, 2]]
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))


def test_sums_are_computed_in_float32() -> None:
    values = [torch.tensor([256.0]), torch.tensor([0.5]), torch.tensor([0.5])]  # in bfloat16, 256 + 0.5 is 256
    (found, *_) = ThreadGroup(3).run(lambda comm: comm.all_reduce(values[comm.rank].bfloat16()))
    assert found.dtype is torch.bfloat16
    assert float(found) == float(torch.tensor(257.0).bfloat16())
    (found, *_) = ThreadGroup(2).run(lambda comm: comm.all_reduce(torch.tensor([256.0, 4.0][comm.rank]).bfloat16()))
    assert float(found) == 260.0


def test_rows_are_exchanged() -> None:
    sent = [[1, 0, 2], [0, 0, 0], [3, 1, 1]]  # by source, to each rank

    def run(comm: ThreadCommunicator) -> list[list[float]]:
        x = torch.arange(2.0 * sum(sent[comm.rank])).view(-1, 2) + 100 * comm.rank
        found = comm.all_to_all(x, sent[comm.rank], [each[comm.rank] for each in sent])
        x.zero_()
        return found.tolist()

    first, second, third = ThreadGroup(3).run(run)
    assert first == [[0, 1], [200, 201], [202, 203], [204, 205]]
    assert second == [[206, 207]] and third == [[2, 3], [4, 5], [208, 209]]


def test_ranks_with_other_counts_are_lost() -> None:
    def run(comm: ThreadCommunicator) -> None:
        own = r"rank 1 expects \[1, 2\] rows of the ranks, which send \[1, 1\]"
        with pytest.raises(RankLost, match=own if comm.rank else "had ended|, or ended"):
            comm.all_to_all(torch.ones(2), [1, 1], [1, 1 + comm.rank])

    ThreadGroup(2).run(run)


def test_messages() -> None:
    def run(comm: ThreadCommunicator) -> float:
        x = torch.full((2,), float(comm.rank))
        comm.send(x, 1 - comm.rank)
        x.zero_()
        comm.receive(x, 1 - comm.rank)
        return float(x.sum())

    assert ThreadGroup(2).run(run) == [2.0, 0.0]


def test_a_rank_that_does_not_take_part_is_lost() -> None:
    group = ThreadGroup(2, deadline_s=0.05)
    first = group.communicators[0]
    with pytest.raises(RankLost, match=r"all_reduce of \(1,\).* within 0.05 s"):
        first.all_reduce(torch.ones(1))
    with pytest.raises(RankLost, match="all_gather"):  # the group cannot be used any more
        first.all_gather(torch.ones(1))
    with pytest.raises(RankLost, match="rank 1 sent nothing to rank 0"):
        first.receive(torch.ones(1), 1)


def test_errors_of_a_rank_end_the_others() -> None:
    def fail(comm: ThreadCommunicator) -> None:
        if comm.rank == 1:
            raise ValueError("no memory")
        comm.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="no memory"):
        ThreadGroup(3).run(fail)


def test_different_calls_are_found() -> None:
    def run(comm: ThreadCommunicator) -> Tensor:
        return comm.all_reduce(torch.ones(2)) if comm.rank else comm.all_gather(torch.ones(2))

    with pytest.raises(RankLost, match=r"all_gather of \(2,\).*all_reduce of \(2,\)"):
        ThreadGroup(2).run(run)
    with pytest.raises(RankLost, match=r"all_reduce of \(3,\)"):
        ThreadGroup(2).run(lambda comm: comm.all_reduce(torch.ones(2 + comm.rank)))
