"""Layers are divided into stages by how long they take, and every stage fits into its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_runs import run_engine
from rank_engines import make_thread_engine
from rank_models import WRITERS

from emberline.core.engine_config import EngineConfig
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.admission import WaitingQueue
from emberline.engine.boot import boot
from emberline.engine.pacing import PromptBacklog, max_prompt_tokens
from emberline.engine.ranks import stage_costs
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.stage_costs import ComponentCost, ModelCosts, RankMemory, choose_stages, measure_costs
from emberline.engine.request_builder import RequestBuilder
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig

SETTINGS: dict[str, Any] = {"device": "cpu", "threads": 1, "dtype": "float32", "block_size": 8, "max_context": 64}
LARGE = RankMemory(all_bytes=1000, kv_bytes=1000, num_blocks=1)


def make_costs(layers: list[float], embedding: float = 0.0, head: float = 0.0) -> ModelCosts:
    """Return costs with these seconds; each layer has 10 bytes of weights, and 5 in a KV block."""
    return ModelCosts(
        tuple(ComponentCost(each, 10, 5) for each in layers), ComponentCost(embedding, 100), ComponentCost(head, 100)
    )


def test_the_slowest_stage_is_as_fast_as_possible() -> None:
    costs = make_costs([1.0] * 10, embedding=0.5, head=4.0)
    assert costs.split(2, LARGE) == (7, 3)
    assert costs.stage_shares((7, 3)) == pytest.approx([7.5 / 14.5, 7.0 / 14.5])
    assert make_costs([5.0, 1.0, 1.0, 1.0, 1.0, 1.0]).split(2, LARGE) == (1, 5)


def test_every_stage_fits_into_its_memory() -> None:
    costs = make_costs([1.0] * 10, head=4.0)
    assert costs.split(2, RankMemory(all_bytes=195, kv_bytes=1000, num_blocks=1)) == (6, 4)  # 100 + 6 * 15
    assert costs.split(2, RankMemory(all_bytes=1000, kv_bytes=50, num_blocks=2)) == (5, 5)  # 5 * 2 * 5


@pytest.mark.parametrize("name", ["llama", "gemma3", "delta-moe", "deepseek_v3"])
def test_each_kind_of_layer_is_timed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds differ by window, recurrence and experts. Of each, one layer is loaded."""
    monkeypatch.setattr(stage_costs, "MAX_REPEATS", 1)
    WRITERS[name](tmp_path)
    model = ModelConfig.from_checkpoint(Checkpoint.open(tmp_path))
    config = EngineConfig.build(str(tmp_path), **SETTINGS, tp=2, pp=2)
    costs = measure_costs(config, Layout.from_config(config.parallel))
    assert len(costs.layers) == model.layers and all(each.seconds > 0 for each in costs.layers)
    sparse = model.experts.layers if model.experts else (False,) * model.layers
    states = [layer in model.parts.attention.state_layers for layer in range(model.layers)]
    kinds = dict(zip(zip(model.windows, states, sparse, strict=True), costs.layers, strict=True))
    assert len(set(costs.layers)) == len(kinds)
    assert costs.head.weight_bytes > costs.embedding.weight_bytes // 2 > 0


def test_stages_chosen_by_hand_compute_the_same_tokens(tmp_path: Path) -> None:
    WRITERS["llama"](tmp_path)
    layers = ModelConfig.from_checkpoint(Checkpoint.open(tmp_path)).layers
    config = EngineConfig.build(str(tmp_path), **SETTINGS, kv_memory=1 << 20)
    pending = [Submission(f"r{i}", [5, 6, 7 + i], SamplingParams(max_tokens=6, seed=i)) for i in range(3)]
    staged = config.with_settings(pp=2, pp_layers=f"{layers - 1},1")
    layout, shares = choose_stages(
        staged, Layout.from_config(staged.parallel), ModelConfig.from_checkpoint(Checkpoint.open(tmp_path))
    )
    assert layout.stage_layers == (layers - 1, 1) and sum(shares) == pytest.approx(1.0)
    engine = make_thread_engine(staged)
    assert run_engine(engine, pending) == run_engine(boot(config).engine, pending)
    engine.close()


def test_prompts_are_computed_in_smaller_steps_with_several_stages() -> None:
    """Their sizes are about equal: a stage waits while another one computes a longer step."""

    def limit(max_batch_tokens: int, planned: int, num_stages: int, prompt_len: int) -> int:
        submission = Submission("r", [1] * prompt_len, SamplingParams(max_tokens=1))
        (request,) = RequestBuilder(1 << 20, 2, can_publish=False).build(submission, 0.0)
        prompts = PromptBacklog([request], WaitingQueue(ageing_seconds=10.0), num_startable=0, now=0.0)
        return max_prompt_tokens(max_batch_tokens, planned, num_stages, prompts)

    assert limit(512, 16, num_stages=1, prompt_len=2000) == 496
    assert [limit(512, 8, num_stages=2, prompt_len=n) for n in (9000, 400, 100)] == [128, 25, 16]
    assert limit(512, 60, num_stages=2, prompt_len=100) == 60
    assert limit(16, 15, num_stages=2, prompt_len=20) == 1
    assert limit(1, 0, num_stages=4, prompt_len=20) == 1
