"""The runner for GPUs, on the CPU, with block tables for each group of layers: the same tokens as with one group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_families
import torch
from gpu_settings import gpu_config
from test_layer_groups import BLOCK, CONTEXT, make_submissions, run

from emberline.core.engine_config import EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.core.params import SamplingParams
from emberline.core.plan import Admission, WorkItem
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.gpu.batch import DeviceBatch
from emberline.engine.gpu.boot import SyncRunner, warm_up
from emberline.engine.gpu.device import HostDevice
from emberline.engine.gpu.rows import DeviceRows
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.gpu.shape import StepShape
from emberline.engine.gpu.swap import reset_prefix_cache
from emberline.engine.runner import TorchRunner
from emberline.engine.sampler import SamplingState, SamplingStateFactory
from emberline.engine.speculation.draft_cache import make_draft_cache
from emberline.engine.speculation.draft_loader import load_draft_model
from emberline.engine.speculation.draft_runner import DraftRunner
from emberline.engine.speculation.drafter import Drafter
from emberline.kv.cache import KVCache, KVShape
from emberline.kv.layer_groups import LayerGroups, max_held_blocks
from emberline.models.decoder import DecoderModel
from emberline.models.draft_model import DraftModel
from emberline.models.loader import load_decoder
from emberline.models.weights import Weights

EOS: frozenset[int] = frozenset()
MAX_DRAFT = 3


@pytest.fixture(scope="module", params=["gemma3", "llama4"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # With a tied head, a tiny Gemma repeats its last token, whatever it attends to.
    changes = {"max_position_embeddings": CONTEXT, "tie_word_embeddings": False}
    config = tiny_families.CONFIGS[request.param] | changes
    return tiny.write_tensors(tmp_path_factory.mktemp("model"), config, tiny_families.tensors(config))


@pytest.fixture(scope="module")
def model(directory: Path) -> DecoderModel:
    return load_decoder(directory, "float32")


@pytest.fixture(scope="module")
def draft(model: DecoderModel, directory: Path) -> DraftModel:
    """The model itself, which as a draft model is always right if it finds its keys and values."""
    source = SpeculationConfig(speculate=f"draft:{directory}")
    (directory / "tokenizer.json").write_text("{}")
    loaded = load_draft_model(source, model, directory, lambda checkpoint: Weights(checkpoint, model.dtype))
    assert loaded is not None
    return loaded


def make_engine(
    model: DecoderModel,
    blocks: int = 400,
    *,
    grouped: bool = True,
    budget: int = 64,
    draft: DraftModel | None = None,
    runner: str = "pipelined",
    graphs: bool = True,
) -> Engine:
    c = model.config
    groups = LayerGroups.for_windows(c.windows) if grouped else LayerGroups.single(c.layers)
    cache = KVCache(KVShape(groups.block_layers, c.kv_heads, c.head_dim, BLOCK, torch.float32), blocks)
    limits = {"max_batch_tokens": budget, "max_running": 8}
    config = SchedulerConfig(**limits, block_size=BLOCK, max_context=CONTEXT)
    drafter = None
    if draft is not None:
        on_device = runner == "pipelined"
        drafter = Drafter(
            [], MAX_DRAFT, max_rows=8, adaptive=False, uses_draft_model=True, continues_on_device=on_device
        )
    if runner == "cpu":
        draft_runner = None if draft is None else DraftRunner(draft, make_draft_cache(draft, cache))
        return Engine(config, TorchRunner(model, cache, EOS, None, draft_runner, groups), drafter=drafter)
    settings = gpu_config(**limits, graphs=graphs)
    if draft is not None:
        settings = replace(settings, speculation=SpeculationConfig("draft:model", MAX_DRAFT))
    states = SamplingStateFactory(EOS, None)
    gpu = GPURunner(model, cache, EOS, states, settings, HostDevice(), CONTEXT, draft, groups)
    return Engine(config, gpu if runner == "pipelined" else SyncRunner(gpu), drafter=drafter)


def test_tokens_are_those_of_one_group(model: DecoderModel) -> None:
    expected = run(make_engine(model, grouped=False, runner="cpu"), make_submissions())
    variants = {
        "together": (make_engine(model), 0),
        "chunked": (make_engine(model, budget=16), 2),
        "not captured": (make_engine(model, graphs=False), 1),
        "not pipelined": (make_engine(model, runner="sync"), 1),
    }
    for name, (e, between) in variants.items():
        assert len(e.groups.windows) > 1
        assert run(e, make_submissions(), between) == expected, name
    again, _ = variants["together"]
    hits = again.kv.hit_tokens
    renamed = [Submission(f"again-{s.id}", s.prompt, s.params) for s in make_submissions()]
    assert {(k[0].removeprefix("again-"), k[1]): v for k, v in run(again, renamed).items()} == expected
    assert again.kv.hit_tokens - hits > 300
    choices = make_submissions(3, n=3)
    assert run(make_engine(model), choices) == run(make_engine(model, grouped=False, runner="cpu"), choices)


def test_tokens_after_preemptions_and_with_few_rows(model: DecoderModel) -> None:
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=4, ignore_eos=True)
    submissions = [Submission(f"r{i}", [3 + i, *range(10, 30)], params) for i in range(8)]
    expected = run(make_engine(model, grouped=False, runner="cpu"), submissions)
    windows = len(LayerGroups.for_windows(model.config.windows).windows) - 1
    tight = make_engine(model, blocks=40 + 28 * windows, budget=32)
    assert run(tight, submissions) == expected
    assert tight.scheduler.preemptions > 0


@pytest.mark.parametrize("runner", ["cpu", "sync", "pipelined"])
@pytest.mark.parametrize("budget", [16, 64])
def test_a_draft_model_uses_the_blocks_of_the_first_group(
    model: DecoderModel, draft: DraftModel, runner: str, budget: int
) -> None:
    """The draft model equals the target, so all its tokens are accepted if it finds all keys and values."""
    submissions = [replace(s, params=replace(s.params, temperature=0.0)) for s in make_submissions()]
    expected = run(make_engine(model, grouped=False, runner="cpu"), submissions)
    e = make_engine(model, draft=draft, runner=runner, budget=budget)
    assert run(e, submissions, 2) == expected
    drafter = e.scheduler.drafter
    assert drafter is not None and drafter.accepted_tokens == drafter.drafted_tokens > 50


@pytest.mark.parametrize("runner", ["cpu", "pipelined"])
def test_drafts_that_are_rejected(model: DecoderModel, draft: DraftModel, runner: str) -> None:
    """Sampled tokens differ from greedy drafts, so windows move by less than was planned."""
    submissions = [replace(s, params=replace(s.params, temperature=1.0)) for s in make_submissions()]
    expected = run(make_engine(model, grouped=False, runner="cpu"), submissions)
    e = make_engine(model, blocks=150, draft=draft, runner=runner, budget=24)
    assert run(e, submissions, 1) == expected
    drafter = e.scheduler.drafter
    assert drafter is not None and drafter.accepted_tokens < drafter.drafted_tokens


def test_the_longest_request_ends_while_steps_are_planned_ahead(model: DecoderModel) -> None:
    """A step is planned while the previous one runs, so a request holds the blocks of both."""
    windows, budget = LayerGroups.for_windows(model.config.windows).windows[1:], 32
    held = sum(max_held_blocks(window, BLOCK, 2 * budget) for window in windows)
    e = make_engine(model, blocks=20 + held, budget=budget)
    assert e.max_context == 20 * BLOCK
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    e.add(Submission("longest", [5 + i % 80 for i in range(e.max_context - 4)], params))
    for _ in range(30):
        e.step()
    assert e.idle and not e.scheduler.preemptions


def test_passed_blocks_are_free_for_others(model: DecoderModel) -> None:
    groups, budget = LayerGroups.for_windows(model.config.windows), 16
    e = make_engine(model, budget=budget)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    e.add(Submission("long", [5 + i % 80 for i in range(200)], params))
    most = 0
    while not e.idle:
        e.step()
        most = max(most, e.kv.num_blocks - e.kv.num_free_blocks - e.kv.num_cached_blocks)
    kept = -(-(max(groups.windows) + 2 * budget) // BLOCK) + 2
    assert most <= -(-220 // BLOCK) + kept * (len(groups.windows) - 1) < len(groups.windows) * -(-220 // BLOCK)


def test_groups_remain_after_sleep_and_warm_up(model: DecoderModel) -> None:
    e = make_engine(model)
    assert isinstance(e.runner, GPURunner)
    warm_up(e.runner)
    expected = run(make_engine(model, grouped=False, runner="cpu"), make_submissions())
    assert run(e, make_submissions()) == expected
    reset_prefix_cache(e)
    assert e.kv.has_windows and run(e, make_submissions()) == expected


def test_a_draft_model_gets_its_share_of_the_memory(directory: Path, draft: DraftModel) -> None:
    settings = {"device": "cpu", "max_batch_tokens": 64, "kv_memory": 1 << 20, "speculate": f"draft:{directory}"}
    loaded = boot(EngineConfig.build(model=str(directory), **settings))  # type: ignore[arg-type]
    runner = loaded.engine.runner
    assert isinstance(runner, TorchRunner) and not runner.groups.is_single
    assert runner._draft_runner is not None
    caches = runner.cache, runner._draft_runner._cache
    assert caches[0].num_blocks == caches[1].num_blocks
    assert 0.9 * (1 << 20) < sum(cache.num_blocks * cache.shape.block_bytes for cache in caches) <= 1 << 20
    assert run(loaded.engine, make_submissions(2)) == run(make_engine(runner.model, runner="cpu"), make_submissions(2))


def make_rows(num_tables: int) -> tuple[DeviceRows, WorkItem]:
    rows = DeviceRows(2, 10, torch.device("cpu"), num_tables=num_tables)
    rows.add("a", SamplingState(Admission("a", [1], 1, SamplingParams(), 0), frozenset(), None))
    work = WorkItem("a", 3 * BLOCK, [7] * 5, [11, 12, 13, 14], samples=True)
    rows.assign_rows([work])
    return rows, work


def test_only_new_entries_of_tables_are_sent() -> None:
    rows, work = make_rows(3)
    work.window_blocks = [[0, 0, 23, 24], [0, 32, 33, 34]]

    def send() -> int:
        indexes, blocks = rows.take_block_table_updates([work])
        rows.tables.view(-1).index_copy_(0, torch.from_numpy(indexes), torch.from_numpy(blocks))
        return len(indexes)

    assert send() == 12 and send() == 0
    work.window_blocks = [[0, 0, 0, 24, 25], [0, 0, 33, 34, 35]]  # the last tables have one more block than the first
    assert send() == 2
    row, width = rows["a"].index, rows.table_width
    assert width % 4 == 0 and rows.tables.shape == (3, 3 * width)
    first, second, third = rows.tables[row].view(3, width)[:, :5].tolist()
    assert first == [11, 12, 13, 14, 0] and second[3:] == [24, 25] and third[2:] == [33, 34, 35]
    assert rows.first_tables[row, :4].tolist() == work.blocks
    work.preemptions, work.blocks, work.window_blocks = 1, [1, 2], [[3, 4], [5, 6]]
    assert send() == 6
    assert rows.tables[row].view(3, width)[:, :2].tolist() == [[1, 2], [3, 4], [5, 6]]


def test_slots_of_each_group_follow_its_table() -> None:
    rows, work = make_rows(3)
    work.window_blocks = [[0, 0, 23, 24], [0, 32, 33, 34]]
    rows.take_block_table_updates([work])
    batch = DeviceBatch.from_work([], [work], rows, BLOCK)
    assert batch.window_slots is not None
    for blocks, slots in ((work.blocks, batch.slots), *zip(work.window_blocks, batch.window_slots, strict=True)):
        assert slots[:5].tolist() == [blocks[3] * BLOCK + i for i in range(5)]
    padded = batch.pad_to(StepShape(0, 8, 128), rows.padding_row)
    assert padded.window_slots is not None and padded.window_slots.shape == (2, 128)
    assert np.array_equal(padded.window_slots[:, :5], batch.window_slots[:, :5])
    assert (padded.window_slots[:, 5:] == -1).all()


def test_one_group_has_no_further_slots() -> None:
    rows, work = make_rows(1)
    rows.take_block_table_updates([work])
    batch = DeviceBatch.from_work([], [work], rows, BLOCK)
    assert batch.window_slots is None and batch.pad_to(StepShape(0, 8, 128), rows.padding_row).window_slots is None
    assert rows.first_tables is rows.tables and rows.table_width == 10
