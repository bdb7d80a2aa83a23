"""Tiers below a GPU's cache, with the CPU as device: the same tokens, and copies without races between streams."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from gpu_settings import gpu_config
from host_engine import plain_arithmetic, simulate_gpu
from race_detector import RaceDetector
from tiny_deepseek import write_deepseek
from torch import Tensor

from emberline.core.engine_config import EngineConfig, SchedulerConfig
from emberline.core.errors import InvalidRequest
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.plan import BlockCopy
from emberline.core.request import Priority, Submission
from emberline.engine import memory
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.gpu.boot import make_tiers
from emberline.engine.gpu.copier import DeviceCopier
from emberline.engine.gpu.graphs import StepInputs
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.gpu.swap import reset_prefix_cache, sleep_runner, wake_runner
from emberline.engine.kv_shape import make_kv_shape
from emberline.engine.sampler import SamplingStateFactory
from emberline.kernels import backend as kernel_backend
from emberline.kernels import reference
from emberline.kv.cache import KVCache, KVShape
from emberline.kv.tiers.base import Tier, buffer_bytes_for
from emberline.kv.tiers.copier import HostBlockCopier
from emberline.kv.tiers.disk import DiskTier
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.stack import TierStack
from emberline.models.decoder import DecoderModel
from emberline.models.loader import load_decoder

BLOCK = 8
OUT = 6
Folded = dict[str, tuple[list[int], list[float], int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_decoder(tiny.write(tmp_path_factory.mktemp("model"), tiny.CONFIGS["llama"]), "bfloat16")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    # One block each, so that a plan with several blocks needs several pieces.
    monkeypatch.setattr(memory, "COPY_PIECE_BYTES", 0)


class TieredEngine:
    """An engine with or without tiers. Files are read and written when the test calls `run`."""

    def __init__(
        self,
        model: DecoderModel,
        disk: Path | None = None,
        *,
        tiers: bool = True,
        blocks: int = 12,
        pins: bool = True,
        **settings: object,
    ) -> None:
        c = model.config
        shape = make_kv_shape(c, BLOCK, torch.bfloat16)
        cache = KVCache(shape, blocks)
        cache.keys, cache.values = torch.zeros_like(cache.keys), torch.zeros_like(cache.values)  # can be freed
        chosen = gpu_config(max_running=4, max_batch_tokens=64, kv_host_memory=1 << 20 if tiers else None, **settings)
        self.device = RaceDetector(pins=pins)
        self.runner = GPURunner(
            model, cache, frozenset(), SamplingStateFactory(frozenset(), None), chosen, self.device, 64
        )
        self.device.watch(kept=self.runner.device_buffers())
        forward = self.runner._run_model

        def record_forward(inputs: StepInputs, out: Tensor | None) -> Tensor:
            alone = self.device.at_work == "steps"  # parts that run in parallel write to different blocks
            self.device.note("the model", cache.keys, cache.values, writes=alone)
            return forward(inputs, out)

        self.runner._run_model = record_forward  # type: ignore[method-assign]
        self.tiers: TierStack | None = None
        if tiers:
            self.tiers = make_tiers(self.runner, partial(self.make_tiers, disk))
            self.host = self.tiers.host
            self.device.watch(self.host.memory)
        config = SchedulerConfig(block_size=BLOCK, max_batch_tokens=64, max_running=4, max_context=64)
        self.engine = Engine(config, self.runner, tiers=self.tiers)

    def make_tiers(self, disk: Path | None, layout: str, shape: KVShape, snapshot_blocks: int) -> TierStack:
        size = shape.block_bytes
        below: list[Tier] = [DiskTier(disk, layout, size, 1 << 24)] if disk is not None else []
        return CheckedTierStack(HostTier(size, 64 * buffer_bytes_for(size)), below, self.device)

    def run(self, *submissions: Submission) -> Folded:
        for submission in submissions:
            self.engine.add(submission)
        return fold(self.finish())

    def steps(self, count: int) -> list[Output]:
        with self.device:
            return [output for _ in range(count) for output in self.engine.step()]

    def finish(self) -> list[Output]:
        outputs: list[Output] = []
        for _ in range(1000):
            outputs += self.steps(1)
            self.engine.kv.check_invariants()
            if self.tiers is not None:
                self.tiers.load_next_block()
            if self.engine.idle:
                break
        assert self.engine.idle
        assert self.device.races == []
        if self.tiers is not None:
            while self.tiers.write_next_block():
                pass
            self.host.check_invariants()
            assert self.host.num_pinned == 0
        return outputs


class CheckedTierStack(TierStack):
    """Checks that a buffer is complete when it is reported as saved: other threads may read it from then on."""

    def __init__(self, host: HostTier, below: list[Tier], device: RaceDetector) -> None:
        super().__init__(host, below, threads=False)
        self.device = device

    def finish_save(self, block_hash: bytes) -> None:
        super().finish_save(block_hash)
        buffer = self.host.pin_block(block_hash)
        assert buffer is not None
        self.device.note("a reader", buffer, writes=False)
        self.host.unpin_block(block_hash)

    def release_fetched(self, block_hash: bytes) -> None:
        buffer = self.host.pin_block(block_hash)
        assert buffer is not None
        # The buffer of the next block, as soon as this one is evicted.
        self.device.note("a writer", buffer, writes=True)
        self.host.unpin_block(block_hash)
        super().release_fetched(block_hash)


def fold(outputs: list[Output]) -> Folded:
    folded: Folded = {}
    for o in outputs:
        tokens, logprobs, cached = folded.get(o.id, ([], [], 0))
        folded[o.id] = (tokens + o.tokens, logprobs + [p.logprob for p in o.logprobs], cached + o.cached_tokens)
    return folded


def make_submission(seed: int, name: str = "r", /, *, tokens: int = OUT) -> Submission:
    prompt = torch.randint(3, 131, (41,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Submission(name, prompt, SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=0))


def evict_all(tiered: TieredEngine) -> None:
    """Return requests that evict everything else from the main cache."""
    for seed in (100, 101, 102):
        tiered.run(make_submission(seed))


def assert_same(got: Folded, expected: Folded, cached: int | None = None) -> None:
    assert {name: value[:2] for name, value in got.items()} == {name: value[:2] for name, value in expected.items()}
    assert cached is None or {value[2] for value in got.values()} == {cached}


SETTINGS: dict[str, dict[str, object]] = {
    "captured": {},
    "out of reach": {"pins": False},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_evicted_prefixes_are_loaded_from_tiers(model: DecoderModel, setting: str, tmp_path: Path) -> None:
    fresh = TieredEngine(model, tiers=False).run(make_submission(1))
    tiered = TieredEngine(model, tmp_path, **SETTINGS[setting])  # type: ignore[arg-type]
    assert_same(tiered.run(make_submission(1)), fresh, cached=0)
    evict_all(tiered)
    assert_same(tiered.run(make_submission(1)), fresh, cached=40)
    assert tiered.engine.kv.hit_tokens == 0, "the main cache had forgotten it"
    assert tiered.engine.stats().tiers["host"].hit_tokens == 40
    after = TieredEngine(model, tmp_path, **SETTINGS[setting])  # type: ignore[arg-type]
    assert_same(after.run(make_submission(1)), fresh, cached=40)
    assert after.engine.stats().tiers["disk"].hit_tokens == 40


@pytest.fixture(scope="module")
def expected_outputs(model: DecoderModel) -> Folded:
    return TieredEngine(model, tiers=False, blocks=40).run(
        *(make_submission(seed, f"r{seed}", tokens=20) for seed in range(4))
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_preempted_requests_load_their_blocks(model: DecoderModel, expected_outputs: Folded, setting: str) -> None:
    tiered = TieredEngine(model, blocks=14, **SETTINGS[setting])  # type: ignore[arg-type]
    first, *rest = (make_submission(seed, f"r{seed}", tokens=20) for seed in range(4))
    tiered.engine.add(replace(first, priority=Priority.BATCH))
    outputs = tiered.steps(4)
    for submission in rest:  # these run first, and need all blocks
        tiered.engine.add(submission)
    assert_same(fold([*outputs, *tiered.finish()]), expected_outputs)
    assert tiered.engine.scheduler.preemptions > 0
    assert tiered.engine.stats().tiers["host"].hit_tokens > 0


def test_failed_step_stores_no_blocks(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tiered = TieredEngine(model)
    tiered.engine.add(make_submission(1))
    tiered.steps(3)  # the prompt and the second token are computed; the third plan saves the blocks
    assert tiered.host.num_pinned == 5

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("race_detector.TrackedEvent.wait", broken)
    with pytest.raises(RuntimeError, match="gone"):
        tiered.steps(2)
    assert tiered.host.stats().blocks == 0


@pytest.mark.parametrize(("pins", "values_in_keys"), [(True, False), (False, False), (True, True)])
def test_device_copies_equal_host_copies(pins: bool, values_in_keys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers have the same content for pipelined random plans as for plans executed one at a time.

    Blocks that are loaded twice have the content of the last load."""
    rng = random.Random(3)
    shape = KVShape(3, 2, 16, BLOCK, torch.bfloat16, values_in_keys)
    caches = [KVCache(shape, 10) for _ in range(2)]
    for parts in zip(*(cache.tensors for cache in caches), strict=True):
        noise = torch.randn(parts[0].shape).bfloat16()
        for part in parts:
            part.copy_(noise)
    monkeypatch.setattr(memory, "COPY_PIECE_BYTES", 3 * shape.block_bytes)
    device, plain, size = RaceDetector(pins=pins), HostBlockCopier(caches[0]), buffer_bytes_for(shape.block_bytes)
    areas = [memoryview(bytearray(rng.randbytes(16 * size))) for _ in range(2)]
    areas[1][:] = areas[0]
    copier = DeviceCopier(caches[1], device)
    copier.attach_host_memory(areas[1])
    device.watch(areas[1], scratch=copier.device_buffers(), cache=caches[1].tensors)
    with device, device.step_stream.activate():
        under_way = None
        for step in range(40):
            half = step % 2 * 8  # the other buffers belong to the plan in flight
            slots = [half + i for i in rng.sample(range(8), 8)]
            blocks = [rng.randrange(10) for _ in slots]
            cut = rng.randrange(9)
            copies = [
                [
                    BlockCopy(block, b"", area[slot * size : (slot + 1) * size])
                    for block, slot in zip(blocks, slots, strict=True)
                ]
                for area in areas
            ]
            plain.save(copies[0][:cut])
            plain.load(copies[0][cut:])
            finish = copier.launch(copies[1][:cut], copies[1][cut:])
            if under_way is not None:
                under_way()
            under_way = finish
        finish()
    assert device.races == []
    assert areas[0] == areas[1]
    assert all(map(torch.equal, caches[0].tensors, caches[1].tensors))


