"""Pulls in any order of arrivals, steps, aborts and late writes: same tokens, one end per request, no lost block."""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.clock import ManualClock
from emberline.core.engine_config import SchedulerConfig
from emberline.core.events import Output
from emberline.core.handoff import PrefillResult
from emberline.core.params import SamplingParams
from emberline.core.plan import StepPlan, StepResult
from emberline.core.request import FinishReason, RequestStatus, Submission
from emberline.core.transfer_config import TransferConfig
from emberline.engine.engine import Engine
from emberline.engine.fake import FakePipelinedRunner, FakeRunner
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.stack import TierStack
from emberline.kv.transfer.endpoint import TransferEndpoint
from emberline.kv.transfer.errors import PeerLost, TicketEnded, TransferCancelled
from emberline.kv.transfer.lease import LeaseEndReason
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.progress import PullProgress
from emberline.kv.transfer.region import HostRegion
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.ticket import Ticket, compute_ticket_subject

BLOCK = 8


@dataclass
class OpenPull:
    """A running pull, whose thread waits until the test ends it."""

    ticket: Ticket
    into: Sequence[int]
    progress: PullProgress
    first: int
    prompt: list[int]
    token: int
    over: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None


class ManualSource:
    """A fake receiver whose pulls progress only by calls of the test."""

    def __init__(self, region: HostRegion) -> None:
        self.region = region
        self.prompts: dict[str, tuple[list[int], int]] = {}  # prompt and first output token, by ticket
        self.open: list[OpenPull] = []
        self.lease_ends: Counter[str] = Counter()
        self.connected_transports, self.failed_transports = Counter[str](), Counter[str]()
        self.started = threading.Semaphore(0)

    def pull(
        self, ticket: Ticket, target_blocks: Sequence[int], deadline: float, *, progress: PullProgress, first_block: int
    ) -> PullProgress:
        open_pull = OpenPull(ticket, target_blocks, progress, first_block, *self.prompts[ticket.id])
        self.open.append(open_pull)
        self.started.release()
        open_pull.over.wait(60)
        if open_pull.failure is not None:
            raise open_pull.failure
        return progress

    def renew(self, ticket: Ticket, deadline: float) -> None: ...

    def acknowledge(self, ticket: Ticket, deadline: float) -> None:
        self.lease_ends["acknowledged"] += 1

    def release(self, ticket: Ticket, deadline: float) -> None:
        self.lease_ends["released"] += 1

    def write(self, open_pull: OpenPull, tokens: Sequence[int], first: int) -> None:
        """Write tokens into the blocks of a pull, as a transport does."""
        for i in range(first, len(tokens) // BLOCK):
            block = TransferPiece(0, 1, i, i + 1)
            data = array("q", tokens[i * BLOCK : (i + 1) * BLOCK]).tobytes()
            for view in self.region.piece_views(block, np.asarray(open_pull.into, np.int64)):
                view[:] = data
            open_pull.progress.arrived_bytes += len(data)

    def write_piece(self, open_pull: OpenPull, blocks: int) -> None:
        """Let so many more blocks arrive and count as confirmed."""
        count = min(max(open_pull.progress.confirmed_blocks, open_pull.first) + blocks, len(open_pull.prompt) // BLOCK)
        self.write(
            open_pull, open_pull.prompt[: count * BLOCK], max(open_pull.progress.confirmed_blocks, open_pull.first)
        )
        open_pull.progress.confirmed_blocks = count

    def finish(self, open_pull: OpenPull, failure: Exception | None) -> None:
        self.open.remove(open_pull)
        if failure is None:
            self.write_piece(open_pull, len(open_pull.prompt))
            open_pull.progress.complete = True
            open_pull.progress.ticket = replace(
                open_pull.ticket, complete=True, note=str(PrefillResult((open_pull.token,), False, 0, 0.0))
            )
        open_pull.failure = failure
        open_pull.over.set()


class PullingEngine:
    def __init__(
        self, blocks: int, runner: type[FakeRunner] = FakeRunner, running: int = 4, budget: int = 32, buffers: int = 0
    ) -> None:
        """`buffers`: number of host buffers, in which blocks outlive the main cache."""
        fake = runner(blocks, BLOCK)
        self.clock = ManualClock()
        self.source = ManualSource(fake.region())
        self.sender = Sender(self.source.region, "here", clock=self.clock)
        dock = TransferEndpoint(self.sender, self.source, config=TransferConfig("here", peer_timeout=5.0))  # type: ignore[arg-type]
        config = SchedulerConfig(block_size=BLOCK, max_batch_tokens=budget, max_running=running)
        tiers = TierStack(HostTier(fake.block_bytes, buffers * 4096), threads=False) if buffers else None
        self.engine = Engine(config, fake, self.clock, tiers, dock)
        self.outputs: list[Output] = []
        self.pulls = 0

    def ticket(self, name: str, submission: Submission, token: int) -> dict[str, object]:
        subject = compute_ticket_subject(self.source.region.layout, "", submission.prompt)
        self.source.prompts[name] = submission.prompt, token
        return Ticket(self.sender.peer, name, (), (), False, 10.0, subject=subject).as_dict()

    def step(self) -> None:
        self.outputs += self.engine.step()
        self.engine.kv.check_invariants()

    def publish(self) -> dict[str, Ticket]:
        """Return the current tickets that other engines could pull, by request."""
        ids = {output.id: output.ticket["id"] for output in self.outputs if output.ticket is not None}
        found = {}
        for name, ticket in ids.items():
            with suppress(TicketEnded):
                found[name] = self.sender._make_ticket(self.sender._leases.find(ticket))  # without renewing the lease
        return found

    def check(self, prompts: dict[str, list[int]]) -> None:
        self.engine.kv.check_invariants()
        region = self.source.region
        for name, ticket in self.publish().items():
            blocks = np.asarray(ticket.blocks, np.int64)
            assert region.is_unchanged(blocks, np.asarray(ticket.generations, np.uint64))
            views = region.piece_views(TransferPiece(0, 1, 0, len(blocks)), blocks)
            assert b"".join(views) == array("q", prompts[name][: BLOCK * len(blocks)]).tobytes()

    def finish(self, open_pull: OpenPull, failure: Exception | None) -> None:
        self.source.finish(open_pull, failure)
        self.pulls += 1
        self.run_until(lambda: self._stats().pulls == self.pulls)

    def open_pulls(self) -> bool:
        """Return whether each expected pull has started."""
        kv = self.engine.kv
        pulls = [*kv._active_pulls.values(), *(pull for pull, _ in kv.retained._quarantined)]
        return len(self.source.open) == sum(not pull.ended for pull in pulls)

    def run_until(self, done: Callable[[], bool]) -> None:
        ends = time.monotonic() + 30
        while not done():
            assert time.monotonic() < ends, "the condition was never met"
            time.sleep(0.0005)

    def run(self) -> None:
        for _ in range(2000):
            if self.engine.idle:
                return
            self.step()
        raise AssertionError("the engine did not finish")

    def _stats(self):  # type: ignore[no-untyped-def]
        stats = self.engine.stats().transfer
        assert stats is not None
        return stats


def make_submission(name: str, length: int, start: int, out: int) -> Submission:
    prompt = [(start * 97 + i) % 1000 for i in range(length)]
    return Submission(name, prompt, SamplingParams(max_tokens=out, seed=3), timeout=1e9)


def run_alone(submission: Submission) -> list[int]:
    engine = Engine(SchedulerConfig(block_size=BLOCK), FakeRunner(64, BLOCK))
    engine.add(submission)
    outputs_by_name: list[int] = []
    while not engine.idle:
        outputs_by_name += [token for output in engine.step() for token in output.tokens]
    return outputs_by_name


NUMBER = st.integers(0, 7)
DEEDS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(1, 50),
            st.integers(0, 2),
            st.integers(1, 10),
            st.sampled_from(["plain", "pulled", "published"]),
        ),
        st.tuples(st.just("let go"), NUMBER),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("land"), NUMBER, st.integers(1, 3)),
        st.tuples(st.just("spoil"), NUMBER),
        st.tuples(st.just("finish"), NUMBER, st.booleans()),
        st.tuples(st.just("abort"), NUMBER),
        st.tuples(st.just("silence")),
    ),
    min_size=5,
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(
    deeds=DEEDS,
    blocks=st.integers(14, 30),
    running=st.integers(1, 4),
    runner=st.sampled_from([FakeRunner, FakePipelinedRunner]),
    buffers=st.sampled_from([0, 4, 100]),
)
def test_invariants_hold_for_any_order_of_events(
    deeds: list, blocks: int, running: int, runner: type[FakeRunner], buffers: int
) -> None:
    pulling = PullingEngine(blocks, runner, running, buffers=buffers)
    expected: dict[str, list[int]] = {}
    prompts: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for deed, *how in deeds:
        source = pulling.source
        chosen = source.open[how[0] % len(source.open)] if deed in ("land", "spoil", "finish") and source.open else None
        if deed == "add":
            length, start, out, kind = how
            name = f"r{len(expected)}"
            submission = make_submission(name, length, start, out)
            expected[name], prompts[name] = run_alone(submission), submission.prompt
            if kind == "pulled":
                submission = replace(submission, source=pulling.ticket(name, submission, expected[name][0]))
            elif kind == "published":
                del expected[name][1:]
            pulling.engine.add(replace(submission, publish=kind == "published"))
        elif deed == "let go" and (known := list(pulling.publish().values())):
            pulling.sender.end_lease(known[how[0] % len(known)].id, LeaseEndReason.RELEASED)
        elif deed == "step":
            for _ in range(how[0]):
                pulling.step()
                pulling.run_until(pulling.open_pulls)
        elif deed == "land" and chosen is not None:
            source.write_piece(chosen, how[1])
        elif deed == "spoil" and chosen is not None:  # unconfirmed blocks may hold anything, also after an abort
            source.write(chosen, [-7] * len(chosen.prompt), max(chosen.progress.confirmed_blocks, chosen.first))
        elif deed == "finish" and chosen is not None:
            cancelled = chosen.progress._cancelled
            failure = TransferCancelled("") if cancelled else PeerLost("") if how[1] else None
            pulling.finish(chosen, failure)
        elif deed == "abort" and expected:
            aborted.add(name := f"r{how[0] % len(expected)}")
            pulling.engine.abort(name)
        elif deed == "silence":
            pulling.clock.advance(6.0)
        pulling.check(prompts)
    for _ in range(500):
        if pulling.engine.idle and not pulling.source.open and not pulling.engine.needs_polling:
            break
        pulling.step()
        pulling.check(prompts)
        if pulling.engine.idle or not pulling.engine.scheduler.running:
            pulling.clock.advance(1.0)  # leases expire
        pulling.run_until(pulling.open_pulls)
        for open_pull in list(pulling.source.open):
            pulling.finish(open_pull, TransferCancelled("") if open_pull.progress._cancelled else None)
    endings = Counter(output.id for output in pulling.outputs if output.finish)
    assert endings == dict.fromkeys(expected, 1)
    outputs_by_name: dict[str, list[int]] = {name: [] for name in expected}
    for output in pulling.outputs:
        assert output.finish is not FinishReason.ERROR
        outputs_by_name[output.id] += output.tokens
    for name, tokens in expected.items():
        assert outputs_by_name[name] == (tokens[: len(outputs_by_name[name])] if name in aborted else tokens)
    assert pulling.engine.kv.num_free_blocks + pulling.engine.kv.num_cached_blocks == pulling.engine.kv.num_blocks


