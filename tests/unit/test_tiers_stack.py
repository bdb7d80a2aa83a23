"""TierStack alone and with an engine, for any order of arrivals, steps, reads, writes, aborts and failures."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from sample_blocks import BLOCK_BYTES, BUFFER_BYTES, block, content, digest

from emberline.core.clock import ManualClock
from emberline.core.engine_config import SchedulerConfig
from emberline.core.events import Output, TierStats
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.fake import FakePipelinedRunner, FakeRunner
from emberline.kv.tiers.disk import DiskTier
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.stack import STUCK_READ_S, TierStack

NAMES = [digest(i) for i in range(8)]


class MemoryTier:
    """A fake lower tier with a dictionary, which fails on request."""

    name = "below"

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.broken = self.closed = False
        self.refreshed = 0

    def lookup(self, hashes: Sequence[bytes]) -> int:
        return next((i for i, d in enumerate(hashes) if d not in self.blocks), len(hashes))

    def load(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        for i, (name, room) in enumerate(zip(hashes, buffers, strict=True)):
            room[:] = b"\xee" * len(room)  # a failed load leaves garbage
            if self.broken or name not in self.blocks:
                return i
            room[:] = self.blocks[name]
        return len(hashes)

    def store(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        if not self.broken:
            self.blocks |= {name: bytes(b) for name, b in zip(hashes, buffers, strict=True)}
        return 0 if self.broken else len(hashes)

    def discard(self, hashes: Sequence[bytes]) -> None:
        for name in hashes:
            self.blocks.pop(name, None)

    def lookup_optimistic(self, hashes: Sequence[bytes]) -> int:
        return self.lookup(hashes)

    def close(self) -> None:
        self.closed = True

    def refresh(self) -> None:
        self.refreshed += 1

    def stats(self) -> TierStats:
        return TierStats(blocks=len(self.blocks))


def stack(buffers: int = 4, below: MemoryTier | None = None, clock: ManualClock | None = None) -> TierStack:
    host = HostTier(BLOCK_BYTES, buffers * BUFFER_BYTES)
    return TierStack(host, [below] if below is not None else [], clock=clock, threads=False)


def save(tiers: TierStack, names: list[bytes]) -> None:
    for name in names:
        room = tiers.reserve_host_buffer(name)
        if room is not None:
            room[:] = content(name)
            tiers.finish_save(name)


def test_prefix_spread_over_several_tiers() -> None:
    below = MemoryTier()
    tiers = stack(4, below)
    below.blocks = {n: content(n) for n in (NAMES[1], NAMES[3])}
    tiers.host.store([NAMES[0], NAMES[2]], [block(NAMES[0]), block(NAMES[2])])
    assert tiers.lookup(NAMES) == 4
    fetch = tiers.start_fetch(NAMES[:4])
    arrivals, ended = tiers.take_fetched(fetch)
    assert [a.block_hash for a in arrivals] == NAMES[:1] and not ended
    while tiers.load_next_block():
        pass
    more, ended = tiers.take_fetched(fetch)
    assert ended and [(a.block_hash, a.tier) for a in more] == list(
        zip(NAMES[1:4], ["below", "host", "below"], strict=True)
    )
    assert all(bytes(a.buffer) == content(a.block_hash) for a in [*arrivals, *more])
    assert tiers.host.num_pinned == 4
    for arrival in [*arrivals, *more]:
        tiers.release_fetched(arrival.block_hash)
    assert tiers.host.num_pinned == 0 and tiers.host.lookup(NAMES) == 4, "promoted"
    tiers.host.check_invariants()


def test_failed_load_ends_fetch_early() -> None:
    below = MemoryTier()
    tiers = stack(4, below)
    below.blocks = {n: content(n) for n in NAMES[:3]}
    fetch = tiers.start_fetch(NAMES[:3])
    tiers.load_next_block()
    below.discard(NAMES[1:2])  # after the lookup
    assert tiers.load_next_block() and not tiers.load_next_block()
    arrivals, ended = tiers.take_fetched(fetch)
    assert [a.block_hash for a in arrivals] == NAMES[:1] and ended
    tiers.release_fetched(NAMES[0])
    assert tiers.host.num_pinned == 0 and tiers.host.lookup(NAMES[1:2]) == 0
    tiers.host.check_invariants()


def test_full_writer_queue_drops_blocks() -> None:
    below = MemoryTier()
    tiers = stack(4, below)
    save(tiers, NAMES[:4])  # two fit the queue
    assert tiers.stats()["below"].dropped_blocks == 2
    assert tiers.host.num_pinned == 2
    assert tiers.write_next_block() and tiers.write_next_block() and not tiers.write_next_block()
    assert list(below.blocks) == NAMES[:2] and below.blocks[NAMES[0]] == content(NAMES[0])
    save(tiers, NAMES[:4])  # host memory has them; those missing in lower tiers are queued again
    while tiers.write_next_block():
        pass
    assert set(below.blocks) == set(NAMES[:4]) and tiers.host.num_pinned == 0


def test_store_is_dropped_without_free_buffers() -> None:
    tiers = stack(2)
    save(tiers, NAMES[:2])
    tiers.start_fetch(NAMES[:2])
    assert tiers.reserve_host_buffer(NAMES[2]) is None and tiers.stats()["host"].dropped_blocks == 1


def test_stuck_reader_gets_no_more_work() -> None:
    clock, began, go = ManualClock(), threading.Event(), threading.Event()

    class Slow(MemoryTier):
        def load(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
            began.set()
            go.wait(10)
            return super().load(hashes, buffers)

    below = Slow()
    tiers = stack(4, below, clock)
    below.blocks = {n: content(n) for n in NAMES}
    fetch = tiers.start_fetch(NAMES[:1])
    reader = threading.Thread(target=tiers.load_next_block)
    reader.start()
    assert began.wait(10) and tiers.lookup(NAMES[4:]) == 4
    clock.advance(2 * STUCK_READ_S)
    assert tiers.lookup(NAMES[4:]) == 0, "a second request does not wait for it too"
    tiers.cancel_fetch(fetch)
    go.set()
    reader.join(10)
    assert tiers.lookup(NAMES[4:]) == 4 and tiers.host.num_pinned == 0
    tiers.host.check_invariants()


def test_threads_write_and_close() -> None:
    below = MemoryTier()
    tiers = TierStack(HostTier(BLOCK_BYTES, 32 * BUFFER_BYTES), [below])
    save(tiers, NAMES)
    tiers.close(10.0)
    assert set(below.blocks) == set(NAMES) and tiers.host.num_pinned == 0 and below.closed
    assert not any(thread.is_alive() for thread in tiers._threads)


# -- with an engine above ----------------------------------------------------------------------------------------------


def engine(
    tiers: bool, blocks: int, runner: type[FakeRunner] = FakeRunner, buffers: int = 4, below: MemoryTier | None = None
) -> Engine:
    made, clock = runner(blocks, 8), ManualClock()
    config = SchedulerConfig(block_size=8, max_batch_tokens=24, max_running=4)
    if not tiers:
        return Engine(config, made, clock)
    host = HostTier(made.block_bytes, buffers * 4096)
    return Engine(config, made, clock, TierStack(host, [below] if below else [], clock=clock, threads=False))


def submission(name: str, length: int, start: int, out: int, n: int, salt: str) -> Submission:
    prompt = [(start * 100 + i) % 1000 for i in range(length)]
    params = SamplingParams(max_tokens=out, n=n, temperature=0.0)
    return Submission(name, prompt, params, salt=salt, timeout=1e9)


def texts(outputs: list[Output]) -> dict[tuple[str, int], list[int]]:
    folded: dict[tuple[str, int], list[int]] = {}
    for o in outputs:
        folded.setdefault((o.id, o.index), []).extend(o.tokens)
    return folded


ADD = st.tuples(
    st.just("add"), st.integers(1, 60), st.integers(0, 3), st.integers(1, 12), st.integers(1, 2), st.sampled_from("ab")
)
DO = st.tuples(
    st.sampled_from(["step", "read", "write", "abort", "break", "mend", "lose", "wait", "restart"]), st.integers(0, 12)
)


class Schedule:
    """Executes actions and checks the invariants."""

    def __init__(self, blocks: int, runner: type[FakeRunner], buffers: int, below: MemoryTier | None) -> None:
        self._make = lambda: engine(True, blocks, runner, buffers, below)
        self.below = below
        self.engine = self._make()
        self.submissions: list[Submission] = []
        self.aborted: set[str] = set()
        self.outputs: list[Output] = []

    @property
    def tiers(self) -> TierStack:
        assert self.engine.kv.tiers is not None
        return self.engine.kv.tiers

    def step(self) -> None:
        self.outputs += self.engine.step()
        self.engine.kv.check_invariants()
        self.tiers.host.check_invariants()

    def finish(self) -> None:
        for _ in range(10_000):
            self.step()
            self.tiers.load_next_block()
            if self.engine.idle:
                break
        assert self.engine.idle
        while self.tiers.write_next_block():
            pass
        assert self.tiers.host.num_pinned == 0
        assert self.engine.kv.num_free_blocks + self.engine.kv.num_cached_blocks == self.engine.kv.num_blocks

    def act(self, action: str, *numbers: int | str) -> None:
        clock, number = self.engine.clock, int(numbers[0])
        assert isinstance(clock, ManualClock)
        match action:
            case "add":
                self.submissions.append(submission(f"r{len(self.submissions)}", *numbers))  # type: ignore[arg-type]
                self.engine.add(self.submissions[-1])
            case "step":
                self.step()
            case "read":
                self.tiers.load_next_block()
            case "write":
                self.tiers.write_next_block()
            case "abort" if number < len(self.submissions):
                self.aborted.add(self.submissions[number].id)
                self.engine.abort(self.submissions[number].id)
            case "wait":
                clock.advance(number)
            case "restart":  # clears main cache and host memory
                self.finish()
                self.engine = self._make()
            case "break" | "mend" if self.below is not None:
                self.below.broken = action == "break"
            case "lose" if self.below is not None:
                self.below.discard(list(self.below.blocks)[number : number + 2])


@settings(max_examples=200, deadline=None)
@given(
    actions=st.lists(st.one_of(ADD, DO, DO), min_size=1, max_size=60),
    blocks=st.integers(12, 20),
    runner=st.sampled_from([FakeRunner, FakePipelinedRunner]),
    buffers=st.integers(2, 12),
    deep=st.booleans(),
)
def test_outputs_and_invariants_with_tiers(
    actions: list[tuple[str, int]], blocks: int, runner: type[FakeRunner], buffers: int, deep: bool
) -> None:
    schedule = Schedule(blocks, runner, buffers, MemoryTier() if deep else None)
    for action in actions:
        schedule.act(*action)
    schedule.finish()
    got = texts(schedule.outputs)
    for s in schedule.submissions:
        alone = engine(False, 100)
        alone.add(s)
        outputs: list[Output] = []
        while not alone.idle:
            outputs += alone.step()
        for key, tokens in texts(outputs).items():
            if s.id in schedule.aborted:
                assert tokens[: len(got[key])] == got[key]
            else:
                assert got[key] == tokens
    endings = Counter((o.id, o.index) for o in schedule.outputs if o.finish)
    assert endings == Counter((s.id, i) for s in schedule.submissions for i in range(s.params.n))


def test_tiers_are_used() -> None:
    """Prefixes load from both tiers and count as cached tokens: the test above would not notice otherwise."""
    schedule = Schedule(12, FakeRunner, 20, MemoryTier())

    def ask(start: int, salt: str = "a") -> int:
        schedule.outputs.clear()
        schedule.act("add", 41, start, 2, 1, salt)
        schedule.finish()
        return sum(o.cached_tokens for o in schedule.outputs)

    assert [ask(start) for start in (0, 1, 2, 0)] == [0, 0, 0, 40]
    hit = schedule.tiers.stats()["host"].hit_tokens
    assert hit > 0 and hit + schedule.engine.kv.hit_tokens == 40
    schedule.act("restart", 0)
    assert ask(0) == 40 and schedule.tiers.stats()["below"].hit_tokens == 40
    assert ask(0) == 40 and schedule.engine.kv.hit_tokens == 40
    assert ask(0, "b") == 0, "another tenant's"


def test_damaged_prefix_is_rewritten(tmp_path: Path) -> None:
    """One restart repairs a prefix, however many of its blocks are damaged."""
    prefix = [digest(i) for i in range(6)]

    def make_stack() -> tuple[TierStack, DiskTier]:
        disk = DiskTier(tmp_path, "m", BLOCK_BYTES, 1 << 20)
        return TierStack(HostTier(BLOCK_BYTES, 8 * BUFFER_BYTES), [disk], threads=False), disk

    def arrivals(tiers: TierStack) -> int:
        fetch = tiers.start_fetch(prefix)
        while tiers.load_next_block():
            pass
        arrived, ended = tiers.take_fetched(fetch)
        assert ended
        for arrival in arrived:
            tiers.release_fetched(arrival.block_hash)
        return len(arrived)

    def compute(tiers: TierStack) -> None:
        """Save blocks that did not load, as the engine does after computing them."""
        for name in prefix:
            if (room := tiers.reserve_host_buffer(name)) is not None:
                room[:] = block(name)
                tiers.finish_save(name)
            tiers.write_next_block()

    compute(make_stack()[0])
    for name in (prefix[1], prefix[3], prefix[4]):
        (path,) = tmp_path.glob(f"*/*/{name.hex()}")
        path.write_bytes(bytes(path.stat().st_size))
    tiers, disk = make_stack()
    assert arrivals(tiers) == 1 and disk.stats().damaged_blocks == 1
    compute(tiers)
    tiers, disk = make_stack()
    assert arrivals(tiers) == 6 and disk.stats().damaged_blocks == 0
