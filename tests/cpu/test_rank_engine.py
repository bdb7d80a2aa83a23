"""Engines on several ranks: plans in flight, endings, refusals. The ranks are threads; see also test_ranks.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_runs import run_engine
from rank_engines import make_thread_engine, run_with_aborts
from rank_models import WRITERS

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.core.params import SamplingParams
from emberline.core.plan import StepPlan, StepResult
from emberline.core.request import FinishReason, Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.leader import LeaderRunner, PipelineLeaderRunner
from emberline.engine.ranks.settings import check_divisible, check_rank_settings
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig
from emberline.models.stage import split_layers

SETTINGS: dict[str, Any] = {
    "device": "cpu", "threads": 1, "dtype": "float32", "kv_memory": 1 << 20, "block_size": 8, "max_context": 64,
}  # fmt: skip
LENGTHS = (3, 21, 30, 9)
PREFIX = [5, 9, 17, 4, 80, 33, 9, 21, 6, 14]  # more than a block


def submissions(temperature: float = 0.0, **params: Any) -> list[Submission]:
    sampling = SamplingParams(max_tokens=10, temperature=temperature, seed=11, **params)
    prompts = [(PREFIX + [3 + (7 * i + j) % 90 for j in range(n)])[:n] for i, n in enumerate(LENGTHS)]
    return [Submission(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)]


def build_config(directory: Path, name: str, **settings: Any) -> EngineConfig:
    WRITERS[name](directory)
    return EngineConfig.build(str(directory), **SETTINGS | {"max_batch_tokens": 16, "max_running": 3} | settings)


def test_stages_compute_different_requests_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the start, each of two plans in flight has half of the requests, and none has a request of another."""
    engine = make_thread_engine(build_config(tmp_path, "llama", max_running=4, max_batch_tokens=2048, pp=2))
    runner = engine.runner
    assert isinstance(runner, PipelineLeaderRunner)
    open_plans: list[set[str]] = []
    sizes: list[list[int]] = []
    launch = runner.launch

    def record_launch(plan: StepPlan) -> Callable[[], StepResult]:
        own, finish = {w.id for w in plan.work}, launch(plan)
        assert not any(own & other for other in open_plans)
        open_plans.append(own)
        sizes.append([len(each) for each in open_plans])

        def record_finish() -> StepResult:
            open_plans.pop(0)
            return finish()

        return record_finish

    monkeypatch.setattr(runner, "launch", record_launch)
    run_engine(engine, submissions(ignore_eos=True))
    engine.close()
    assert sizes[2:12] == [[2, 2]] * 10, sizes