def loading(pulling: PullingEngine) -> OpenPull:
    """Start one request whose pull has brought a block."""
    submission = make_submission("r", 41, 0, 4)
    pulling.engine.add(replace(submission, source=pulling.ticket("t", submission, run_alone(submission)[0])))
    pulling.step()
    assert pulling.source.started.acquire(timeout=30)
    open_pull = pulling.source.open[0]
    pulling.source.write_piece(open_pull, 1)
    pulling.step()
    request = pulling.engine.scheduler.requests["r#0"]
    assert request.status is RequestStatus.LOADING and request.num_computed == BLOCK
    return open_pull


@pytest.mark.parametrize("end", ["abort", "deadline"])
def test_blocks_of_aborted_request_wait_for_its_pull(end: str) -> None:
    pulling = PullingEngine(12)
    open_pull = loading(pulling)
    if end == "abort":
        pulling.engine.abort("r")
    else:
        pulling.clock.advance(1e9)
        pulling.step()
    kv = pulling.engine.kv
    kv.check_invariants()
    assert open_pull.progress._cancelled and kv.retained.num_quarantined == 6 and kv.num_free_blocks == 6
    pulling.engine.add(make_submission("next", 60, 5, 4))  # needs more blocks than are free
    for _ in range(3):
        pulling.step()
    assert pulling.engine.scheduler.requests["next#0"].status is RequestStatus.WAITING
    assert pulling.engine.needs_polling
    pulling.source.write(open_pull, [-7] * 40, 1)  # a late write, which must be harmless
    pulling.finish(open_pull, TransferCancelled(""))
    pulling.run()
    pulling.step()
    assert [t for o in pulling.outputs if o.id == "next" for t in o.tokens] == run_alone(
        make_submission("next", 60, 5, 4)
    )
    assert kv.retained.num_quarantined == 0 and kv.num_free_blocks + kv.num_cached_blocks == kv.num_blocks
    assert pulling._stats().pull_failures == {} and pulling._stats().recomputed == 0
    pulling.run_until(lambda: pulling.source.lease_ends == {"released": 1})


