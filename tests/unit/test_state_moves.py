"""Recurrent states in tiers and between engines: whatever fails, every step starts from the right states."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.clock import ManualClock
from emberline.core.engine_config import SchedulerConfig
from emberline.core.events import Output, TierStats
from emberline.core.params import SamplingParams
from emberline.core.plan import BlockCopy, StepPlan, StepResult
from emberline.core.request import Request, Submission
from emberline.core.transfer_config import TransferConfig
from emberline.engine.block_event_log import BlockEventLog
from emberline.engine.engine import Engine
from emberline.engine.fake import FakeRunner
from emberline.engine.request_builder import RequestBuilder
from emberline.kv.request_hashes import RequestHasher
from emberline.kv.state_manager import StateKVManager
from emberline.kv.state_pages import StatePages
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.stack import TierStack
from emberline.kv.transfer.endpoint import TransferEndpoint
from emberline.kv.transfer.errors import PeerLost
from emberline.kv.transfer.local import LocalTransport, advertise_local
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.sender import Sender
from emberline.router.kvindex import KVIndex, KVIndexState
from emberline.router.prefix_block_map import BlockPosition
from emberline.router.prefixmap import PromptPrefix
from emberline.tokens.blockhash import hash_last_full_block, root_hash

BLOCK, PAGES = 8, 3
PAGE_BYTES = 8 * BLOCK


def states_after(tokens: Sequence[int]) -> list[bytes]:
    """Return the pages of the states after these tokens, each of which depends on all of them."""
    return [blake2b(array("q", [page, *tokens]).tobytes(), digest_size=PAGE_BYTES).digest() for page in range(PAGES)]


class FakeStateRunner(FakeRunner):
    """A runner whose states are hashes of all tokens before, so that a wrong copy or a stale page is noticed.

    The pages of a slot are different, and are kept apart."""

    def __init__(self, num_blocks: int, num_state_slots: int) -> None:
        super().__init__(num_blocks, BLOCK)
        self.num_state_slots, self.pages_per_slot = num_state_slots, PAGES
        self._pages = StatePages(num_blocks, PAGES)
        self._states = [[b"\xff" * PAGE_BYTES] * PAGES for _ in range(num_state_slots)]

    def run(self, plan: StepPlan) -> StepResult:
        for copy in plan.saves:
            if (place := self._pages.locate(copy.block)) is not None:
                copy.buffer[:PAGE_BYTES] = self._states[place[0]][place[1]]
        for copy in plan.loads:
            if (place := self._pages.locate(copy.block)) is not None:
                self._states[place[0]][place[1]] = bytes(copy.buffer[:PAGE_BYTES])
        items = [(work, work.state) for work in plan.work if work.state is not None]
        for _, state in items:
            if state.load_from is not None:
                self._states[state.slot] = list(self._states[state.load_from])
        for work, state in items:
            for page, block in enumerate(work.arrived_states):
                self._states[state.slot][page] = self._memory[self._slots_of_block(block)].tobytes()
            for page, block in enumerate(work.published_states):
                self._memory[self._slots_of_block(block)] = array("q", self._states[state.slot][page])
        saves, loads = self._without_pages(plan.saves), self._without_pages(plan.loads)
        result = super().run(replace(plan, saves=saves, loads=loads))
        for work, state in items:
            written = self._sequence(work.blocks, work.start + len(work.tokens))
            is_right = not work.start or self._states[state.slot] == states_after(written[: work.start])
            assert is_right, "not the states after the tokens before"
            self._states[state.slot] = states_after(written)
        for _, state in items:
            if state.save_to is not None:
                self._states[state.save_to] = list(self._states[state.slot])
        return result

    def _without_pages(self, copies: Sequence[BlockCopy]) -> list[BlockCopy]:
        return [copy for copy in copies if self._pages.locate(copy.block) is None]

    def _sequence(self, blocks: Sequence[int], length: int) -> list[int]:
        """Return the tokens of a request, which its blocks contain."""
        return [token for block in blocks for token in self._memory[self._slots_of_block(block)]][:length]


class FlakyTier:
    """A lower tier that loses the blocks whose number of calls is in `failures`, and leaves garbage there."""

    name = "below"

    def __init__(self, failures: Sequence[bool], *, is_certain: bool) -> None:
        self._blocks: dict[bytes, bytes] = {}
        self._failures = list(failures) * 1000
        self._is_certain = is_certain

    def lookup(self, hashes: Sequence[bytes]) -> int:
        return next((i for i, digest in enumerate(hashes) if digest not in self._blocks), len(hashes))

    def lookup_optimistic(self, hashes: Sequence[bytes]) -> int:
        return self.lookup(hashes) if self._is_certain else len(hashes)

    def load(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        (digest,), (buffer,) = hashes, buffers
        if self._failures.pop():
            self._blocks.pop(digest, None)
        if digest not in self._blocks:
            buffer[:] = b"\xee" * len(buffer)
            return 0
        buffer[:] = self._blocks[digest]
        return 1

    def store(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        if self._failures.pop():
            return 0
        self._blocks |= {digest: bytes(each) for digest, each in zip(hashes, buffers, strict=True)}
        return len(hashes)

    def discard(self, hashes: Sequence[bytes]) -> None:
        for digest in hashes:
            self._blocks.pop(digest, None)

    def refresh(self) -> None: ...

    def close(self) -> None: ...

    def stats(self) -> TierStats:
        return TierStats()


class PipelinedStateRunner(FakeStateRunner):
    """Runs steps in the order in which they are planned, as a device does, but returns results later."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        result = self.run(plan)
        return lambda: result


