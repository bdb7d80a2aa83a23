"""Layers with an attention window have block tables of their own: the same tokens, in less memory."""

from __future__ import annotations

import pytest
import random_checkpoints
import tiny
import tiny_families
import torch

from emberline.core.engine_config import SchedulerConfig, SpeculationConfig
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.runner import TorchRunner
from emberline.engine.speculation.make_drafter import make_drafter
from emberline.kv.cache import KVCache, KVShape
from emberline.kv.layer_groups import LayerGroups
from emberline.models.decoder import DecoderModel
from emberline.models.loader import load_decoder

BLOCK, CONTEXT = 8, 256


@pytest.fixture(scope="module", params=["gemma3", "cohere2", "olmo3", "gpt-oss", "llama4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    directory = tmp_path_factory.mktemp("model")
    if request.param in random_checkpoints.CASES:  # sinks beside windows, and chunks instead of windows
        random_checkpoints.write(directory, request.param, max_position_embeddings=CONTEXT)
    else:
        # With a tied head, a tiny Gemma repeats its last token, whatever it attends to.
        changes = {"max_position_embeddings": CONTEXT, "tie_word_embeddings": False}
        config = tiny_families.CONFIGS[request.param] | changes
        tiny.write_tensors(directory, config, tiny_families.tensors(config))
    return load_decoder(directory, "bfloat16")


def make_engine(
    model: DecoderModel,
    blocks: int = 400,
    *,
    grouped: bool = True,
    budget: int = 64,
    drafts: bool = False,
    **more: bool,
) -> Engine:
    c = model.config
    groups = LayerGroups.for_windows(c.windows) if grouped else LayerGroups.single(c.layers)
    cache = KVCache(KVShape(groups.block_layers, c.kv_heads, c.head_dim, BLOCK, torch.bfloat16), blocks)
    config = SchedulerConfig(
        block_size=BLOCK, max_batch_tokens=budget, max_running=8, max_context=CONTEXT, **({"prefix_cache": True} | more)
    )
    drafter = make_drafter(SpeculationConfig("ngram", 4), lambda: None) if drafts else None
    return Engine(config, TorchRunner(model, cache, frozenset(), groups=groups), drafter=drafter)


def run(e: Engine, pending: list[Submission], steps_between: int = 0) -> dict[tuple[str, int], list[int]]:
    outputs: list[Output] = []
    for submission in pending:
        e.add(submission)
        for _ in range(steps_between):
            outputs += e.step()
            e.kv.check_invariants()
    while not e.idle:
        outputs += e.step()
        e.kv.check_invariants()
    tokens: dict[tuple[str, int], list[int]] = {}
    for output in outputs:
        assert output.error is None, output.error
        tokens.setdefault((output.id, output.index), []).extend(output.tokens)
    return tokens


def make_submissions(count: int = 6, **params: object) -> list[Submission]:
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(3, 90, (48,), generator=generator).tolist()
    lengths = [5, 60, 100, 48, 130, 81][:count]
    return [
        Submission(
            f"r{i}",
            (shared + torch.randint(3, 90, (length,), generator=generator).tolist())[:length],
            SamplingParams(max_tokens=30, temperature=float(i % 2), seed=i, ignore_eos=True, **params),  # type: ignore[arg-type]
        )
        for i, length in enumerate(lengths)
    ]


def test_tokens_are_those_of_one_group(model: DecoderModel) -> None:
    expected: dict[tuple[str, int], list[int]] = {}
    for submission in make_submissions():
        expected |= run(make_engine(model, grouped=False, prefix_cache=False), [submission])
    assert len(LayerGroups.for_windows(model.config.windows).windows) > 1
    variants = {
        "together": (make_engine(model), 0),
        "chunked": (make_engine(model, budget=16), 2),
        "without prefix cache": (make_engine(model, prefix_cache=False), 1),
        "drafted": (make_engine(model, drafts=True), 1),
    }
    for name, (e, between) in variants.items():
        assert run(e, make_submissions(), between) == expected, name
    again = make_engine(model)
    assert run(again, make_submissions()) == expected
    hits = again.kv.hit_tokens
    renamed = [Submission(f"again-{s.id}", s.prompt, s.params) for s in make_submissions()]
    assert {(k[0].removeprefix("again-"), k[1]): v for k, v in run(again, renamed).items()} == expected
    assert again.kv.hit_tokens - hits > 300


def test_tokens_after_preemptions(model: DecoderModel) -> None:
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=4, ignore_eos=True)
    submissions = [Submission(f"r{i}", [3 + i, *range(10, 30)], params) for i in range(8)]
    expected = run(make_engine(model, grouped=False), submissions)
    windows = len(LayerGroups.for_windows(model.config.windows).windows) - 1
    tight = make_engine(model, blocks=40 + 24 * windows, budget=32)
    assert run(tight, submissions) == expected
    assert tight.scheduler.preemptions > 0


def test_choices_share_the_prompt(model: DecoderModel) -> None:
    expected = run(make_engine(model, grouped=False), make_submissions(3, n=3))
    assert run(make_engine(model), make_submissions(3, n=3)) == expected


def test_passed_blocks_are_free_for_others(model: DecoderModel) -> None:
    """A request longer than the windows holds all blocks of full layers, and few of the others."""
    groups, window = LayerGroups.for_windows(model.config.windows), max(model.config.windows)
    e = make_engine(model, prefix_cache=False, budget=16)
    e.add(
        Submission(
            "long", [5 + i % 80 for i in range(200)], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        )
    )
    most = 0
    while not e.idle:
        e.step()
        most = max(most, e.kv.num_blocks - e.kv.num_free_blocks)
    kept = -(-(window + 2 * 16) // BLOCK) + 2
    assert most <= -(-220 // BLOCK) + kept * (len(groups.windows) - 1) < len(groups.windows) * -(-220 // BLOCK)
    assert e.kv.num_free_blocks == e.kv.num_blocks