def test_latents_move_through_tiers(tmp_path: Path) -> None:
    model = load_decoder(write_deepseek(tmp_path / "model", "v2", dtype=torch.bfloat16), "bfloat16")
    expected = TieredEngine(model, tiers=False).run(make_submission(1))
    tiered = TieredEngine(model, tmp_path / "disk")
    first = tiered.run(make_submission(1))
    evict_all(tiered)
    again = tiered.run(make_submission(1))
    assert again["r"][0] == first["r"][0] == expected["r"][0] and again["r"][2] == 40
    assert tiered.engine.stats().tiers["host"].hit_tokens == 40 and tiered.device.races == []


@pytest.fixture
def movable_model(tmp_path: Path) -> Iterator[DecoderModel]:
    """Return a model whose memory can be freed."""
    backend, uniform = kernel_backend._backend, reference.uniform_from_seed
    plain_arithmetic()
    yield load_decoder(tiny.write(tmp_path, tiny.CONFIGS["llama"]), "bfloat16")
    kernel_backend._backend, reference.uniform_from_seed = backend, uniform


def test_lower_tiers_survive_sleep(movable_model: DecoderModel) -> None:
    tiered = TieredEngine(movable_model)
    fresh = tiered.run(make_submission(1))
    slept = sleep_runner(tiered.runner)
    reset_prefix_cache(tiered.engine)
    assert tiered.runner.copier is not None
    assert all(piece.rows.untyped_storage().nbytes() == 0 for piece in tiered.runner.copier._pieces)
    wake_runner(slept)
    tiered.device.watch(kept=tiered.runner.device_buffers())
    again = tiered.run(make_submission(1))
    assert again["r"][0] == fresh["r"][0] and again["r"][2] == 40
    assert tiered.engine.stats().tiers["host"].hit_tokens == 40
    slept.close()


