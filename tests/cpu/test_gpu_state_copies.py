"""Recurrent states on the runner for GPUs, on the CPU: tiers, sleep and handoff keep the tokens, without races."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_delta
import torch
from gpu_settings import gpu_config
from race_detector import RaceDetector

from emberline.core.engine_config import SchedulerConfig
from emberline.core.params import SamplingParams
from emberline.core.plan import StateWork, WorkItem
from emberline.core.request import Priority, Submission
from emberline.core.transfer_config import TransferConfig
from emberline.engine import memory
from emberline.engine.engine import Engine
from emberline.engine.gpu.boot import make_region, make_tiers
from emberline.engine.gpu.device import HostDevice
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.gpu.state_copies import DeviceStateCopies
from emberline.engine.gpu.swap import reset_prefix_cache
from emberline.engine.kv_shape import make_kv_shape, make_state_shape
from emberline.engine.sampler import SamplingStateFactory
from emberline.kv.cache import KVCache, KVShape, StateCache, StateShape
from emberline.kv.layer_groups import LayerGroups
from emberline.kv.state_manager import StateKVManager
from emberline.kv.tiers.base import Tier, buffer_bytes_for
from emberline.kv.tiers.disk import DiskTier
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.stack import TierStack
from emberline.kv.transfer.endpoint import TransferEndpoint
from emberline.models.decoder import DecoderModel
from emberline.models.loader import load_decoder

BLOCK, CONTEXT = 8, 128
PROMPT = [(31 * i) % 83 + 3 for i in range(75)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_decoder(
        tiny_delta.write_random(tmp_path_factory.mktemp("model"), tiny_delta.make_config("next")), "float32"
    )


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scratch memory hold two blocks, so that the pages of a slot need several pieces."""
    monkeypatch.setattr(memory, "COPY_PIECE_BYTES", 2 * 4096)


class DeviceEngine:
    def __init__(
        self, model: DecoderModel, *, tiers: bool = False, disk: Path | None = None, name: str = "",
        blocks: int = 60, slots: int = 6, pins: bool = True,
    ) -> None:  # fmt: skip
        c, shape = model.config, make_state_shape(model.config)
        assert shape is not None
        groups = LayerGroups.with_states(c.layers, c.parts.attention.state_layers)
        self.cache = KVCache(make_kv_shape(c, BLOCK, torch.bfloat16, groups), blocks)
        self.states = StateCache(shape, slots, has_padding_slot=True)
        self.states.conv[:, :slots] = self.states.matrices[:, :slots] = float("nan")
        transfer, limits = TransferConfig(name) if name else None, {"max_running": 2, "max_batch_tokens": 32}
        settings = gpu_config(**limits, kv_host_memory=1 << 20 if tiers else None, transfer=transfer)
        # A handoff uses threads, which the race detector cannot follow.
        self.device = HostDevice() if name else RaceDetector(pins=pins)
        rows = SamplingStateFactory(frozenset(), None)
        runner = GPURunner(
            model, self.cache, frozenset(), rows, settings, self.device, CONTEXT, None, groups, self.states
        )
        stack = make_tiers(runner, partial(self.make_stack, disk)) if tiers else None
        if isinstance(self.device, RaceDetector):
            self.device.watch(None if stack is None else stack.host.memory, kept=runner.device_buffers())
        endpoint = TransferEndpoint.open(transfer, make_region(runner, self.device)) if transfer is not None else None
        config = SchedulerConfig(**limits, block_size=BLOCK, max_context=CONTEXT)
        self.engine = Engine(config, runner, tiers=stack, transfer_endpoint=endpoint)
        self.pages = runner.pages_per_slot

    @staticmethod
    def make_stack(disk: Path | None, layout: str, shape: KVShape, snapshot_blocks: int) -> TierStack:
        size = shape.block_bytes
        below: list[Tier] = [DiskTier(disk, layout, size, 1 << 24)] if disk is not None else []
        host = HostTier(size, 400 * buffer_bytes_for(size))
        return TierStack(host, below, snapshot_blocks=snapshot_blocks)

    @property
    def kv(self) -> StateKVManager:
        assert isinstance(self.engine.kv, StateKVManager)
        return self.engine.kv

    def step(self) -> list[Any]:
        with self.device if isinstance(self.device, RaceDetector) else nullcontext():
            outputs = self.engine.step()
        self.kv.check_invariants()
        assert isinstance(self.device, HostDevice) or self.device.races == []
        return outputs

    def run(self, *submissions: Submission, background: DeviceEngine | None = None) -> tuple[dict[str, list[int]], int]:
        for submission in submissions:
            self.engine.add(submission)
        tokens, cached, ends = {s.id: list[int]() for s in submissions}, 0, time.monotonic() + 60
        while not self.engine.idle:
            assert time.monotonic() < ends
            for output in self.step():
                assert output.error is None
                tokens.setdefault(output.id, []).extend(output.tokens)
                cached += output.cached_tokens
            if background is not None:
                background.step()
        if self.kv.tiers is not None:
            assert self.kv.tiers.wait_until_written(20.0)
        return tokens, cached


def ask(seed: int = 0, length: int = 75, max_tokens: int = 30) -> Submission:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Submission(f"r{seed}", [(token + seed) % 83 + 3 for token in PROMPT[:length]], params, timeout=60.0)