def make_engine(
    blocks: int,
    slots: int,
    tiers: TierStack | None = None,
    name: str = "",
    budget: int = 64,
    *,
    prefix_cache: bool = True,
    pipelined: bool = False,
) -> Engine:
    config = SchedulerConfig(
        block_size=BLOCK, max_batch_tokens=budget, max_running=6, max_context=400, prefix_cache=prefix_cache
    )
    runner, endpoint = (PipelinedStateRunner if pipelined else FakeStateRunner)(blocks, slots), None
    if name:
        region = runner.region()
        sender = Sender(region, name)
        advertise_local(sender, name)
        endpoint = TransferEndpoint(sender, Receiver(region, []), config=TransferConfig(name))
    return Engine(config, runner, None if name else ManualClock(), tiers, endpoint)


def manager_of(engine: Engine) -> StateKVManager:
    assert isinstance(engine.kv, StateKVManager)
    return engine.kv


def make_prompt(kind: int, length: int) -> list[int]:
    """Return a prompt that shares 80 tokens with all others, and all its tokens with those of the same kind."""
    return [*range(80), *(200 * kind + i % 190 for i in range(400))][:length]


@settings(max_examples=30, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 4),  # kind of prompt
            st.integers(60, 250),  # its length
            st.integers(1, 40),  # output tokens
            st.integers(0, 6),  # steps until the next one is added
            st.booleans(),  # whether an earlier one is aborted then
        ),
        min_size=3,
        max_size=12,
    ),
    blocks=st.integers(45, 120),
    slots=st.integers(1, 8),
    buffers=st.integers(8, 60),
    failures=st.lists(st.booleans(), min_size=1, max_size=9) | st.just([False]),
    is_certain=st.booleans(),
    reads=st.integers(1, 30),
    pipelined=st.booleans(),
)
def test_every_step_starts_from_its_states_whatever_tiers_lose(
    requests: Sequence[tuple[int, int, int, int, bool]],
    blocks: int,
    slots: int,
    buffers: int,
    failures: Sequence[bool],
    is_certain: bool,
    reads: int,
    pipelined: bool,
) -> None:
    host = HostTier(PAGE_BYTES, buffers * 4096)
    tiers = TierStack(host, [FlakyTier(failures, is_certain=is_certain)], threads=False)
    engine = make_engine(blocks, slots, tiers, pipelined=pipelined)
    finished: set[str] = set()

    def step() -> None:
        for output in engine.step():
            assert output.error is None
            finished.update([output.id] if output.finish else [])
        engine.kv.check_invariants()
        host.check_invariants()
        tiers.write_next_block()
        for _ in range(reads):
            tiers.load_next_block()

    for i, (kind, length, max_tokens, steps, aborts) in enumerate(requests):
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=i, ignore_eos=True)
        engine.add(Submission(f"r{i}", make_prompt(kind, length), params))
        for _ in range(steps):
            step()
        if aborts:
            engine.abort(f"r{i // 2}")
    for _ in range(6000):
        if engine.idle:
            break
        step()
    assert engine.idle and len(finished) == len(requests)
    states = manager_of(engine).states
    assert states.num_free + states.num_snapshots == slots and host.num_pinned <= len(tiers._writes)


