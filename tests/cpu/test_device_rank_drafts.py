"""Draft models of engines of the GPU runner on several ranks: the tokens of one rank without drafts, and the drafts of
one rank. Here the CPU is the device of all ranks; see also tests/gpu/test_rank_drafts_on_gpu.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from bytelevel import EOS, VOCAB_SIZE, encode, tokenizer_file
from device_rank_engines import DeviceThreadRanks, load_host_rank_model
from engine_runs import run_engine
from host_rank_process import COMMAND, FAILURE_FILE, simulate_gpus
from mtp_head import add_tensors, make_counting_tensors
from safetensors.torch import load_file
from test_device_rank_engine import PENALTIES, collect
from test_rank_drafts import SETTINGS as CPU_SETTINGS
from test_rank_drafts import run_with_drafts, submissions, write_eagle, write_mtp, write_same_model
from tiny_deepseek import write_deepseek
from torch import Tensor

from emberline import LLM, SamplingParams
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.core.params import GrammarSpec
from emberline.core.request import Submission
from emberline.engine import llm as llm_module
from emberline.engine.boot import boot
from emberline.engine.draft_estimate import estimate_draft_memory
from emberline.engine.gpu.device import HostDevice
from emberline.engine.gpu.draft_boot import measure_draft_model
from emberline.engine.loaded_engine import LoadedEngine
from emberline.engine.rank_plan import plan_ranks
from emberline.engine.ranks import device_boot
from emberline.engine.ranks.device_draft_model import load_draft_model_on_gpu
from emberline.engine.ranks.device_rank_model import DeviceRankModel
from emberline.engine.ranks.device_settings import check_device_settings
from emberline.engine.ranks.group import RankGroup
from emberline.engine.ranks.layout import Layout
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels.comm.lone_rank import LoneRank
from emberline.models.config import ModelConfig
from emberline.models.eagle3 import Eagle3Head
from emberline.models.mtp import MTPHead

StartEngine = Callable[[DeviceThreadRanks, EngineConfig], Any]
# A GPU verifies as many tokens of a step as it may have requests.
SETTINGS: dict[str, Any] = CPU_SETTINGS | {"max_running": 16}
GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)


def write_latent_mtp(directory: Path) -> str:
    """A head with experts and latent attention, whose sizes are those of the whole model."""
    sizes = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "max_position_embeddings": 128, "num_hidden_layers": 2}
    write_deepseek(directory / "model", "v3", **sizes, num_nextn_predict_layers=1, first_k_dense_replace=1)
    config = json.loads((directory / "model" / "config.json").read_text())
    tokenizer_file(directory / "model")
    add_tensors(directory / "model", make_counting_tensors(directory / "model", config, "hidden state"))
    return "mtp"


def write_separate_mtp(directory: Path) -> str:
    """A head whose embedding and output head are not those of the model."""
    write_latent_mtp(directory)
    tensors = load_file(directory / "model" / "model.safetensors")
    names = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")
    changed = {name: tensors[name].clone() for name in names}
    for tensor in changed.values():
        tensor[-1, -1] += 1
    add_tensors(directory / "model", changed)
    return "mtp"


def write_wide(directory: Path) -> str:
    """A draft model whose attention computes fewer tokens of a request together than the target model's."""
    write_same_model(directory)
    sizes = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "max_position_embeddings": 128, "num_hidden_layers": 1}
    wide = tiny.config("llama", **sizes, num_attention_heads=16, num_key_value_heads=1)
    tokenizer_file(tiny.write(directory / "wide", wide, seed=5))
    return f"draft:{directory / 'wide'}"


@pytest.fixture
def draft_always() -> Iterator[StartEngine]:
    """Starts engines that verify all drafts: otherwise their number depends on times. Threads end with the test."""
    started: list[DeviceThreadRanks] = []

    def start(ranks: DeviceThreadRanks, config: EngineConfig) -> Any:
        started.append(ranks)
        engine = ranks.make_engine(config)
        assert engine.scheduler.drafter is not None
        engine.scheduler.drafter._adaptive = False
        return engine

    yield start
    for ranks in started:
        for queue in ranks._queues.values():
            queue.put(None)  # also if the test failed before it closed the engine


@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "uncaptured"])
@pytest.mark.parametrize("write", [write_eagle, write_same_model, write_mtp, write_latent_mtp, write_wide])
def test_drafts_are_those_of_one_rank(
    write: Callable[[Path], str], graphs: bool, tmp_path: Path, draft_always: StartEngine
) -> None:
    """Prompts are computed in chunks, and found in the prefix cache when the requests come again."""
    speculate = write(tmp_path)
    config = EngineConfig.build(str(tmp_path / "model"), **SETTINGS | {"max_batch_tokens": 24, "graphs": graphs})
    pending = submissions()
    expected = run_engine(boot(config).engine, pending)
    alone = run_with_drafts(boot(config.with_settings(speculate=speculate)).engine, pending)[1]
    config = config.with_settings(speculate=speculate, tp=2)
    ranks = DeviceThreadRanks(config)
    engine = draft_always(ranks, config)
    assert run_engine(engine, pending, steps_between=1) == expected
    tokens, drafts, drafted, accepted = run_with_drafts(engine, pending)
    assert tokens == expected
    for name, found in drafts.items():
        for known, draft in found.items():
            other = alone[name].get(known, draft)
            assert draft[: len(other)] == other[: len(draft)], (name, known)
    assert sum(map(len, drafts.values())) > 10 and drafted > 60
    if write not in (write_eagle, write_wide):  # random ones are hardly ever right
        assert accepted == drafted
    runners = [part.runner for part in ranks.parts]
    assert runners[0].shapes == runners[1].shapes and runners[1].draft_model is None
    assert list(runners[0]._graphs.captured) == list(runners[1]._graphs.captured)


