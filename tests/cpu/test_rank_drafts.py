"""Speculation on several ranks: the same tokens as one rank without drafts, and the drafts that one rank makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_experts
from bytelevel import EOS, VOCAB_SIZE, encode, tokenizer_file
from eagle3_head import write_eagle3_head
from engine_runs import run_engine
from mtp_head import add_tensors, make_counting_tensors
from rank_engines import ThreadRanks, make_thread_engine
from rank_models import WRITERS
from recorded_drafts import record_drafts

from emberline.core.engine_config import EngineConfig
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.models.mtp import MTPHead

SETTINGS: dict[str, Any] = {
    "device": "cpu", "threads": 1, "dtype": "float32", "kv_memory": 1 << 21, "block_size": 8, "max_context": 128,
    "max_batch_tokens": 64, "max_running": 4, "max_draft": 3,
}  # fmt: skip
SIZES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "max_position_embeddings": 128}
LAYOUTS: list[dict[str, int]] = [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}]
TEXTS = ["some text", "some text that is quite a lot longer than one chunk of a prompt", "x", "some text that is"]
Drafts = dict[str, dict[int, list[int]]]  # by submission and number of known tokens


def submissions(**params: Any) -> list[Submission]:
    sampling = SamplingParams(**{"max_tokens": 20, "temperature": 0.0, "ignore_eos": True, **params})
    return [Submission(f"r{i}", encode(text), sampling) for i, text in enumerate(TEXTS)]


def run_with_drafts(engine: Engine, pending: list[Submission]) -> tuple[dict[str, list[int]], Drafts, int, int]:
    """Return the tokens, the drafts of a draft model, and the numbers of drafted and accepted tokens."""
    drafts: Drafts = defaultdict(dict)
    drafter = engine.scheduler.drafter
    assert drafter is not None
    drafter._adaptive = False  # otherwise the number of drafts depends on times
    record_drafts(engine, drafts)
    tokens = run_engine(engine, pending)
    engine.close()
    return tokens, dict(drafts), drafter.drafted_tokens, drafter.accepted_tokens


def write_llama(directory: Path) -> dict[str, Any]:
    config = tiny.config("llama", **SIZES, num_attention_heads=8, num_hidden_layers=3)
    tokenizer_file(tiny.write(directory, config))
    return config


def write_eagle(directory: Path) -> str:
    config = write_llama(directory / "model")
    return f"eagle3:{write_eagle3_head(directory / 'head', config, draft_vocab=100)}"


def write_same_model(directory: Path) -> str:
    write_llama(directory / "model")
    return f"draft:{directory / 'model'}"


def write_mtp(directory: Path) -> str:
    sizes = SIZES | {"num_hidden_layers": 2, "num_nextn_predict_layers": 1, "n_group": 3, "topk_group": 2}
    config = tiny_experts.glm4(attention_bias=True, use_qk_norm=True, **sizes)
    tiny_experts.write(directory / "model", config)
    tokenizer_file(directory / "model")
    add_tensors(directory / "model", make_counting_tensors(directory / "model", config, "hidden state"))
    return "mtp"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("write", [write_eagle, write_same_model, write_mtp])
def test_draft_models(write: Callable[[Path], str], layout: dict[str, int], tmp_path: Path) -> None:
    """The leader's draft model makes the drafts that it makes on one rank, from hidden states of all stages."""
    speculate = write(tmp_path)
    config = EngineConfig.build(str(tmp_path / "model"), **SETTINGS)
    pending = submissions()
    expected = run_engine(boot(config).engine, pending)
    alone = run_with_drafts(boot(config.with_settings(speculate=speculate)).engine, pending)
    tokens, drafts, drafted, accepted = run_with_drafts(
        make_thread_engine(config.with_settings(speculate=speculate, **layout)), pending
    )
    assert tokens == expected == alone[0]
    assert sum(map(len, drafts.values())) > 10
    for name, found in drafts.items():
        for known, draft in found.items():
            other = alone[1][name].get(known, draft)
            assert draft[: len(other)] == other[: len(draft)], (name, known)
    if write is not write_eagle:  # a random head is hardly ever right
        assert accepted == drafted > 20


def test_prediction_is_drafted_with_several_stages(tmp_path: Path) -> None:
    """Stages keep computing different requests: a plan does not wait for drafts of another one."""
    write_llama(tmp_path)
    config = EngineConfig.build(str(tmp_path), **SETTINGS)
    expected = run_engine(boot(config).engine, submissions(max_tokens=30))
    guesses = {name: tuple(t if i % 7 != 3 else 3 for i, t in enumerate(found)) for name, found in expected.items()}
    pending = [replace(each, prediction=guesses[each.id]) for each in submissions(max_tokens=30)]
    engine = make_thread_engine(config.with_settings(pp=2, speculate="ngram"))
    depths: list[int] = []
    collect = engine._collect_outputs
    engine._collect_outputs = lambda: depths.append(len(engine._in_flight)) or collect()  # type: ignore[method-assign,func-returns-value]
    tokens, _, drafted, accepted = run_with_drafts(engine, pending)
    assert tokens == expected and drafted > accepted > 40
    assert sum(depths[:12]) >= 10  # after the oldest plan has ended, the other one is mostly still running


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
@pytest.mark.parametrize("name", ["delta-dense", "delta-moe"])
def test_drafts_with_recurrent_layers(name: str, layout: dict[str, int], tmp_path: Path) -> None:
    """Ranks keep the rows of drafted tokens, so that states advance over accepted ones only."""
    WRITERS[name](tmp_path)
    config = EngineConfig.build(str(tmp_path), **SETTINGS | {"max_context": 64})
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    pending = [Submission(f"r{i}", [5, 9, 17 + i, 4, 80][: 3 + i], sampling) for i in range(3)]
    expected = run_engine(boot(config).engine, pending)
    guesses = {each: tuple(t if i % 5 != 3 else 3 for i, t in enumerate(found)) for each, found in expected.items()}
    pending = [replace(each, prediction=guesses[each.id]) for each in pending]
    engine = make_thread_engine(config.with_settings(speculate="ngram", **layout))
    tokens, _, drafted, accepted = run_with_drafts(engine, pending)
    assert tokens == expected and drafted > accepted > 20


def test_memory_of_a_draft_model_is_counted(tmp_path: Path) -> None:
    """It is the leader's: its weights, the embedding and output head that no rank has whole, and its KV blocks."""
    assert write_mtp(tmp_path) == "mtp"
    config = EngineConfig.build(str(tmp_path / "model"), **SETTINGS, tp=2)
    plain, drafting = ThreadRanks(config), ThreadRanks(config.with_settings(speculate="mtp"))
    head = drafting.leader.draft_model
    assert isinstance(head, MTPHead)
    leader, bare = drafting.leader.describe(), plain.leader.describe()
    assert leader.weight_bytes - bare.weight_bytes == head.weight_bytes
    assert head.weight_bytes > 2 * VOCAB_SIZE * head.config.hidden * 4
    assert leader.block_bytes > bare.block_bytes and drafting.sizes[0] < plain.sizes[0]
    for ranks in (plain, drafting):
        ranks.close()
