"""Engines whose ranks attend to different requests sample the same tokens as on one rank. Ranks are threads here."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_runs import run_engine
from rank_engines import make_thread_engine, run_threads, run_with_aborts
from rank_models import WRITERS
from test_rank_engine import LENGTHS, PREFIX, build_config, score, submissions

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.core.params import SamplingParams
from emberline.core.request import FinishReason, Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.kv_managers import make_kv_manager
from emberline.engine.ranks import expert_balancer
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.leader import LeaderRunner
from emberline.engine.ranks.settings import check_divisible, check_rank_settings
from emberline.hub.checkpoint import Checkpoint
from emberline.kv.rank_managers import AnyKVManager, RankKVManagers
from emberline.models.config import ModelConfig
from emberline.models.shard import Shard

# All kinds of attention, of caches and of feed-forward networks that layers have.
FAMILIES = ["llama-biased", "gemma3", "cohere2", "deepseek_v3", "delta-moe", "gpt-oss", "qwen3-moe", "llama4-experts"]
DISPATCHED: dict[str, Any] = {"tp": 2, "ep": 2, "dp_attention": True}


@pytest.mark.parametrize("name", FAMILIES)
def test_same_tokens_as_on_one_rank(name: str, tmp_path: Path) -> None:
    """Also in chunks, with requests that share a prefix, and in steps in which a rank has no rows."""
    config = build_config(tmp_path, name)
    expected = run_engine(boot(config).engine, submissions())
    assert run_threads(config, submissions(), tp=2, dp_attention=True) == expected
    if ModelConfig.from_checkpoint(Checkpoint.open(tmp_path)).experts is not None:
        assert run_threads(config, submissions(), **DISPATCHED) == expected


def test_groups_of_ranks_divide_their_experts(tmp_path: Path) -> None:
    """Four ranks in two groups: the ranks of a group have parts of the same experts, with their biases."""
    config = build_config(tmp_path, "gpt-oss")
    layout = {"tp": 4, "ep": 2, "dp_attention": True}
    assert run_threads(config, submissions(0.8), **layout) == run_engine(boot(config).engine, submissions(0.8))


def test_load_of_ranks_is_counted(tmp_path: Path) -> None:
    engine = make_thread_engine(build_config(tmp_path, "qwen3-moe").with_settings(**DISPATCHED))
    run_engine(engine, [Submission("r", [7, 8, 9], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))])
    engine.close()
    found = engine.stats().experts
    assert found is not None and sum(found.rows) == (3 + 3) * 2  # one layer has experts, and a row has two of them
    assert found.imbalance == max(found.rows) / (sum(found.rows) / 2) and found.moved == 0


def run_with_scores(
    engine: Engine, pending: list[Submission], *, closes: bool = True
) -> dict[str, tuple[list[int], list[float]]]:
    """Return the tokens of each choice, and their log-probabilities."""
    for submission in pending:
        engine.add(submission)
    found: dict[str, tuple[list[int], list[float]]] = {}
    while not engine.idle:
        for output in engine.step():
            tokens, scores = found.setdefault(f"{output.id}#{output.index}", ([], []))
            tokens += output.tokens
            scores += [each.logprob for each in output.logprobs]
    engine.kv.check_invariants()
    if closes:
        engine.close()
    return found


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3-moe"])
def test_choices_and_log_probabilities(name: str, tmp_path: Path) -> None:
    """Sampled choices of a prompt share its blocks on their DP rank, and a batch does not change a request's bits."""
    config = build_config(tmp_path, name, max_running=8)
    pending = submissions(0.8, logprobs=0, n=3)
    expected = run_with_scores(boot(config).engine, pending)
    engine = make_thread_engine(config.with_settings(**DISPATCHED))
    together = run_with_scores(engine, pending)
    assert engine.kv.hit_tokens > 2 * sum(length // 8 * 8 for length in LENGTHS[1:3])  # of the choices after the first
    assert {key: tokens for key, (tokens, _) in together.items()} == {key: each for key, (each, _) in expected.items()}
    for key, (_, scores) in together.items():
        assert scores == pytest.approx(expected[key][1], abs=1e-4)
    alone = run_with_scores(make_thread_engine(config.with_settings(**DISPATCHED)), pending[2:3])
    assert all(together[key] == found for key, found in alone.items())  # the same bits


def test_requests_are_divided_among_ranks(tmp_path: Path) -> None:
    """Each goes to the rank with the fewest tokens; one that continues a cached prefix goes where that is."""
    config = build_config(tmp_path, "deepseek_v3", max_running=4, max_batch_tokens=64)
    engine = make_thread_engine(config.with_settings(**DISPATCHED))
    kv = engine.kv
    assert isinstance(kv, RankKVManagers)
    sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    long, short, other = ([9 + i] * n for i, n in enumerate((30, 9, 9)))
    for name, prompt in {"long": long, "short": short, "other": other}.items():
        engine.add(Submission(name, prompt, sampling))
    engine.step()
    dp_ranks = {name: kv.dp_rank_of(engine.scheduler.requests[f"{name}#0"]) for name in ("long", "short", "other")}
    assert dp_ranks["short"] == dp_ranks["other"] != dp_ranks["long"]
    assert kv.num_blocks == 2 * engine.runner.num_blocks
    run_engine(engine, [])
    engine.add(Submission("next", [*long, 5], sampling))
    engine.step()
    assert kv.dp_rank_of(engine.scheduler.requests["next#0"]) == dp_ranks["long"] and kv.hit_tokens == 24
    run_engine(engine, [])
    engine.close()


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "delta-moe"])
def test_preempted_requests_and_prompt_scores(name: str, tmp_path: Path) -> None:
    """A rank without free blocks preempts requests of its own, whatever the others have."""
    config = build_config(tmp_path, name, max_running=6, max_batch_tokens=64)
    sampling = SamplingParams(max_tokens=30, temperature=0.8, seed=3, ignore_eos=True)
    pending = [Submission(f"r{i}", [7 + i, 8, 9, 10], sampling) for i in range(6)]
    expected = run_engine(boot(config).engine, pending)
    layout = {"tp": 2, "dp_attention": True}
    engine = make_thread_engine(config.with_settings(**layout))
    engine.kv = engine.scheduler.kv = limit_blocks(engine, 9)
    assert run_engine(engine, pending) == expected
    assert engine.scheduler.preemptions > 0, "the caches were meant to be too small"
    engine.close()
    scores, expected_scores = score(make_thread_engine(config.with_settings(**layout))), score(boot(config).engine)
    assert scores.keys() == expected_scores.keys()
    assert all(scores[key] == pytest.approx(expected_scores[key], abs=1e-4) for key in scores)


