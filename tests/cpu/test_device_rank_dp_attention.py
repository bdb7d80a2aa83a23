"""Engines of the GPU runner whose ranks attend to different requests sample the same tokens as one rank.

Here the ranks are threads, and the CPU is their device; see also tests/gpu/test_rank_dp_attention_on_gpu.py."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from bytelevel import EOS, VOCAB_SIZE, encode, tokenizer_file
from device_rank_engines import DeviceThreadRanks, load_host_rank_model, make_device_thread_engine
from rank_models import HEADS
from test_device_rank_engine import SETTINGS, build_config, collect, run_on_one_rank, run_on_ranks, submissions

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.core.params import GrammarSpec, SamplingParams
from emberline.core.plan import WorkItem
from emberline.core.request import Submission
from emberline.engine import memory
from emberline.engine.engine import GrammarRunner
from emberline.engine.gpu.data_parallel_rows import DataParallelRows
from emberline.engine.gpu.shape import ShapeGrid, StepShape, max_step_rows
from emberline.engine.ranks.device_leader import DeviceLeaderRunner
from emberline.engine.ranks.device_settings import check_device_settings
from emberline.engine.ranks.layout import Layout
from emberline.kernels.comm.lone_rank import LoneRank
from emberline.kv.rank_managers import RankKVManagers

DP2: dict[str, Any] = {"tp": 2, "dp_attention": True}
DP2_EP2, DP4_EP2 = DP2 | {"ep": 2}, DP2 | {"tp": 4, "ep": 2}


@pytest.mark.parametrize(
    ("name", "layout", "graphs"),
    [
        ("llama", DP2, True),
        ("cohere2", DP2, True),
        ("deepseek_v3", DP2, False),
        ("deepseek_v3", DP2_EP2, True),
        ("delta-moe", DP2_EP2, True),
        ("gpt-oss", DP4_EP2, True),
    ],
)
def test_same_tokens_as_one_rank(name: str, layout: dict[str, Any], graphs: bool, tmp_path: Path) -> None:
    """Also with windows, latents, recurrent states and experts, in chunks, with hits of the prefix cache, with and
    without captured steps, and in steps in which a rank has no request."""
    config = build_config(tmp_path, name, graphs=graphs)
    assert run_on_ranks(config, submissions(), **layout) == run_on_one_rank(config, submissions())


def test_only_the_home_of_a_request_keeps_its_blocks(tmp_path: Path) -> None:
    """A request with a cached prefix goes where that is; the caches hold twice as many blocks as one."""
    config = build_config(tmp_path, "deepseek_v3", **DP2)
    ranks = DeviceThreadRanks(config)
    engine = ranks.make_engine(config)
    assert isinstance(engine.kv, RankKVManagers) and engine.kv.num_blocks == 2 * engine.runner.num_blocks
    for part in ranks.parts:
        assert part.runner.cache.keys.shape[1] == engine.runner.num_blocks
        part.runner.cache.keys.zero_()
    first, second = ([9 + i] * 20 for i in range(2))
    for index, (prompt, used) in enumerate([(first, 1), (second, 2), (first, 2)]):
        collect(engine, [Submission(f"r{index}", prompt, SamplingParams(max_tokens=2, temperature=0.0))])
        caches = [part.runner.cache.keys for part in ranks.parts]
        assert sum(bool(keys.any()) for keys in caches) == used
    assert engine.kv.hit_tokens == 16
    engine.close()


def test_preempted_requests_continue(tmp_path: Path) -> None:
    """Also on another rank than before."""
    config = build_config(tmp_path, "llama", max_running=4, prefix_cache=False, **DP2)
    pending = [replace(s, params=replace(s.params, n=1, max_tokens=30, prompt_logprobs=None)) for s in submissions()]
    expected = run_on_one_rank(config.with_settings(dp_attention=False), pending)
    engine = make_device_thread_engine(config, max_blocks=5)
    assert collect(engine, pending) == expected
    engine.close()
    assert engine.scheduler.preemptions, "the caches were meant to be too small"


def test_grammars_and_drafts(tmp_path: Path) -> None:
    """Masks need the previous token on the host; drafts make rows of several tokens, on one of the ranks only."""
    tokenizer_file(tiny.write(tmp_path, tiny.config("llama", **HEADS, vocab_size=VOCAB_SIZE, eos_token_id=EOS)))
    config = EngineConfig.build(str(tmp_path), **SETTINGS | {"max_batch_tokens": 64})
    grammar = GrammarSpec("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))
    greedy = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    pending = [
        Submission("json", encode("give "), SamplingParams(max_tokens=14, temperature=0.7, seed=5, grammar=grammar)),
        Submission("drafted", encode("abcabcabcabc"), greedy),
        Submission("plain", encode("what"), replace(greedy, max_tokens=20)),
    ]
    expected = run_on_one_rank(config, pending)
    guess = tuple(token if i % 5 != 4 else 3 for i, token in enumerate(expected["drafted", 0]))  # every fifth is wrong
    engine = make_device_thread_engine(config.with_settings(**DP2, speculate="ngram"))
    assert isinstance(engine.runner, GrammarRunner)
    compiled = engine.runner.prepare(grammar)
    compiled.result(60)  # so that the requests run together
    pending[1] = replace(pending[1], prediction=guess)
    assert collect(engine, pending) == expected
    engine.close()
    speculation = engine.stats().speculation
    assert speculation is not None and speculation.drafted_tokens >= speculation.accepted_tokens > 0


def test_all_ranks_capture_the_same_shapes(tmp_path: Path) -> None:
    """Steps need no shapes but those that are captured ahead, whatever the rows of each rank are."""
    config = build_config(tmp_path, "deepseek_v3", max_running=3, **DP2_EP2)
    ranks = DeviceThreadRanks(config)
    engine = ranks.make_engine(config)
    assert isinstance(engine.runner, DeviceLeaderRunner) and engine.is_preparing
    engine.runner.run_uncaptured_once()
    while engine.prepare_next():
        pass
    pending = [replace(s, params=replace(s.params, prompt_logprobs=None)) for s in submissions()]
    assert collect(engine, pending) == run_on_one_rank(config.with_settings(dp_attention=False), pending)
    engine.close()
    assert not any(part.runner.model.dispatching_layers for part in ranks.parts), "their rows depend on data"
    captured = [list(part.runner._graphs.captured) for part in ranks.parts]
    assert captured[0] == captured[1] and set(captured[0]) == set(ranks.parts[0].runner.shapes)


@pytest.mark.parametrize("name", ["llama-biased", "qwen3-moe", "deepseek_v3", "delta-moe"])
def test_planned_weights_of_a_rank_are_those_it_loads(name: str, tmp_path: Path) -> None:
    """Attention and recurrent layers are whole, and the rest, with the shared experts, is divided."""
    config, has_experts = build_config(tmp_path, name), name != "llama-biased"
    for settings in [DP2, DP2_EP2] if has_experts else [DP2]:
        own = config.with_settings(**settings)
        layout = Layout.of_gpus(own.parallel)
        for rank in range(layout.num_ranks):
            part = load_host_rank_model(own, layout, rank, lambda name, rank, size: LoneRank(rank, size))
            planned = memory.weight_bytes(part.planned.rank_config, 4)
            assert planned == pytest.approx(part.planned.model.weight_bytes, rel=0.01), (settings, rank)


@pytest.mark.parametrize("seed", range(5))
def test_logits_are_found_in_the_order_of_requests(seed: int) -> None:
    """`stage` is given random work of 3 DP ranks; the rows of each rank are labelled with request and token."""
    pick = random.Random(seed)
    singles = [WorkItem(f"s{i}", 4, (1,) * pick.randint(1, 3), [], True, dp_rank=pick.randrange(3)) for i in range(6)]
    chunks = [
        WorkItem(f"c{i}", 0, (1,) * pick.randint(2, 5), [], i % 2 == 0, i == 3, dp_rank=pick.randrange(3))
        for i in range(5)
    ]
    expected = [(w.id, at) for w in singles for at in range(len(w.tokens))]
    expected += [
        (w.id, at) for w in chunks for at in ([*range(len(w.tokens))] if w.prompt_logprobs else [-1][: w.samples])
    ]
    for shape in (None, StepShape(64, 8, 128)):
        for rank in range(3):
            data_parallel_rows = DataParallelRows(LoneRank(rank, 3), max_step_rows(100))
            exchanged = data_parallel_rows.stage(data_parallel_rows.divide(singles, chunks), shape, PlainStaging())  # type: ignore[arg-type]
            labels: list[Any] = []
            for dp_rank, count in enumerate(exchanged.logit_rows.counts):
                own = [
                    row for row in expected if next(w.dp_rank for w in (*singles, *chunks) if w.id == row[0]) == dp_rank
                ]
                first = [row for row in own if row[0].startswith("s")]
                padding = [None] * ((shape.singles if shape else len(first)) - len(first))
                rows = [*first, *padding, *own[len(first) :]]
                labels += rows + [None] * (count - len(rows))
            found = [labels[at] for at in exchanged.chosen.tolist()]
            assert found[: len(expected)] == expected and (shape is not None or len(found) == len(expected))


class PlainStaging:
    """Keeps staged values on the host."""

    def put(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values)


def test_the_busiest_rank_decides_the_shape() -> None:
    data_parallel_rows, planner = DataParallelRows(LoneRank(1, 2), 128), NoLimits()
    singles = [WorkItem(f"s{i}", 4, (1,), [], True, dp_rank=0) for i in range(5)]
    chunks = [WorkItem(f"c{i}", 0, (1,) * 40, [], True, dp_rank=1) for i in range(3)]
    grid = ShapeGrid(128)

    def find(singles: list[WorkItem], chunks: list[WorkItem]) -> StepShape | None:
        return data_parallel_rows.find_shape(data_parallel_rows.divide(singles, chunks), grid, 1, planner)  # type: ignore[arg-type]

    assert find(singles, []) == StepShape(8, 0, 0) == find(singles[:2] + [replace_home(w) for w in singles], [])
    assert (
        find(singles, chunks) == StepShape(64, 8, 64) == find(singles, chunks + [replace_home(w) for w in chunks[:2]])
    )
    assert find([], chunks) == StepShape(0, 8, 128)
    assert find(singles, [*chunks, chunks[0]]) is None, "160 tokens on one rank"
    assert find(singles, [replace_scored(chunks[0])]) is None


class NoLimits:
    """A planner of attention that can always capture a step."""

    def can_capture_chunks(self, chunks: object) -> bool:
        return True


def replace_home(work: WorkItem) -> WorkItem:
    return WorkItem(work.id + "'", work.start, work.tokens, [], True, dp_rank=1 - work.dp_rank)


def replace_scored(work: WorkItem) -> WorkItem:
    return WorkItem(work.id, work.start, work.tokens, [], True, True, dp_rank=work.dp_rank)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"speculate": "mtp"}, "speculate"),
        ({"exact": True}, "exact"),
    ],
)
def test_settings_that_do_not_work(settings: dict[str, Any], field: str) -> None:
    tiers = {"kv_host_memory": 1 << 20, "kv_disk": "blocks", "kv_disk_size": 1 << 30}
    check_device_settings(EngineConfig.build("model", **DP2_EP2, redundant_experts=1, **tiers), 2)
    with pytest.raises(InvalidRequest, match="does not work") as caught:
        check_device_settings(EngineConfig.build("model", **DP2, **settings), 2)
    assert caught.value.param == field and f"--{field.replace('_', '-')}" in (caught.value.hint or "")
