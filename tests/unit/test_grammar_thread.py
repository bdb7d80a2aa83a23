"""Grammars compiled in a thread: requests that wait for one are overtaken, can be aborted, expire, and end once.

The second half tests the thread itself with the real compiler."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from bytelevel import EOS, VOCAB_SIZE, tokenizer_file
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.clock import ManualClock
from emberline.core.engine_config import SchedulerConfig
from emberline.core.errors import InvalidRequest
from emberline.core.events import Output
from emberline.core.params import GrammarSpec, SamplingParams
from emberline.core.plan import StepPlan, StepResult
from emberline.core.request import FinishReason, Submission
from emberline.engine import grammar_thread
from emberline.engine.engine import Engine
from emberline.engine.fake import FakePipelinedRunner, FakeRunner
from emberline.engine.grammar import GrammarCompiler
from emberline.engine.grammar_thread import GrammarThread

TIMEOUT_S = 20.0


class GrammarSupport:
    """Makes a fake runner support grammars; the test completes their futures."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.futures: dict[str, Future[None]] = {}

    def prepare(self, grammar: GrammarSpec) -> Future[None]:
        return self.futures.setdefault(grammar.text, Future())

    def run(self, plan: StepPlan) -> StepResult:
        for admission in plan.admitted:
            grammar = admission.params.grammar
            assert grammar is None or self.futures[grammar.text].result(0) is None
        return super().run(plan)  # type: ignore[misc,no-any-return]


class SyncGrammarRunner(GrammarSupport, FakeRunner):
    pass


class PipelinedGrammarRunner(GrammarSupport, FakePipelinedRunner):
    pass


def engine(runner: type[SyncGrammarRunner] | type[PipelinedGrammarRunner] = SyncGrammarRunner) -> Engine:
    return Engine(SchedulerConfig(block_size=8, max_batch_tokens=64, max_running=4), runner(64, 8), ManualClock())


def futures(e: Engine) -> dict[str, Future[None]]:
    assert isinstance(e.runner, GrammarSupport)
    return e.runner.futures


def submission(name: str, grammar: str | None = None, *, n: int = 1, timeout: float = 1e9) -> Submission:
    blocked = None if grammar is None else GrammarSpec("regex", grammar)
    params = SamplingParams(max_tokens=4, n=n, temperature=0.0, grammar=blocked)
    return Submission(name, list(range(10)), params, timeout=timeout)


def run(e: Engine, limit: int = 1000) -> list[Output]:
    outputs = []
    while not e.idle and limit:
        outputs += e.step()
        limit -= 1
    return outputs


def ends(outputs: list[Output]) -> dict[tuple[str, int], FinishReason]:
    found = [((o.id, o.index), o.finish) for o in outputs if o.finish is not None]
    assert max(Counter(key for key, _ in found).values(), default=1) == 1
    return dict(found)


def assert_nothing_kept(e: Engine) -> bool:
    kept = (e._grammars, e._submissions, e.scheduler.waiting.blocked_ids, e.scheduler.requests)
    return e.idle and not any(kept)


@pytest.mark.parametrize("runner", [SyncGrammarRunner, PipelinedGrammarRunner])
def test_other_requests_overtake_until_the_grammar_is_compiled(
    runner: type[SyncGrammarRunner] | type[PipelinedGrammarRunner],
) -> None:
    e = engine(runner)
    e.add(submission("slow", "a", n=2))
    e.add(submission("next"))
    early = [o for _ in range(20) for o in e.step()]
    assert ends(early) == {("next", 0): FinishReason.LENGTH}
    assert not e.idle and e.stats().waiting == 2
    futures(e)["a"].set_result(None)
    assert ends(run(e)) == {("slow", i): FinishReason.LENGTH for i in range(2)}
    assert assert_nothing_kept(e)


def test_blocked_request_keeps_its_position() -> None:
    e = engine()
    e.add(submission("first", "a"))
    for i in range(6):
        e.add(submission(f"r{i}"))
    e.step()  # four requests run, two wait
    futures(e)["a"].set_result(None)
    order = [o.id for o in run(e) if o.finish is not None]
    assert order.index("first") < order.index("r4") < order.index("r5")


def test_invalid_grammar_ends_all_its_requests() -> None:
    e = engine()
    for name in ("one", "two"):
        e.add(submission(name, "a", n=2))
    e.add(submission("other", "b"))
    futures(e)["a"].set_exception(InvalidRequest("the regex cannot be used: why"))
    outputs = e.step()
    assert ends(outputs) == {(name, i): FinishReason.ERROR for name in ("one", "two") for i in range(2)}
    assert {o.error for o in outputs} == {"the regex cannot be used: why"}
    futures(e)["b"].set_result(None)
    assert ends(run(e)) == {("other", 0): FinishReason.LENGTH} and assert_nothing_kept(e)


def test_aborts_and_deadlines_apply_to_blocked_requests() -> None:
    e = engine()
    e.add(submission("aborted", "a"))
    e.add(submission("partly", "b", n=3))
    e.add(submission("late", "c", timeout=5.0))
    e.abort("aborted")
    e.abort_completion("partly", 0)  # the leader of the others
    assert ends(e.step()) == {("aborted", 0): FinishReason.ABORT, ("partly", 0): FinishReason.ABORT}
    assert not any(e.step() for _ in range(5))
    assert isinstance(e.clock, ManualClock)
    e.clock.advance(6.0)
    (late,) = e.step()
    assert (late.id, late.error) == ("late", "deadline_exceeded")
    futures(e)["b"].set_result(None)
    assert ends(run(e)) == {("partly", i): FinishReason.LENGTH for i in (1, 2)} and assert_nothing_kept(e)
    e.add(submission("aborted"))  # its id can be used again
    assert ends(run(e)) == {("aborted", 0): FinishReason.LENGTH}