@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 2}])
def test_requests_that_are_aborted_or_refused_between_steps(layout: dict[str, int], tmp_path: Path) -> None:
    """Others keep their tokens, whatever ends while steps with it are in flight, and no block is lost."""
    config = build_config(tmp_path, "llama", max_running=4, max_batch_tokens=24)
    pick, sampling = random.Random(5), SamplingParams(max_tokens=6, temperature=0.8, seed=2)
    prompts = [[3 + pick.randrange(90) for _ in range(pick.randrange(1, 40))] for _ in range(24)]
    pending = [Submission(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
    expected = run_engine(boot(config).engine, pending)
    engine = make_thread_engine(config.with_settings(**layout))
    assert isinstance(engine.runner, LeaderRunner)
    admit = engine.runner._sampler.admit
    refused, aborted = {"r3", "r11", "r12"}, [f"r{i}" for i in range(1, 24, 2) if i not in (3, 11)]
    engine.runner._sampler.admit = lambda new: "refused" if new.id[:-2] in refused else admit(new)  # type: ignore[method-assign]
    tokens, ends = run_with_aborts(engine, pending, aborted, pick)
    assert ends.keys() == expected.keys() and {name for name in ends if ends[name] is FinishReason.ERROR} == refused
    for name, end in ends.items():
        whole = end not in (FinishReason.ERROR, FinishReason.ABORT)
        assert tokens[name] == (expected[name] if whole else expected[name][: len(tokens[name])]), name
    assert FinishReason.ABORT in ends.values()


def test_drafts_are_verified_on_all_ranks(tmp_path: Path) -> None:
    config = build_config(tmp_path, "llama", max_batch_tokens=64)
    alone = Submission("r0", [7, 8, 9, 10], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
    expected = run_engine(boot(config).engine, [alone])
    guess = tuple(token if i != 13 else 3 for i, token in enumerate(expected["r0"]))  # a wrong token among right ones
    engine = make_thread_engine(config.with_settings(tp=2, speculate="ngram"))
    assert run_engine(engine, [replace(alone, prediction=guess)]) == expected
    engine.close()
    speculation = engine.stats().speculation
    assert speculation is not None and speculation.drafted_tokens > speculation.accepted_tokens > 0


def test_interrupt_ends_the_ranks_and_stays_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    engine = make_thread_engine(build_config(tmp_path, "llama", pp=2))
    assert isinstance(engine.runner, PipelineLeaderRunner)
    monkeypatch.setattr(engine.runner._group_executor.leader_executor, "compute", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_engine(engine, submissions())


def score(engine: Engine) -> dict[str, list[float]]:
    for submission in submissions(prompt_logprobs=1):
        engine.add(submission)
    found: dict[str, list[float]] = {}
    while not engine.idle:
        for output in engine.step():
            if output.prompt_logprobs is not None:
                found[output.id] = [each.logprob for each in output.prompt_logprobs]
    engine.close()
    return found


def test_preempted_requests_and_prompt_scores(tmp_path: Path) -> None:
    config = build_config(tmp_path, "qwen2")
    expected = run_engine(boot(config).engine, submissions(0.8))
    tight = build_config(tmp_path, "qwen2", kv_memory=9 * 1024, pp=2, max_running=4, max_batch_tokens=1024)
    engine = make_thread_engine(tight)
    assert run_engine(engine, submissions(0.8)) == expected
    assert engine.scheduler.preemptions > 0, "the cache was meant to be too small"
    engine.close()
    assert score(make_thread_engine(config.with_settings(pp=2))) == score(boot(config).engine)


def test_stages_are_balanced() -> None:
    assert split_layers([1.0] * 6, 0.0, 3) == [range(2), range(2, 4), range(4, 6)]
    assert split_layers([1.0] * 6, 2.0, 2) == [range(4), range(4, 6)]
    assert split_layers([1.0, 1.0], 9.0, 2) == [range(1), range(1, 2)]
    assert split_layers([5.0, 1.0, 1.0, 1.0], 0.0, 2) == [range(1), range(1, 4)]
    assert split_layers([1.0, 1.0, 1.0], 0.0, 1) == [range(3)]
    assert split_layers([1.0] * 6, 0.0, 2, first_cost=2.0) == [range(2), range(2, 6)]
    assert split_layers([1.0] * 6, 0.0, 2, fits=lambda layers: len(layers) != 3) == [range(2), range(2, 6)]
    assert split_layers([1.0] * 6, 0.0, 2, fits=lambda layers: False) == [range(3), range(3, 6)]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tp": 0}, "tp"),
        ({"pp": 65}, "pp"),
        ({"tp": 16, "pp": 8}, "tp"),
        ({"tp": 2, "ep": 4}, "ep"),
        ({"pp": 2, "pp_layers": "3"}, "pp_layers"),
        ({"pp": 2, "pp_layers": "3,0"}, "pp_layers"),
        ({"pp": 2, "pp_layers": "3,x"}, "pp_layers"),
        ({"pp": 2, "rank_timeout": 0.9}, "rank_timeout"),
        ({"tp": 32, "threads": 0}, "tp"),
        ({"pp": 2, "nodes": 2, "master": "10.0.0.1:7000", "kv_host_memory": 1 << 20}, "kv_host_memory"),
    ],
)
def test_settings_that_ranks_refuse(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_rank_settings(EngineConfig.build("model", **{"threads": 1, **settings}))
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("layout", "name", "field"),
    [
        (Layout(tp=3), "llama", "tp"),
        (Layout(pp=3), "llama", "pp"),
        (Layout(pp=2, stage_layers=(2, 2)), "llama", "pp_layers"),
        (Layout(tp=2, ep=2), "llama", "ep"),
        (Layout(tp=8, ep=8), "mixtral", "ep"),
    ],
)
def test_models_that_ranks_cannot_divide(layout: Layout, name: str, field: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    with pytest.raises(InvalidRequest) as caught:
        check_divisible(layout, ModelConfig.from_checkpoint(Checkpoint.open(tmp_path)))
    assert caught.value.param == field