def test_a_snapshot_that_left_its_slot_is_loaded_again() -> None:
    tiers = TierStack(HostTier(PAGE_BYTES, 400 * 4096), threads=False)
    engine = make_engine(100, 2, tiers)
    prompts = [[100 * kind + i for i in range(90)] for kind in range(3)]

    def cached(prompt: list[int]) -> int:
        name = f"r{engine.runner.steps}"  # type: ignore[attr-defined]
        outputs = run(engine, Submission(name, prompt, SamplingParams(max_tokens=1, temperature=0.0)))
        return sum(output.cached_tokens for output in outputs)

    assert [cached(prompt) for prompt in (*prompts, *prompts)] == [0, 0, 0, 88, 88, 88]
    last = hash_last_full_block(root_hash("fake"), prompts[0], BLOCK)
    assert last is not None and last[1] == 11
    tiers.host.discard(manager_of(engine)._pages.hashes(last[0])[1:2])
    assert cached(prompts[0]) == 0, "a page of its snapshot is missing"
    assert cached(prompts[1]) == 88


@settings(max_examples=50, deadline=None)
@given(
    length=st.integers(BLOCK, 120) | st.sampled_from(range(BLOCK, 120, BLOCK)),
    resumed=st.integers(0, 20),
    num_cached=st.integers(0, 120),
    p_blocks=st.integers(20, 60),
    d_blocks=st.integers(20, 60),
    slots=st.integers(1, 4),
    outcome=st.sampled_from(["arrives", "is lost", "is lost late", "is aborted", "has no thread"]),
    is_repeated=st.booleans(),
    prefix_cache=st.booleans(),
    pipelined=st.booleans(),
)
def test_a_handoff_moves_the_states_or_costs_only_computing(
    length: int,
    resumed: int,
    num_cached: int,
    p_blocks: int,
    d_blocks: int,
    slots: int,
    outcome: str,
    is_repeated: bool,
    prefix_cache: bool,
    pipelined: bool,
) -> None:
    options = {"prefix_cache": prefix_cache, "pipelined": pipelined}
    p, d = (make_engine(n, slots, None, name, 24, **options) for name, n in (("p", p_blocks), ("d", d_blocks)))
    receiver, pulls = d.transfer_endpoint.receiver, d.kv.pulls  # type: ignore[union-attr]
    assert pulls is not None
    receiver._transports = [LocalTransport([p.transfer_endpoint.sender])]  # type: ignore[union-attr]
    pull, delayed = receiver.pull, list[Callable[[], None]]()

    def failing_pull(*args: Any, **others: Any) -> Any:
        if outcome == "is lost late":
            pull(*args, **others)
            others["progress"].confirmed_blocks = others["progress"].complete = 0
        raise PeerLost("the sender is gone")

    def start_no_thread(work: Callable[[], None]) -> None:
        raise RuntimeError("no thread")

    if outcome.startswith("is lost"):
        receiver.pull = failing_pull  # type: ignore[method-assign]
    starts = {"has no thread": start_no_thread, "is aborted": delayed.append}
    pulls._start_thread = starts.get(outcome, lambda work: work())
    pulls._is_renewing = True  # no thread for renewals, which would wait
    params = SamplingParams(max_tokens=resumed + 12, temperature=1.0, seed=3, ignore_eos=True)
    submission = Submission("r", make_prompt(1, length), params)
    expected = tokens_of(run(make_engine(60, 4), submission))
    if num_cached:
        run(d, Submission("c", make_prompt(1, num_cached), replace(params, max_tokens=1)))
    moved = replace(submission, resumed=(tuple(expected[:resumed]),))
    for i in range(1 + is_repeated):
        p.transfer_endpoint.sender.stop()  # type: ignore[union-attr]
        outputs = run(p, replace(moved, id=f"p{i}", publish=True))
        tickets = [output.ticket for output in outputs if output.ticket]
    d.add(replace(moved, source=tickets[-1] if tickets else None))
    if outcome == "is aborted":
        d.step()
        d.abort("r")
        run(d)
        kept = d.kv.retained._quarantined
        blocks = {block for _, table in kept for block in table}
        assert all(blocks.issuperset(pull.target_blocks) for pull, _ in kept), "a pull writes to a free block"
        for work in delayed:
            work()
    else:
        assert tokens_of(run(d)) == expected[resumed:]
    for each in (p, d):
        each.transfer_endpoint.sender.stop()  # type: ignore[union-attr]
        run(each)
        each.step()
        each.kv.check_invariants()
        states = manager_of(each).states
        assert states.num_free + states.num_snapshots == slots
        assert each.kv.num_free_blocks + each.kv.num_cached_blocks == each.kv.num_blocks, "a block is lost"