EVENTS = st.lists(
    st.tuples(st.sampled_from(["add", "good", "bad", "abort", "abort_one", "step", "late"]), st.integers(0, 5)),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, runner=st.sampled_from([SyncGrammarRunner, PipelinedGrammarRunner]))
def test_every_request_ends_exactly_once(
    events: list[tuple[str, int]], runner: type[SyncGrammarRunner] | type[PipelinedGrammarRunner]
) -> None:
    e = engine(runner)
    assert isinstance(e.clock, ManualClock)
    opened: set[tuple[str, int]] = set()
    outputs: list[Output] = []
    for count, (what, which) in enumerate(events):
        waiting = [f for f in futures(e).values() if not f.done()]
        names = sorted({name for name, _ in opened})
        if what == "add":
            n = 1 + which % 3
            e.add(submission(f"s{count}", None if which == 5 else f"g{which}", n=n, timeout=40.0))
            opened |= {(f"s{count}", i) for i in range(n)}
        elif what in ("good", "bad") and waiting:
            chosen = waiting[which % len(waiting)]
            chosen.set_result(None) if what == "good" else chosen.set_exception(InvalidRequest("no"))
        elif what == "abort" and names:
            e.abort(names[which % len(names)])
        elif what == "abort_one" and names:
            e.abort_completion(names[which % len(names)], which % 3)
        elif what == "step":
            outputs += e.step()
        elif what == "late":
            e.clock.advance(15.0)
    while not e.idle and e.scheduler.running + list(e._in_flight):
        outputs += e.step()
    e.clock.advance(100.0)  # requests whose grammar is never compiled
    outputs += e.step() + run(e)
    assert ends(outputs).keys() == opened and assert_nothing_kept(e)


# -- the thread ---------------------------------------------------------------------------------------------


class Compiler(GrammarCompiler):
    """Compiles when the test allows it."""

    def __init__(self, tokenizer: Path) -> None:
        super().__init__(tokenizer, VOCAB_SIZE, [EOS])
        self.may = threading.Event()
        self.built: list[str] = []

    def _compile_uncached(self, grammar: GrammarSpec, param: str) -> Any:
        assert self.may.wait(TIMEOUT_S)
        self.built.append(grammar.text)
        if grammar.text == "panic":
            raise BaseException("it is broken")
        return super()._compile_uncached(grammar, param)


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(tokenizer_file(tmp_path))


def regex(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


def test_compile_does_not_block_and_equal_grammars_compile_once(compiler: Compiler) -> None:
    thread = GrammarThread(lambda: compiler)
    one, same, other = thread.compile(regex("a+")), thread.compile(regex("a+")), thread.compile(regex("b"))
    assert one is same and not one.done() and not other.done()
    compiler.may.set()
    assert one.result(TIMEOUT_S).allowed_tokens() != other.result(TIMEOUT_S).allowed_tokens()
    del one, same
    assert thread.compile(regex("a+")).done()  # cached, though its future was dropped
    assert compiler.built == ["a+", "b"]


def test_grammar_with_dropped_future_is_skipped(compiler: Compiler) -> None:
    thread = GrammarThread(lambda: compiler)
    first, dropped, last = (thread.compile(regex(text)) for text in ("a", "b", "c"))
    del dropped
    gc.collect()
    compiler.may.set()
    first.result(TIMEOUT_S), last.result(TIMEOUT_S)
    assert compiler.built == ["a", "c"]


def test_grammar_that_was_slow_is_compiled_after_new_ones(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_thread, "MIN_SLOW_SECONDS", 0.0)
    thread = GrammarThread(lambda: compiler)
    compiler.may.set()
    thread.compile(regex("slow")).result(TIMEOUT_S)
    compiler._compiled.clear()
    compiler.may.clear()
    first = thread.compile(regex("first"))
    later = [thread.compile(regex(text)) for text in ("slow", "new", "newer")]
    compiler.may.set()
    for future in (first, *later):
        future.result(TIMEOUT_S)
    assert compiler.built == ["slow", "first", "new", "newer", "slow"]


def test_compile_error_does_not_affect_the_next_grammar(compiler: Compiler) -> None:
    compiler.may.set()
    thread = GrammarThread(lambda: compiler)
    with pytest.raises(InvalidRequest, match="cannot be used"):
        thread.compile(regex("(")).result(TIMEOUT_S)
    with pytest.raises(InvalidRequest, match="it is broken"):
        thread.compile(regex("panic")).result(TIMEOUT_S)
    assert thread.compile(regex("a")).result(TIMEOUT_S).allowed_tokens()


def test_missing_compiler_fails_each_request() -> None:
    def raise_missing() -> GrammarCompiler:
        raise FileNotFoundError("no tokenizer.json")

    thread = GrammarThread(raise_missing)
    for text in ("a", "b"):
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            thread.compile(regex(text)).result(TIMEOUT_S)


def test_cached_grammar_is_found_while_another_compiles(compiler: Compiler) -> None:
    compiler.may.set()
    assert compiler.find_compiled(regex("a")) is None
    compiler.compile(regex("a"))
    compiler.may.clear()
    busy: Callable[[], object] = lambda: compiler.compile(regex("b"))  # noqa: E731
    other = threading.Thread(target=busy, daemon=True)
    other.start()
    assert compiler.find_compiled(regex("a")) is not None
    compiler.may.set()
    other.join(TIMEOUT_S)
    assert compiler.find_compiled(regex("b")) is not None