def test_pulling_requests_are_not_preempted() -> None:
    pulling = PullingEngine(13)
    first = make_submission("first", 40, 5, 20)
    pulling.engine.add(first)
    for _ in range(3):
        pulling.step()
    pulling.clock.advance(1.0)
    open_pull = loading(pulling)  # soon all blocks are used, and the first request needs one more
    for _ in range(25):
        pulling.step()
    assert pulling.engine.scheduler.requests["first#0"].preemptions == 1
    assert (
        pulling.engine.scheduler.requests["r#0"].status is RequestStatus.LOADING and not open_pull.progress._cancelled
    )
    pulling.finish(open_pull, None)
    pulling.run()
    outputs_by_name = {name: [t for o in pulling.outputs if o.id == name for t in o.tokens] for name in ("first", "r")}
    assert outputs_by_name == {"first": run_alone(first), "r": run_alone(make_submission("r", 41, 0, 4))}


def test_request_waits_for_its_cancelled_pull() -> None:
    pulling = PullingEngine(12)
    open_pull = loading(pulling)
    pulling.clock.advance(5.0)
    for _ in range(3):
        pulling.step()
    request = pulling.engine.scheduler.requests["r#0"]
    assert open_pull.progress._cancelled and request.status is RequestStatus.LOADING
    pulling.source.write(open_pull, [-7] * 40, 1)
    pulling.finish(open_pull, TransferCancelled(""))
    pulling.run()
    assert [token for o in pulling.outputs for token in o.tokens] == run_alone(make_submission("r", 41, 0, 4))
    assert pulling._stats().pull_failures == {"transfer_timeout": 1} and pulling._stats().hit_tokens == BLOCK


