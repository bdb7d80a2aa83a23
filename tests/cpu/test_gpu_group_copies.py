"""Layers with a window on the runner for GPUs, on the CPU: tiers, sleep and handoff keep the tokens."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tiny
import tiny_families
import torch
from gpu_settings import gpu_config

from emberline.core.engine_config import SchedulerConfig
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.core.transfer_config import TransferConfig
from emberline.engine.engine import Engine
from emberline.engine.gpu.boot import make_region, make_tiers
from emberline.engine.gpu.device import HostDevice
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.gpu.swap import reset_prefix_cache
from emberline.engine.sampler import SamplingStateFactory
from emberline.kv.cache import KVCache, KVShape
from emberline.kv.layer_groups import LayerGroups
from emberline.kv.tiers.base import Tier, buffer_bytes_for
from emberline.kv.tiers.disk import DiskTier
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.stack import TierStack
from emberline.kv.transfer.endpoint import TransferEndpoint
from emberline.models.decoder import DecoderModel
from emberline.models.loader import load_decoder

BLOCK, CONTEXT, WINDOW = 8, 128, 17
PROMPT = [(31 * i) % 83 + 3 for i in range(75)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    # With a tied head, a tiny Gemma repeats its last token, whatever it attends to.
    changes = {"max_position_embeddings": CONTEXT, "sliding_window": WINDOW, "tie_word_embeddings": False}
    config = tiny_families.CONFIGS["gemma3"] | changes
    return load_decoder(
        tiny.write_tensors(tmp_path_factory.mktemp("model"), config, tiny_families.tensors(config)), "bfloat16"
    )


def make_stack(disk: Path | None, layout: str, shape: KVShape, snapshot_blocks: int) -> TierStack:
    size = shape.block_bytes
    below: list[Tier] = [DiskTier(disk, layout, size, 1 << 24)] if disk is not None else []
    return TierStack(HostTier(size, 400 * buffer_bytes_for(size)), below)


def make_engine(
    model: DecoderModel, *, tiers: bool = False, disk: Path | None = None, name: str | None = None, blocks: int = 90
) -> Engine:
    c, groups = model.config, LayerGroups.for_windows(model.config.windows)
    assert len(groups.windows) > 1
    cache = KVCache(KVShape(groups.block_layers, c.kv_heads, c.head_dim, BLOCK, torch.bfloat16), blocks)
    transfer = TransferConfig(name) if name else None
    limits = {"max_running": 4, "max_batch_tokens": 16}
    settings = gpu_config(**limits, kv_host_memory=1 << 20 if tiers else None, transfer=transfer)
    device, rows = HostDevice(), SamplingStateFactory(frozenset(), None)
    runner = GPURunner(model, cache, frozenset(), rows, settings, device, CONTEXT, None, groups)
    config = SchedulerConfig(**limits, block_size=BLOCK, max_context=CONTEXT)
    stack = make_tiers(runner, partial(make_stack, disk)) if tiers else None
    endpoint = TransferEndpoint.open(transfer, make_region(runner, device)) if transfer is not None else None
    return Engine(config, runner, tiers=stack, transfer_endpoint=endpoint)


def run(e: Engine, submission: Submission | None = None, background: Engine | None = None) -> tuple[list[int], int]:
    if submission is not None:
        e.add(submission)
    tokens, cached, ends = list[int](), 0, time.monotonic() + 60
    while not e.idle:
        assert time.monotonic() < ends
        for output in e.step():
            assert output.error is None
            tokens += output.tokens
            cached += output.cached_tokens
        e.kv.check_invariants()
        if background is not None:
            background.step()
    if e.kv.tiers is not None:
        assert e.kv.tiers.wait_until_written(20.0)
    return tokens, cached


def ask(seed: int = 0) -> Submission:
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    return Submission(f"r{seed}", [(token + seed) % 83 + 3 for token in PROMPT], params, timeout=60.0)


def test_tiers_and_sleep(model: DecoderModel, tmp_path: Path) -> None:
    expected, _ = run(make_engine(model), ask())
    e = make_engine(model, tiers=True, disk=tmp_path)
    assert run(e, ask()) == (expected, 0)
    for seed in range(1, 5):
        run(e, ask(seed))
    assert run(e, ask()) == (expected, 72)
    assert e.stats().tiers["host"].hit_tokens == 72
    reset_prefix_cache(e)  # as a model that sleeps and wakes
    assert run(e, ask()) == (expected, 72)
    assert e.stats().tiers["host"].hit_tokens == 144
    e.close()
    after = make_engine(model, tiers=True, disk=tmp_path)
    assert run(after, ask()) == (expected, 72)
    after.close()


def test_handoff(model: DecoderModel) -> None:
    expected, _ = run(make_engine(model), ask())
    p, d = make_engine(model, name="p"), make_engine(model, name="d")
    p.add(replace(ask(), publish=True))
    while not (outputs := p.step()):
        pass
    assert outputs[0].ticket is not None and outputs[0].finish is None
    tokens, _ = run(d, replace(ask(), source=outputs[0].ticket), p)
    assert tokens == expected
    transfer = d.stats().transfer
    assert transfer is not None and transfer.hit_tokens == 72 and transfer.pull_failures == {}
    run(p)
    for one in (p, d):
        one.close()