@pytest.mark.parametrize("pins", [True, False])
def test_host_tier_is_pinned_until_closed(model: DecoderModel, pins: bool) -> None:
    tiered = TieredEngine(model, pins=pins)
    assert len(tiered.device.pinned_now) == pins
    tiered.engine.add(make_submission(1))
    tiered.steps(3)
    assert tiered.host.num_pinned == 5, "blocks are on their way"
    tiered.engine.close()
    assert tiered.device.pinned_now == [] and tiered.device.races == []


def test_plan_includes_copy_scratch(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def scratch(**settings: object) -> int:
        chosen = gpu_config(max_running=4, max_batch_tokens=64, block_size=16, **settings)
        return memory.plan_engine_memory(model.config, chosen, 8 << 30, "bfloat16").scratch

    shape = KVShape(model.config.layers, model.config.kv_heads, model.config.head_dim, 16, torch.bfloat16)
    for size in (0, 1 << 20):
        monkeypatch.setattr(memory, "COPY_PIECE_BYTES", size)
        numbers, *pieces = DeviceCopier(KVCache(shape, 2), RaceDetector()).device_buffers()
        assert scratch(kv_host_memory=1 << 20) - scratch() == sum(piece.nbytes for piece in pieces)
        assert numbers.nbytes < 1024


def test_settings_create_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boot on a simulated GPU, then boot again: the second one finds the files of the first."""
    home = tiny.write(tmp_path / "model", tiny.CONFIGS["llama"])
    simulate_gpu(monkeypatch)
    config = EngineConfig.build(
        str(home),
        device="cuda",
        block_size=16,
        kv_memory=1 << 18,
        kv_host_memory=1 << 20,
        kv_disk=str(tmp_path / "kv"),
        kv_disk_size=1 << 22,
    )
    for cached in (0, 32):
        engine = boot(config).engine
        engine.add(make_submission(1))
        outputs: list[Output] = []
        while not engine.idle:
            outputs += engine.step()
        engine.close()
        assert sum(o.cached_tokens for o in outputs) == cached
        assert engine.stats().tiers["disk"].hit_tokens == cached
    with pytest.raises(InvalidRequest, match="of memory are free"):
        boot(config.with_settings(kv_host_memory=1 << 60))