def test_pulled_blocks_are_shared_at_once() -> None:
    pulling = PullingEngine(30)
    open_pull = loading(pulling)
    pulling.source.write_piece(open_pull, 1)
    pulling.engine.add(make_submission("twin", 41, 0, 4))
    while not pulling.outputs or pulling.outputs[-1].finish is None:
        pulling.step()
    assert {output.id for output in pulling.outputs} == {"twin"} and pulling.outputs[0].cached_tokens == 16
    pulling.finish(open_pull, PeerLost("it died"))
    pulling.run()
    assert [token for o in pulling.outputs for token in o.tokens] == 2 * run_alone(make_submission("r", 41, 0, 4))


def test_blocks_are_saved_before_reuse() -> None:
    """Blocks of a request that ends when they arrive may be reused in the same plan."""
    pulling = PullingEngine(9, buffers=100)
    submission = make_submission("r", 64, 0, 1)
    pulling.engine.add(replace(submission, source=pulling.ticket("t", submission, run_alone(submission)[0])))
    pulling.step()
    pulling.run_until(pulling.open_pulls)
    other = make_submission("other", 60, 5, 2)
    pulling.engine.add(other)
    pulling.finish(pulling.source.open[0], None)
    pulling.run()
    again = make_submission("again", 64, 0, 4)
    pulling.engine.add(again)
    pulling.run()
    outputs_by_name = {
        name: [t for o in pulling.outputs if o.id == name for t in o.tokens] for name in ("r", "other", "again")
    }
    assert outputs_by_name == {"r": run_alone(submission), "other": run_alone(other), "again": run_alone(again)}
    assert pulling.engine.stats().tiers["host"].hit_tokens > 0