def run(engine: Engine, *submissions: Submission) -> list[Output]:
    for submission in submissions:
        engine.add(submission)
    outputs, ends = list[Output](), time.monotonic() + 30
    while not engine.idle:
        assert time.monotonic() < ends
        outputs += engine.step()
        engine.kv.check_invariants()
    return outputs


def tokens_of(outputs: Sequence[Output]) -> list[int]:
    assert all(output.error is None for output in outputs)
    return [token for output in outputs for token in output.tokens]


def test_states_arrive_with_the_blocks_of_the_prompt() -> None:
    p, d = make_engine(60, 4, name="p"), make_engine(60, 4, name="d")
    d.transfer_endpoint.receiver._transports = [LocalTransport([p.transfer_endpoint.sender])]  # type: ignore[union-attr]
    submission = Submission("r", make_prompt(1, 100), SamplingParams(max_tokens=5, temperature=0.0))
    tickets = [output.ticket for output in run(p, replace(submission, publish=True)) if output.ticket]
    assert tickets[-1] is not None and len(tickets[-1]["blocks"]) == 12 + PAGES
    expected = tokens_of(run(make_engine(60, 4), submission))
    assert tokens_of(run(d, replace(submission, source=tickets[-1]))) == expected
    short = run(p, replace(submission, id="short", prompt=submission.prompt[:BLOCK], publish=True))
    assert [output.ticket["blocks"] for output in short if output.ticket] == [(), ()]  # none before its last token
    assert d.stats().prompt_tokens == 4 and d.stats().transfer.hit_tokens == 96  # type: ignore[union-attr]


@settings(max_examples=20, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 3), st.integers(60, 200), st.integers(1, 20)), min_size=1, max_size=8),
    blocks=st.integers(35, 90),
    slots=st.integers(1, 6),
    watched_from=st.integers(0, 3),
)
def test_the_router_knows_what_an_engine_can_skip(
    requests: Sequence[tuple[int, int, int]], blocks: int, slots: int, watched_from: int
) -> None:
    engine, log, index = make_engine(blocks, slots), BlockEventLog(["m"]), KVIndex(1000, 100)
    for i, (kind, length, max_tokens) in enumerate(requests):
        if i == min(watched_from, len(requests) - 1):
            engine.kv.track_prefix_changes()
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=i, ignore_eos=True)
        run(engine, Submission(f"r{i}", make_prompt(kind, length), params))
        if (changes := engine.kv.take_prefix_changes()) is not None:
            log.record("m", *changes)
        for batch in log.batches_after(*index.last_applied_batch("w")):
            index.apply_batch("w", batch)
    assert engine.kv.take_prefix_changes() is None
    assert index.state("w") is KVIndexState.EXACT
    for kind in range(1, 5):
        for length in (BLOCK, 79, 150, 200):
            request = make_request([*make_prompt(kind, length), 1])
            hashes = RequestHasher("fake", BLOCK, prefix_cache=True).shareable_hashes(request)
            prefixes = [PromptPrefix(digest, count) for count, digest in enumerate(hashes, 1)]  # a byte for each block
            for prefix in prefixes:
                index.prefix_blocks.record_prefix(prefix, BlockPosition(*prefix))
            found = index.cached_bytes_by_worker(prefixes, {}).get("w", 0)
            if found <= len(engine.kv._prefix.find_longest_prefix(hashes)):  # else an earlier block was evicted first
                assert found == len(engine.kv._shareable_hashes(request))


def make_request(tokens: list[int]) -> Request:
    submission = Submission("q", tokens, SamplingParams(max_tokens=1, temperature=0.0))
    return RequestBuilder(400, 1000, can_publish=False).build(submission, 0.0)[0]