def limit_blocks(engine: Engine, num_blocks: int) -> AnyKVManager:
    """Return managers of only some of the blocks that the engine's ranks have."""
    engine.runner.num_blocks = num_blocks
    return make_kv_manager(engine.runner, engine.config, engine.groups, engine.max_planned_tokens, engine.clock)


def test_drafts_are_verified_on_their_home(tmp_path: Path) -> None:
    config = build_config(tmp_path, "qwen3-moe", max_batch_tokens=64)
    sampling = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    pending = [Submission(f"r{i}", [7 + i, 8, 9, 10], sampling) for i in range(2)]
    expected = run_engine(boot(config).engine, pending)
    guesses = [tuple(t if at != 13 else 3 for at, t in enumerate(expected[each.id])) for each in pending]
    engine = make_thread_engine(config.with_settings(**DISPATCHED, speculate="ngram"))
    drafted = [replace(each, prediction=guess) for each, guess in zip(pending, guesses, strict=True)]
    assert run_engine(engine, drafted) == expected
    engine.close()
    speculation = engine.stats().speculation
    assert speculation is not None and speculation.drafted_tokens > speculation.accepted_tokens > 0


def test_requests_that_are_aborted_between_steps(tmp_path: Path) -> None:
    config = build_config(tmp_path, "qwen3-moe", max_running=5, max_batch_tokens=24)
    pick, sampling = random.Random(5), SamplingParams(max_tokens=6, temperature=0.8, seed=2)
    prompts = [PREFIX + [3 + pick.randrange(90) for _ in range(pick.randrange(1, 30))] for _ in range(16)]
    pending = [Submission(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
    expected = run_engine(boot(config).engine, pending)
    engine = make_thread_engine(config.with_settings(**DISPATCHED))
    tokens, ends = run_with_aborts(engine, pending, [f"r{i}" for i in range(1, 16, 2)], pick)
    assert ends.keys() == expected.keys() and FinishReason.ABORT in ends.values()
    assert all(tokens[name] == expected[name][: len(tokens[name])] for name in tokens)
    assert all(tokens[name] == expected[name] for name in tokens if ends[name] is not FinishReason.ABORT)


class TestRedundantExperts:
    """Experts that many rows select get copies on other ranks, and tokens stay the same."""

    LAYOUT = DISPATCHED | {"redundant_experts": 1}

    def make_engine(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, LeaderRunner]:
        """Return an engine that moves experts as soon as it is idle."""
        for name in ("CHECK_INTERVAL_S", "MIN_IMBALANCE", "MIN_ROWS_PER_EXPERT"):
            monkeypatch.setattr(expert_balancer, name, 0.0)
        engine = make_thread_engine(config.with_settings(**self.LAYOUT))
        assert isinstance(engine.runner, LeaderRunner)
        return engine, engine.runner

    @pytest.mark.parametrize("name", ["deepseek_v3", "gpt-oss", "qwen3-moe"])
    def test_moves_do_not_change_bits(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Experts have tensors of their own or, with gpt-oss, are parts of stacked ones, with biases."""
        config = build_config(tmp_path, name, prefix_cache=False)
        engine, runner = self.make_engine(config, monkeypatch)
        dispatches = [each.dispatch for each in runner.model.dispatching_layers.values() if each.dispatch is not None]
        before = run_with_scores(engine, submissions(0.8, logprobs=0), closes=False)
        assert engine.is_preparing
        for dispatch in dispatches:  # an expert of the first rank is hot
            dispatch.expert_row_counts.recent[:] = [90, 1, 0, 1]
        while engine.is_preparing and all(sum(each.slots.copies) == 4 for each in dispatches):
            engine.prepare_next()
        assert dispatches[0].slots.copies.tolist() == [2, 1, 1, 1]
        assert run_with_scores(engine, submissions(0.8, logprobs=0)) == before
        stats = engine.stats().experts
        assert stats is not None and stats.moved >= 1

    def test_an_expert_that_cannot_be_loaded_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine, runner = self.make_engine(build_config(tmp_path, "qwen3-moe"), monkeypatch)
        before = run_engine(engine, submissions())
        (dispatch,) = [each.dispatch for each in runner.model.dispatching_layers.values()]
        assert dispatch is not None
        placement = dispatch.placement
        dispatch.expert_row_counts.recent[:] = [90, 1, 0, 1]
        for file in tmp_path.glob("*.safetensors"):
            file.unlink()
        assert engine.is_preparing and engine.prepare_next() and not engine.is_preparing
        assert dispatch.placement == placement and "Experts not moved" in caplog.text
        assert run_engine(engine, submissions()) == before
        engine.close()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tp": 1}, "dp_attention"),
        ({"tp": 2, "pp": 2}, "dp_attention"),
        ({"tp": 2, "speculate": "mtp"}, "speculate"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match="dp_attention is set") as caught:
        check_rank_settings(EngineConfig.build("model", threads=1, dp_attention=True, **settings))
    assert caught.value.param == field and caught.value.hint is not None


def test_redundant_experts_that_are_refused(tmp_path: Path) -> None:
    for settings in ({"redundant_experts": 1}, {**DISPATCHED, "redundant_experts": 65}, {"redundant_experts": -1}):
        with pytest.raises(InvalidRequest, match="redundant_experts is") as caught:
            EngineConfig.build("model", **settings)
        assert caught.value.param == "redundant_experts"
    model = ModelConfig.from_checkpoint(Checkpoint.open(Path(build_config(tmp_path, "qwen3-moe").model)))
    check_divisible(Layout(2, ep=2, dp_attention=True, redundant_experts=2), model)
    with pytest.raises(InvalidRequest, match="lacks only 2 experts"):
        check_divisible(Layout(2, ep=2, dp_attention=True, redundant_experts=3), model)


def test_more_ranks_than_heads(tmp_path: Path) -> None:
    """Heads are not divided, so their number does not limit the ranks."""
    WRITERS["deepseek_v3"](tmp_path)
    model = ModelConfig.from_checkpoint(Checkpoint.open(tmp_path))
    assert Shard(0, 4, 4, divides_attention=False).shard_config(replace(model, heads=3)).heads == 3