def test_no_tier_copy_touches_blocks_of_a_pull() -> None:
    """The blocks belonged to a request that ended one step ago, and the next plan would have saved them."""
    pulling = PullingEngine(9, running=1, buffers=100)
    first, second = make_submission("first", 64, 0, 1), make_submission("second", 64, 5, 2)
    pulling.engine.add(first)
    pulling.engine.add(replace(second, source=pulling.ticket("t", second, run_alone(second)[0])))
    run, saved = pulling.engine.runner.run, 0

    def check_copies(plan: StepPlan) -> StepResult:
        nonlocal saved
        saved += len(plan.saves)
        pulled = {block for pull in pulling.engine.kv._active_pulls.values() for block in pull.target_blocks}
        assert pulled.isdisjoint(copy.block for copy in (*plan.saves, *plan.loads))
        return run(plan)

    pulling.engine.runner.run = check_copies  # type: ignore[method-assign]
    while not pulling.engine.kv._active_pulls:
        pulling.step()
    pulling.run_until(pulling.open_pulls)
    pulling.finish(pulling.source.open[0], None)
    pulling.run()
    assert saved > 0, "buffers that were not released"
    outputs_by_name = {
        name: [t for o in pulling.outputs if o.id == name for t in o.tokens] for name in ("first", "second")
    }
    assert outputs_by_name == {"first": run_alone(first), "second": run_alone(second)}


def test_slow_peer_is_not_a_stall() -> None:
    pulling = PullingEngine(12)
    open_pull = loading(pulling)
    for _ in range(4):
        pulling.clock.advance(4.0)
        pulling.source.write_piece(open_pull, 1)
        pulling.step()
    assert not open_pull.progress._cancelled
    pulling.finish(open_pull, None)
    pulling.run()
    assert [token for o in pulling.outputs for token in o.tokens] == run_alone(make_submission("r", 41, 0, 4))
    assert pulling._stats().hit_tokens == 40 and pulling.engine.stats().prompt_tokens == 1
    pulling.run_until(lambda: pulling.source.lease_ends == {"acknowledged": 1})


def test_prefix_is_computed_without_a_pull_thread() -> None:
    pulling = PullingEngine(12)

    def refuse(work: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    assert pulling.engine.kv.pulls is not None
    pulling.engine.kv.pulls._start_thread = refuse
    for name, aborted in (("never", True), ("r", False)):
        submission = make_submission(name, 41, 0, 4)
        pulling.engine.add(replace(submission, source=pulling.ticket(name, submission, run_alone(submission)[0])))
        if aborted:
            pulling.engine.abort(name)
    while not pulling.engine.idle:
        pulling.step()
    assert [token for output in pulling.outputs for token in output.tokens] == run_alone(make_submission("r", 41, 0, 4))
    pulls = pulling.engine.kv.pulls
    assert pulls.stats().pull_failures == {"transfer_failed": 1} and not pulling.source.lease_ends
    pulls._start_thread = lambda work: work() if work == pulls._release_leases else None
    submission = make_submission("late", 41, 0, 4)
    pulling.engine.add(replace(submission, source=pulling.ticket("late", submission, run_alone(submission)[0])))
    pulling.engine.abort("late")
    while not pulling.engine.idle:
        pulling.step()
    assert pulling.source.lease_ends == {"released": 3}  # also those for which there was no thread
