"""Plans on their way to other ranks: what is decoded equals what was encoded, and the ring loses nothing."""

from __future__ import annotations

import copy
import os
import random
import threading
from collections.abc import Callable

import pytest
from msgspec import msgpack

from emberline.core.plan import BlockCopy, StateWork, WorkItem
from emberline.engine.ranks.copy_codec import decode_copies, encode_copies, is_copies
from emberline.engine.ranks.group_memory import PLAN_BYTES, GroupMemory
from emberline.engine.ranks.host_buffers import HostBuffers
from emberline.engine.ranks.plan_ring import MAX_PIECE_BYTES, PlanReader, PlanWriter
from emberline.engine.ranks.work_codec import WorkDecoder, WorkEncoder
from emberline.kernels.comm.communicator import RankLost


def normalise(item: WorkItem) -> tuple[object, ...]:
    tables = [list(table) for table in item.window_blocks]
    fields = item.samples, item.prompt_logprobs, item.num_draft, item.num_propose, item.max_shift, item.state
    return item.start, list(item.tokens), list(item.blocks), *fields, tables, item.dp_rank


class RandomWork:
    """Requests that come, continue, are preempted, wait and end, in random steps."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.open: dict[str, WorkItem] = {}
        self.count = 0

    def next_step(self) -> list[WorkItem]:
        pick = self.random
        for _ in range(pick.randrange(3)):
            self.count += 1
            self.open[f"r{self.count}"] = WorkItem(
                f"r{self.count}", 0, (), [], samples=False, dp_rank=pick.randrange(3)
            )
        for name in list(self.open):
            if pick.random() < 0.1:
                del self.open[name]
        for item in self.open.values():
            self.advance(item)
        work = [item for item in self.open.values() if pick.random() < 0.9]
        return copy.deepcopy(work if pick.random() < 0.8 else work[::-1])

    def advance(self, item: WorkItem) -> None:
        pick = self.random
        blocks = list(item.blocks)
        if pick.random() < 0.1:
            item.preemptions, blocks, item.dp_rank = item.preemptions + 1, [], pick.randrange(3)
        item.start += len(item.tokens)
        item.tokens = [pick.randrange(1 << 17) for _ in range(pick.choice((1, 1, 1, 5)))]
        item.blocks = [*blocks, *(pick.randrange(1 << 20) for _ in range(pick.randrange(3)))]
        item.samples, item.prompt_logprobs = pick.random() < 0.8, pick.random() < 0.1
        item.num_draft = pick.choice((0, 0, 0, 2))
        item.num_propose, item.max_shift = pick.choice((0, 0, 3)), pick.choice((0, 0, 0, 2))
        item.state = pick.choice((None, StateWork(3, load_from=4, save_to=1, save_end=9)))
        item.window_blocks = pick.choice(((), ([0, 0, 7], [5]), ([0], [0])))


@pytest.mark.parametrize("num_plans", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_decoded_work_equals_encoded_work(seed: int, num_plans: int) -> None:
    source, encoder, decoders = RandomWork(seed), WorkEncoder(num_plans), [WorkDecoder(num_plans) for _ in range(2)]
    for _ in range(40):
        work = source.next_step()
        message = encoder.encode(work, [1, 2])
        for decoder in decoders:
            found = decoder.decode(message)
            assert found.cleared == [1, 2]
            assert [normalise(item) for item in found.fill_items()] == [normalise(item) for item in work]


def test_requests_of_alternating_steps_are_encoded_once() -> None:
    """With two stages, the requests of one step continue in the step after the next."""
    halves = [[WorkItem(f"{half}-{i}", 50, (7,), list(range(900)), samples=True) for i in range(4)] for half in "ab"]
    encoder, decoder = WorkEncoder(2), WorkDecoder(2)
    sizes = []
    for step in range(6):
        work = halves[step % 2]
        sizes.append(len(message := encoder.encode(work)))
        assert [normalise(item) for item in decoder.decode(message).fill_items()] == [normalise(item) for item in work]
    assert min(sizes[:2]) > 4 * 900 and max(sizes[2:]) < 100


@pytest.mark.parametrize("num_plans", [1, 2])
def test_id_of_an_ended_request_may_be_used_again(num_plans: int) -> None:
    encoder, decoder = WorkEncoder(num_plans), WorkDecoder(num_plans)
    for first in (10, 20, 30, 40):
        encoder.forget(["a", "never seen"])
        for start in range(3):
            work = [WorkItem("a", start, (5,), list(range(first, first + start + 2)), samples=True)]
            work += [WorkItem("b", first + start, (6,), [1, 2], samples=True)] if start != 1 else []
            found = decoder.decode(encoder.encode(work)).fill_items()
            assert [normalise(item) for item in found] == [normalise(item) for item in work]


def test_copies_of_blocks() -> None:
    """Ranks that map the same memory find the same buffers, and no message with work looks like one with copies."""
    memory = GroupMemory.create(2)
    ours = HostBuffers.allocate(memory, 4096, 5)
    theirs = HostBuffers(memory, ours.area)
    saves = [BlockCopy(7, b"a", ours.find(4), 2), BlockCopy(1 << 40, b"b", ours.find(0), dp_rank=3)]
    loads = [BlockCopy(3, b"c", ours.find(2), 1)]
    message = encode_copies(saves, loads, ours.number)
    assert is_copies(message) and not is_copies(WorkEncoder().encode([])) and not is_copies(msgpack.encode("prepare"))
    for sent, got in zip((saves, loads), decode_copies(message, theirs.find), strict=True):
        places = [[(each.block, each.group, each.dp_rank) for each in copies] for copies in (got, sent)]
        assert places[0] == places[1]
        for one, same in zip(sent, got, strict=True):
            one.buffer[:2] = one.block.to_bytes(8, "little")[:2]
            assert same.buffer == one.buffer and len(same.buffer) == 4096
    memory.close()


class Ring:
    """A writer and two readers in one process."""

    def __init__(self, timeout_s: float = 10.0, check: Callable[[], None] = lambda: None) -> None:
        self.memory = GroupMemory.create(3)
        pipes = {rank: os.pipe() for rank in (0, 2)}
        self.read_fds = {rank: pipe[0] for rank, pipe in pipes.items()}
        write_fds = {rank: pipe[1] for rank, pipe in pipes.items()}
        self.writer = PlanWriter(self.memory, write_fds, timeout_s=timeout_s, check=check)
        self.readers = [PlanReader(self.memory, rank, fd) for rank, fd in self.read_fds.items()]


def test_ring_delivers_every_plan_to_every_reader() -> None:
    """The plans are several times as large as the ring, and some of them larger than a piece."""
    ring, pick = Ring(), random.Random(1)
    sizes = [
        1,
        100,
        MAX_PIECE_BYTES,
        MAX_PIECE_BYTES + 1,
        PLAN_BYTES + 5,
        *(pick.randrange(1, 1 << 20) for _ in range(30)),
    ]
    plans = [bytes([i]) * size for i, size in enumerate(sizes)]
    received: list[list[bytes]] = [[], []]

    def read(index: int) -> None:
        while (plan := ring.readers[index].receive()) is not None:
            received[index].append(plan)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for plan in plans:
        ring.writer.publish(plan)
    ring.writer.close()
    for thread in threads:
        thread.join()
    assert received == [plans, plans]


def test_full_ring_names_the_reader_that_does_not_read() -> None:
    ring = Ring(timeout_s=0.01)
    with pytest.raises(RankLost, match=r"rank 2 has read no plan for 0.01 s"):
        for _ in range(PLAN_BYTES // 4096 + 1):
            ring.writer.publish(b"plan")
            ring.readers[0].receive()


def test_full_ring_does_not_wait_for_a_reader_that_ended() -> None:
    def check() -> None:
        raise RankLost("rank 2 ended")

    ring = Ring(check=check)
    with pytest.raises(RankLost, match="rank 2 ended"):
        ring.writer.publish(bytes(2 * PLAN_BYTES))


def test_reader_that_ended_is_named() -> None:
    ring = Ring()
    os.close(ring.read_fds[2])
    with pytest.raises(RankLost, match="rank 2 has closed its pipe and cannot receive plans"):
        ring.writer.publish(b"plan")
