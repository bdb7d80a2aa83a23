"""Scheduler: same tokens, no leaked blocks and one end per request, for any order of arrivals, steps and aborts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings, target
from hypothesis import strategies as st

from emberline.core.clock import ManualClock
from emberline.core.engine_config import SchedulerConfig
from emberline.core.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.request import FinishReason, Priority, Request, Submission
from emberline.engine import scheduler
from emberline.engine.engine import Engine
from emberline.engine.fake import FakePipelinedRunner, FakeRunner
from emberline.engine.preemption import choose_victim
from emberline.engine.scheduler import MAX_SCORED_TOKENS


def engine(
    blocks: int = 64,
    *,
    budget: int = 64,
    running: int = 16,
    waiting: int = 1024,
    eos: frozenset[int] = frozenset(),
    runner: type[FakeRunner] = FakeRunner,
    **config: object,
) -> Engine:
    settings_ = SchedulerConfig(
        block_size=8, max_batch_tokens=budget, max_running=running, max_waiting=waiting, **config
    )  # type: ignore[arg-type]
    return Engine(settings_, runner(blocks, 8, eos=eos), ManualClock())


def submission(
    name: str,
    length: int = 20,
    *,
    start: int = 0,
    priority: Priority = Priority.INTERACTIVE,
    timeout: float = 1e9,
    **params: object,
) -> Submission:
    return Submission(
        name, [(start + i) % 1000 for i in range(length)], SamplingParams(**params), priority, timeout=timeout
    )  # type: ignore[arg-type]


def run(e: Engine, limit: int = 10_000) -> list[Output]:
    outputs: list[Output] = []
    for _ in range(limit):
        outputs += e.step()
        e.kv.check_invariants()
        if e.idle:
            break
    assert e.idle, "the engine did not finish"
    return outputs


def texts(outputs: list[Output]) -> dict[tuple[str, int], list[int]]:
    folded: dict[tuple[str, int], list[int]] = {}
    for o in outputs:
        folded.setdefault((o.id, o.index), []).extend(o.tokens)
    return folded


def assert_all_free(e: Engine) -> None:
    assert e.kv.num_free_blocks + e.kv.num_cached_blocks == e.kv.num_blocks


RUNNERS = st.sampled_from([FakeRunner, FakePipelinedRunner])
WORK = st.lists(
    st.tuples(
        st.integers(1, 60), st.integers(0, 3), st.integers(1, 20), st.integers(1, 3), st.sampled_from(list(Priority))
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    work=WORK,
    blocks=st.integers(14, 40),
    budget=st.integers(4, 64),
    running=st.integers(1, 4),
    prefix=st.booleans(),
    gaps=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    runner=RUNNERS,
    eos=st.sampled_from([frozenset[int](), frozenset(range(0, 1000, 7))]),
)
def test_tokens_do_not_depend_on_batching_chunking_sharing_preemption_or_lookahead(
    work: list,
    blocks: int,
    budget: int,
    running: int,
    prefix: bool,
    gaps: list[int],
    runner: type[FakeRunner],
    eos: frozenset[int],
) -> None:
    def submissions() -> list[Submission]:
        return [
            submission(f"r{i}", length, start=start, max_tokens=out, n=n, seed=i, priority=p)
            for i, (length, start, out, n, p) in enumerate(work)
        ]

    expected: dict[tuple[str, int], list[int]] = {}
    for s in submissions():
        alone = engine(blocks=400, budget=1000, eos=eos)
        alone.add(s)
        expected.update(texts(run(alone)))
    together = engine(blocks, budget=max(budget, running), running=running, prefix_cache=prefix, runner=runner, eos=eos)
    outputs: list[Output] = []
    for s, gap in zip(submissions(), gaps, strict=False):
        together.add(s)
        for _ in range(gap):
            outputs += together.step()
            together.kv.check_invariants()
    outputs += run(together)
    assert texts(outputs) == expected
    assert Counter((o.id, o.index) for o in outputs if o.finish) == Counter(expected.keys())
    assert_all_free(together)


@settings(max_examples=150, deadline=None)
@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 70), st.integers(1, 30), st.integers(1, 3)),
            st.tuples(st.just("step"), st.integers(1, 4), st.just(0), st.just(0)),
            st.tuples(st.just("abort"), st.integers(0, 20), st.just(0), st.just(0)),
            st.tuples(st.just("wait"), st.integers(1, 50), st.just(0), st.just(0)),
        ),
        max_size=40,
    ),
    blocks=st.integers(12, 30),
    runner=RUNNERS,
)
def test_every_request_ends_exactly_once_and_no_block_leaks(
    actions: list, blocks: int, runner: type[FakeRunner]
) -> None:
    e = engine(blocks, budget=16, running=4, runner=runner)
    clock = e.clock
    assert isinstance(clock, ManualClock)
    outputs: list[Output] = []
    expected: set[tuple[str, int]] = set()
    for verb, a, b, n in actions:
        if verb == "add":
            name = f"r{len(expected)}-{n}"
            e.add(submission(name, a, max_tokens=b, n=n, timeout=40.0))
            expected |= {(name, i) for i in range(n)}
        elif verb == "step":
            for _ in range(a):
                outputs += e.step()
        elif verb == "abort" and expected:
            e.abort(sorted(expected)[a % len(expected)][0])
        elif verb == "wait":
            clock.advance(a)
        e.kv.check_invariants()
    outputs += run(e) if not e.idle else e.step()
    ends = Counter((o.id, o.index) for o in outputs if o.finish)
    assert ends == Counter(expected)
    assert_all_free(e)
    ended: set[tuple[str, int]] = set()
    for o in outputs:
        assert (o.id, o.index) not in ended, "something came after the end"
        if o.finish:
            ended.add((o.id, o.index))


def test_step_mixes_chunks_and_single_tokens() -> None:
    e = engine(budget=16)
    e.add(submission("decoding", 4, max_tokens=50))
    e.step()
    e.add(submission("long", 100, start=500, max_tokens=2))
    plan = e.scheduler.schedule()
    assert plan is not None and sorted(len(w.tokens) for w in plan.work) == [1, 15]


def test_interactive_runs_first_and_batch_is_not_starved() -> None:
    e = engine(running=1, ageing_seconds=10.0)
    clock = e.clock
    assert isinstance(clock, ManualClock)
    e.add(submission("batch", 8, priority=Priority.BATCH, max_tokens=1))
    clock.advance(5)
    e.add(submission("chat", 8, max_tokens=1))
    clock.advance(6)
    e.add(submission("late chat", 8, max_tokens=1))
    order = [o.id for o in run(e) if o.finish]
    assert order == ["chat", "batch", "late chat"]


def test_preemption_prefers_batch_then_the_fewest_lost_blocks() -> None:
    e = engine(blocks=12, budget=200)
    e.add(submission("first", 30, max_tokens=60))
    e.add(submission("bulk", 24, start=300, priority=Priority.BATCH, max_tokens=60))
    e.add(submission("small", 8, start=600, max_tokens=60))
    outputs: list[Output] = []
    while e.scheduler.preemptions == 0:
        outputs += e.step()
    waiting = [r.submission_id for r in e.scheduler.waiting]
    assert waiting == ["bulk"]
    outputs += run(e)
    assert {o.id for o in outputs if o.finish is FinishReason.LENGTH} == {"first", "bulk", "small"}


def test_siblings_share_the_prompt() -> None:
    e = engine(budget=200)
    e.add(submission("n", 40, max_tokens=4, n=3, seed=7))
    e.step()
    e.step()
    tables = [list(e.kv.block_table(r)) for r in e.scheduler.running]
    assert len(tables) == 3 and tables[0][:4] == tables[1][:4] == tables[2][:4]
    outputs = run(e)
    assert e.scheduler.prompt_tokens <= 40 + 2 * 8
    assert len({tuple(t) for t in texts(outputs).values()}) == 3, "each completion has its own seed"


def test_abort_frees_blocks_at_once() -> None:
    e = engine()
    e.add(submission("a", 40, max_tokens=50))
    e.step()
    assert e.kv.num_free_blocks < e.kv.num_blocks
    e.abort("a")
    assert_all_free(e)
    assert [o.finish for o in e.step() if o.finish] == [FinishReason.ABORT]


def test_deadline_ends_a_request_in_every_state() -> None:
    e = engine(running=1)
    clock = e.clock
    assert isinstance(clock, ManualClock)
    e.add(submission("running", 8, max_tokens=500, timeout=5))
    e.add(submission("waiting", 8, max_tokens=5, timeout=5))
    e.step()
    clock.advance(6)
    ended = {o.id: o.error for o in e.step() if o.finish}
    assert ended == {"running": "deadline_exceeded", "waiting": "deadline_exceeded"}


def test_no_token_timeout_while_tokens_arrive() -> None:
    """A request has `token_timeout` for its first token and between tokens, and no other limit by default."""
    e = engine(running=1)
    clock = e.clock
    assert isinstance(clock, ManualClock)
    flows = Submission("flows", list(range(8)), SamplingParams(max_tokens=40))
    waits = Submission("waits", list(range(8)), SamplingParams(max_tokens=5), token_timeout=1000.0)
    e.add(flows)
    e.add(waits)
    outputs = []
    for _ in range(20):
        clock.advance(500)
        outputs += e.step()
    assert len([t for o in outputs if o.id == "flows" for t in o.tokens]) == 20
    assert [(o.id, o.error) for o in outputs if o.finish] == [("waits", "deadline_exceeded")]
    clock.advance(601)
    assert [(o.id, o.error) for o in e.step() if o.finish] == [("flows", "deadline_exceeded")]
    assert_all_free(e)


def test_stop_ids_eos_and_limits_end_a_request() -> None:
    probe = engine()
    probe.add(submission("a", 8, max_tokens=3, temperature=0.0))
    first, second, _ = texts(run(probe))[("a", 0)]
    stops = engine()
    stops.add(submission("a", 8, max_tokens=9, temperature=0.0, stop_token_ids=(second,)))
    last = run(stops)[-1]
    assert (last.finish, last.stop_token) == (FinishReason.STOP, second)
    with_eos = engine(eos=frozenset({first}))
    with_eos.add(submission("a", 8, max_tokens=9, temperature=0.0))
    with_eos.add(submission("b", 8, max_tokens=3, temperature=0.0, ignore_eos=True))
    got = texts(run(with_eos))
    assert got[("a", 0)] == [first] and len(got[("b", 0)]) == 3


def test_prompt_logprobs_cover_the_prompt_once() -> None:
    e = engine(budget=16)
    e.add(submission("warm", 40, max_tokens=1))
    run(e)
    e.add(submission("scored", 40, max_tokens=3, prompt_logprobs=0))
    scored = [o for o in run(e) if o.prompt_logprobs is not None]
    assert len(scored) == 1
    assert [p.logprob for p in scored[0].prompt_logprobs or []] == [-float(i) for i in range(1, 40)]


def test_invalid_submissions_are_rejected() -> None:
    e = engine(blocks=4, running=1, waiting=1)
    with pytest.raises(ContextLengthExceeded):
        e.add(submission("long", 32))
    with pytest.raises(InvalidRequest):
        e.add(Submission("empty", [], SamplingParams()))
    for ids in ([1000], [3, -1], [1 << 70]):
        with pytest.raises(InvalidRequest):
            e.add(Submission("range", ids, SamplingParams()))
    with pytest.raises(InvalidRequest):
        e.add(submission("bias", 4, logit_bias={1000: 1.0}))
    e.add(submission("running", 4))
    e.add(submission("waiting", 4))
    with pytest.raises(Overloaded):
        e.add(submission("one too many", 4))


def test_scored_prompts_have_their_own_budget() -> None:
    """Each scored token needs a row of logits: without a limit, one step could need gigabytes."""
    e = engine(blocks=600, budget=4000, max_context=2000)
    for i in range(3):
        e.add(submission(f"scored{i}", 700, start=i, max_tokens=2, prompt_logprobs=0))
    e.add(submission("plain", 900, start=77, max_tokens=2))
    seen, found = 0, {}
    while not e.idle:
        plan = e.scheduler.schedule()
        if plan is None:
            break
        assert sum(len(w.tokens) for w in plan.work if w.prompt_logprobs) <= MAX_SCORED_TOKENS
        seen += sum(len(w.tokens) for w in plan.work if w.prompt_logprobs)
        e.scheduler.update(plan, e.runner.run(plan))
        for o in e._collect_outputs():
            if o.prompt_logprobs is not None:
                found[o.id] = len(o.prompt_logprobs)
    assert seen == 3 * 700 and found == {f"scored{i}": 699 for i in range(3)}


def test_own_blocks_after_preemption_do_not_count_as_cached() -> None:
    e = engine(24, budget=6, running=8)
    for i in range(4):
        e.add(submission(f"a{i}", 6, start=100 * i, max_tokens=20))
    for _ in range(6):
        e.step()
    e.clock.advance(1)
    e.add(submission("b", 90, start=500, priority=Priority.BATCH, max_tokens=2))
    outputs = run(e)
    assert e.scheduler.preemptions
    assert sum(o.cached_tokens for o in outputs) == e.kv.hit_tokens == 0
    assert e.kv.queried_tokens == 4 * 6 + 90
    assert not e.scheduler._first_num_cached
    e.add(submission("c", 90, start=500, max_tokens=2))
    assert sum(o.cached_tokens for o in run(e)) == e.kv.hit_tokens == 88


def victim_by_scanning(e: Engine, request: Request) -> Request:
    """Return the victim by definition: lower rank, batch first, then the fewest unshared blocks, then the latest."""
    kv, rank = e.kv, e.scheduler.waiting.sort_key
    in_use = Counter(block for r in e.scheduler.running for block in kv.block_table(r))

    def private(r: Request) -> int:
        return sum(in_use[block] == 1 for block in kv.block_table(r))

    behind = [r for r in e.scheduler.running if rank(r) > rank(request) and private(r) > 0]
    return min(behind, key=lambda r: (-r.priority, private(r), -rank(r)[0])) if behind else request


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.sampled_from([0, 0, 500]), st.integers(1, 40), st.integers(1, 3)),
        min_size=2,
        max_size=8,
    ),
    st.integers(9, 20),
)
@settings(max_examples=60, deadline=None)
def test_victim_equals_that_of_a_full_scan(asked: list[tuple[int, int, int, int]], blocks: int) -> None:
    e, found = engine(blocks), list[str]()

    def compare_victims(request: Request, *others: object) -> Request:
        chosen = choose_victim(request, *others)  # type: ignore[arg-type]
        assert chosen is victim_by_scanning(e, request)
        found.append(chosen.id)
        return chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "choose_victim", compare_victims)
        for i, (length, start, tokens, n) in enumerate(asked):
            priority = Priority.BATCH if i % 3 == 2 else Priority.INTERACTIVE
            if -(-(length + tokens) // 8) < blocks:
                e.add(submission(f"r{i}", length, start=start, priority=priority, max_tokens=tokens, n=n))
            e.step()
            e.clock.advance(0.5)  # type: ignore[attr-defined]
        run(e)
    target(len(found))