@pytest.mark.parametrize("max_blocks", [None, 20], ids=["plenty of blocks", "preempted"])
def test_sampling_of_all_kinds(max_blocks: int | None, tmp_path: Path, draft_always: StartEngine) -> None:
    """Grammars and penalties read drafts on the host; their steps wait for the previous one."""
    speculate = write_same_model(tmp_path)
    drawn = replace(GREEDY, temperature=0.8, seed=5)
    schema = GrammarSpec("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))
    kinds = [
        GREEDY,
        replace(drawn, n=2),
        replace(drawn, **PENALTIES, logit_bias={7: 2.0}, min_tokens=3),
        replace(drawn, grammar=schema, ignore_eos=False),
        replace(drawn, grammar=GrammarSpec("regex", "[a-d]{30}x?"), ignore_eos=False, logprobs=2),
        replace(GREEDY, prompt_logprobs=1),
    ]
    text = encode("the cat sat on the mat and the dog")
    pending = [Submission(f"r{i}", text[: 9 + 4 * i], kind) for i, kind in enumerate(kinds)]
    config = EngineConfig.build(str(tmp_path / "model"), **SETTINGS | {"max_batch_tokens": 24, "graphs": True})
    expected = collect(boot(config).engine, pending, gap=0)
    config = config.with_settings(speculate=speculate, tp=2)
    engine = draft_always(DeviceThreadRanks(config, max_blocks=max_blocks), config)
    for gap in (1, 0):
        found = collect(engine, pending, gap=gap)
        assert found.keys() == expected.keys()
        for name, row in found.items():
            for kind in (int, float):  # tokens, and rounded log-probabilities; an output may have several of each
                ours, theirs = ([each for each in part if type(each) is kind] for part in (row, expected[name]))
                assert ours == pytest.approx(theirs, abs=2e-3), name
    engine.close()
    assert bool(engine.scheduler.preemptions) == (max_blocks is not None)
    stats = engine.scheduler.drafter.stats()
    assert stats.drafted_tokens > stats.accepted_tokens > 60


def test_all_ranks_prepare_the_same_steps(tmp_path: Path, draft_always: StartEngine) -> None:
    """The leader also prepares its draft model, in which the other ranks take no part."""
    speculate = write_mtp(tmp_path)
    settings = SETTINGS | {"speculate": speculate, "tp": 2, "graphs": True, "max_running": 8}
    config = EngineConfig.build(str(tmp_path / "model"), **settings)
    ranks = DeviceThreadRanks(config)
    engine = draft_always(ranks, config)
    engine.runner.run_uncaptured_once()
    while engine.prepare_next():
        pass
    run_engine(engine, submissions()[:2])
    engine.close()
    leader, other = (part.runner for part in ranks.parts)
    assert list(leader._graphs.captured) == list(other._graphs.captured)
    assert leader._drafting is not None and leader._drafting.num_prepared and other._drafting is None
    stats = engine.scheduler.drafter.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 20


def load_rank_models(config: EngineConfig) -> list[DeviceRankModel]:
    def connect(name: str, rank: int, size: int) -> LoneRank:
        return LoneRank(rank, size)

    return [load_host_rank_model(config, Layout(2), rank, connect, (8 << 30, 0)) for rank in range(2)]


def test_memory_of_a_draft_model_is_counted(tmp_path: Path) -> None:
    """It is the leader's: its weights, the embedding and output head that no rank has whole, and its KV blocks."""
    speculate = write_mtp(tmp_path)
    config = EngineConfig.build(str(tmp_path / "model"), **SETTINGS | {"kv_memory": None, "tp": 2})
    plain, drafting = load_rank_models(config), load_rank_models(config.with_settings(speculate=speculate))
    head = drafting[0].planned.draft
    assert isinstance(head, MTPHead) and drafting[1].planned.draft is None
    leader, other, bare = (part.describe() for part in (*drafting, plain[0]))
    assert leader.weight_bytes - bare.weight_bytes == head.weight_bytes > 2 * VOCAB_SIZE * head.config.hidden * 4
    assert leader.block_bytes == bare.block_bytes, "tiers keep no blocks of the draft model"
    assert leader.draft_block_bytes == 2 * head.config.kv_heads * head.config.head_dim * 8 * 4
    assert not other.draft_block_bytes and leader.max_blocks < other.max_blocks
    plan = drafting[0].planned.plan
    used = plan.kv_blocks * (leader.block_bytes + leader.draft_block_bytes)
    assert used == plan.kv_bytes


@pytest.mark.parametrize(
    "write", [write_eagle, write_same_model, write_mtp, write_latent_mtp, write_separate_mtp, write_wide]
)
def test_planned_memory_is_that_of_a_loaded_draft_model(write: Callable[[Path], str], tmp_path: Path) -> None:
    """Before anything is loaded, as `emberline doctor` plans it."""
    speculate = write(tmp_path)
    settings = SETTINGS | {"kv_memory": None, "tp": 2, "speculate": speculate}
    config = EngineConfig.build(str(tmp_path / "model"), **settings)
    checkpoint = Checkpoint.open(tmp_path / "model")
    model, planned = ModelConfig.from_checkpoint(checkpoint), load_rank_models(config)[0].planned
    loaded = measure_draft_model(planned.draft)
    estimate = estimate_draft_memory(config, checkpoint, model, "float32")
    assert estimate == replace(loaded, weight_bytes=estimate.weight_bytes)
    assert estimate.weight_bytes == pytest.approx(loaded.weight_bytes, rel=0.03)  # kernels of a CPU pad matrices
    leader, other = plan_ranks(checkpoint, model, config, 8 << 30, "float32")
    assert (leader.ranks, other.ranks) == ((0,), (1,)) and leader.plan.kv_tokens == other.plan.kv_tokens
    assert leader.plan.kv_blocks == pytest.approx(planned.plan.kv_blocks, rel=0.01)
    assert leader.plan.weights == pytest.approx(planned.plan.weights, rel=0.03) and loaded.weight_bytes


@pytest.mark.parametrize("write", [write_eagle, write_mtp])
def test_a_gpu_loads_the_whole_embedding_for_a_head(write: Callable[[Path], str], tmp_path: Path) -> None:
    """Its values come from the files of the target model, of which the rank itself has a half."""
    speculate = write(tmp_path)
    config = EngineConfig.build(str(tmp_path / "model"), **SETTINGS | {"tp": 2, "speculate": speculate})
    planned = load_rank_models(config)[0].planned
    head = load_draft_model_on_gpu(
        config, Checkpoint.open(tmp_path / "model"), planned.model, HostDevice(), packed=False
    )
    assert isinstance(head, Eagle3Head | MTPHead) and isinstance(head.embedding, Tensor)
    stored = load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(head.embedding, stored) and len(planned.model.embedding) < len(stored)
    assert head.weight_bytes == pytest.approx(measure_draft_model(planned.draft).weight_bytes, rel=0.03)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let LLM start the processes of an engine on simulated GPUs."""

    def boot_on_gpus(config: Any) -> LoadedEngine:
        return device_boot.boot_device_ranks(config.with_gpu_defaults())

    with monkeypatch.context() as patch:
        simulate_gpus(patch.setattr)
        patch.setattr(device_boot, "RankGroup", partial(RankGroup, command=COMMAND))
        patch.setattr(llm_module, "boot", boot_on_gpus)
        patch.setenv(FAILURE_FILE, str(tmp_path / "failure"))
        yield


@pytest.mark.usefixtures("gpus")
def test_processes_of_ranks(tmp_path: Path) -> None:
    speculate, prompts = write_mtp(tmp_path), ["some text", "some text that is longer"]
    settings = {name: value for name, value in SETTINGS.items() if name not in ("device", "threads", "block_size")}
    config = EngineConfig.build(str(tmp_path / "model"), **SETTINGS)
    expected = run_engine(boot(config).engine, [Submission(str(i), encode(p), GREEDY) for i, p in enumerate(prompts)])
    with LLM(tmp_path / "model", **settings, kv_host_memory=1 << 20, tp=2, speculate=speculate) as llm:
        assert llm.engine.scheduler.drafter is not None
        llm.engine.scheduler.drafter._adaptive = False
        found = [each.tokens for each in llm.generate(prompts, GREEDY, progress=False)]
        leader, other = llm.loaded.ranks
        stats = llm.engine.scheduler.drafter.stats()
    assert found == list(expected.values())
    assert stats.accepted_tokens == stats.drafted_tokens > 20
    assert leader.weight_bytes > other.weight_bytes and leader.kv_bytes > other.kv_bytes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pp": 2, "speculate": "mtp"}, r"speculate does not work with 2 ranks \(tp 1, pp 2\) on GPUs"),
        ({"tp": 2, "pp": 2, "speculate": "draft:x"}, r"speculate does not work with 4 ranks"),
        ({"tp": 2, "dp_attention": True, "speculate": "eagle3:x"}, "dp_attention is set, and a draft model does not"),
    ],
)
def test_layouts_that_do_not_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_device_settings(EngineConfig.build("model", **settings), 4)
    assert caught.value.param == "speculate"