@pytest.fixture(scope="module")
def expected(model: DecoderModel) -> dict[str, list[int]]:
    return {name: tokens for seed in range(5) for name, tokens in DeviceEngine(model).run(ask(seed))[0].items()}


@pytest.mark.parametrize("pins", [True, False])
def test_tiers_and_sleep(model: DecoderModel, expected: dict[str, list[int]], tmp_path: Path, pins: bool) -> None:
    e = DeviceEngine(model, tiers=True, disk=tmp_path, pins=pins)
    assert e.pages > 2
    assert e.run(ask()) == ({"r0": expected["r0"]}, 0)
    for seed in range(1, 5):
        assert e.run(ask(seed))[0] == {f"r{seed}": expected[f"r{seed}"]}
    loaded = e.engine.stats().tiers["host"].loaded_blocks
    assert e.run(ask()) == ({"r0": expected["r0"]}, 72)
    assert e.engine.stats().tiers["host"].loaded_blocks - loaded >= e.pages
    e.states.conv.fill_(float("nan"))  # as a model that sleeps and wakes
    e.states.matrices.fill_(float("nan"))
    reset_prefix_cache(e.engine)
    e.states.conv[:, e.states.padding_slot] = e.states.matrices[:, e.states.padding_slot] = 0
    assert e.run(ask()) == ({"r0": expected["r0"]}, 72)
    e.engine.close()
    after = DeviceEngine(model, tiers=True, disk=tmp_path, pins=pins)
    assert after.run(ask()) == ({"r0": expected["r0"]}, 72)
    assert after.engine.stats().tiers["disk"].loaded_blocks == 9 + after.pages
    after.engine.close()


def test_preempted_requests_reload_their_states(model: DecoderModel, expected: dict[str, list[int]]) -> None:
    tight = DeviceEngine(model, tiers=True, blocks=30, slots=3)
    tight.engine.add(replace(ask(), priority=Priority.BATCH))
    early = [token for _ in range(12) for output in tight.step() for token in output.tokens]
    scheduler = tight.engine.scheduler
    scheduler._preempt_request(scheduler.requests["r0#0"])
    tokens, _ = tight.run(*(ask(seed) for seed in range(1, 4)))  # these come first, and need all slots
    tokens["r0"][:0] = early
    assert tokens == {f"r{i}": expected[f"r{i}"] for i in range(4)}
    assert tight.engine.stats().tiers["host"].hit_tokens >= 64
    tight.engine.close()


def test_handoff(model: DecoderModel, expected: dict[str, list[int]]) -> None:
    """States pass through KV blocks. Later requests use these for keys and values, and must not read the states."""
    p, d = DeviceEngine(model, name="p"), DeviceEngine(model, name="d", blocks=30)
    for turn in range(3):
        submission = replace(ask(turn), salt=str(turn))
        p.engine.add(replace(submission, publish=True))
        while not (outputs := p.step()):
            pass
        assert outputs[0].ticket is not None and outputs[0].finish is None
        before = d.engine.stats().transfer
        tokens, _ = d.run(replace(submission, source=outputs[0].ticket), background=p)
        assert tokens == {f"r{turn}": expected[f"r{turn}"]}
        after = d.engine.stats().transfer
        assert before is not None and after is not None and after.pull_failures == {}
        assert after.hit_tokens - before.hit_tokens == 72
        p.run()
    used = sorted(d.kv._blocks_with_states)
    for part in d.cache.tensors:
        part[:, used] = float("nan")
    for length in (9, 17):  # these need blocks that had states, and do not fill them all
        d.run(replace(ask(3, length, 1), salt=str(length)))
    left = sorted(d.kv._blocks_with_states)
    assert len(left) < len(used)
    for part in d.cache.tensors:
        part[:, left] = 0
    assert all(part.isfinite().all() for part in d.cache.tensors), "blocks with keys and values have only these"
    assert d.run(replace(ask(4), salt="x"))[0] == {"r4": expected["r4"]}
    for one in (p, d):
        one.engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_states_in_blocks_of_any_dtype(dtype: torch.dtype) -> None:
    """States pass through KV blocks of one engine to a slot of another. Pages end within the states of a layer."""
    random = torch.Generator().manual_seed(2)
    shape, kv = StateShape(3, 3, 10, 2, 5, 7), KVShape(2, 1, 16, 4, dtype)
    states, cache = StateCache(shape, 3, has_padding_slot=True), KVCache(kv, 20)
    for tensor in (states.conv, states.matrices):
        tensor.copy_(torch.randn(tensor.shape, generator=random))
    copies = DeviceStateCopies(states, cache)
    blocks = [7, 3, 11, 5, 9, 2, 4, 6, 8][: copies.pages.per_slot]
    assert 1 < copies.pages.per_slot == len(blocks)
    make = partial(WorkItem, "r", 8, [1], blocks, True)
    copies.begin_step([make(state=StateWork(0), published_states=blocks)])
    copies.begin_step([make(state=StateWork(2), arrived_states=blocks)])
    for tensor in (states.conv, states.matrices):
        assert torch.equal(tensor[:, 2], tensor[:, 0]) and not torch.equal(tensor[:, 2], tensor[:, 1])
    copies.clear_blocks([make(cleared_blocks=blocks[1:])])
    for part in cache.tensors:
        assert not part[:, blocks[1:]].float().any() and part[:, blocks[0]].view(torch.uint8).any()
