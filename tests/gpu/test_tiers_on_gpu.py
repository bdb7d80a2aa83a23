"""Tiers below the cache of a GPU: the same tokens from host memory and files, with or without pinned memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from engine_runs import run_engine
from gpu_settings import gpu_config

from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.kv.cache import KVCache, KVShape
from emberline.kv.tiers.base import Tier, buffer_bytes_for
from emberline.kv.tiers.disk import DiskTier
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.stack import TierStack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CONFIG = tiny.config("llama", **tiny.GPU_SIZES)
LENGTH, OUT, REQUESTS = 700, 60, 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny.write(tmp_path_factory.mktemp("model"), CONFIG))


def tiers_on(disk: Path) -> Callable[[str, KVShape, int], TierStack]:
    def make(layout: str, shape: KVShape, snapshot_blocks: int) -> TierStack:
        below: list[Tier] = [DiskTier(disk, layout, shape.block_bytes, 1 << 30)]
        return TierStack(HostTier(shape.block_bytes, 1024 * buffer_bytes_for(shape.block_bytes)), below)

    return make


def engine(checkpoint: Path, disk: Path | None = None, **settings: object) -> Engine:
    from emberline.engine.gpu.boot import boot_from_checkpoint

    chosen = {"max_running": 8, "max_batch_tokens": 512, "max_context": 2048, "kv_tokens": 2048, "block_size": 16}
    config = gpu_config(**(chosen | settings), kv_host_memory=None if disk is None else 1 << 20)
    return boot_from_checkpoint(
        checkpoint, config, dtype=torch.float32, build_tiers=tiers_on(disk) if disk else None
    ).engine


def submissions() -> list[Submission]:
    rng = random.Random(7)
    params = SamplingParams(max_tokens=OUT, temperature=0.0)
    return [Submission(f"r{i}", [rng.randrange(3, 1000) for _ in range(LENGTH)], params) for i in range(REQUESTS)]


def run(e: Engine) -> dict[str, list[int]]:
    """Run all requests together: the cache has space for two and a half, so they are preempted and evicted."""
    return run_engine(e, submissions(), max_steps=20_000)


@pytest.mark.parametrize("pins", [True, False])
@pytest.mark.parametrize("settings", [{}, {"graphs": False}, {"overlap": False}])
def test_tiers_give_the_same_tokens(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], pins: bool
) -> None:
    if not pins:
        monkeypatch.setattr("emberline.engine.gpu.device.CudaDevice.pin", lambda self, memory: False)
    expected = run(engine(checkpoint, kv_tokens=64 * 1024))
    first = engine(checkpoint, tmp_path, **settings)
    assert run(first) == expected
    assert run(first) == expected
    assert first.stats().tiers["host"].hit_tokens > 0
    first.close()
    second = engine(checkpoint, tmp_path, **settings)
    assert run(second) == expected
    assert second.stats().tiers["disk"].hit_tokens > 0
    second.close()


def test_failed_pinning_leaves_the_device_usable() -> None:
    from emberline.engine.gpu.device import CudaDevice

    device = CudaDevice()
    memory = torch.frombuffer(HostTier(4096, 1 << 20).memory, dtype=torch.uint8)
    assert device.pin(memory)
    assert not device.pin(memory), "it is"
    assert torch.ones(8, device=device.torch_device).sum().item() == 8.0
    device.unpin(memory)
    assert device.pin(memory)
    device.unpin(memory)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_save_and_load_do_not_wait_for_the_device(dtype: torch.dtype) -> None:
    """Blocks are saved and overwritten while the device is busy with other work, and are loaded again."""
    from emberline.core.plan import BlockCopy
    from emberline.engine.gpu.copier import DeviceCopier
    from emberline.engine.gpu.device import CudaDevice

    device, shape = CudaDevice(), KVShape(3, 2, 64, 16, dtype)
    cache = KVCache(shape, 64, str(device.torch_device))
    halves = [half.view(torch.uint8) for half in (cache.keys, cache.values)]
    for half in halves:
        half.copy_(torch.randint(0, 255, half.shape, dtype=torch.uint8))
    host, copier = HostTier(shape.block_bytes, 64 * buffer_bytes_for(shape.block_bytes)), DeviceCopier(cache, device)
    copier.attach_host_memory(host.memory)
    buffers = [buffer for i in range(32) if (buffer := host.reserve_buffer(bytes([i]))) is not None]
    copies = [BlockCopy(i, b"", buffer) for i, buffer in enumerate(buffers)]
    before = [half.clone() for half in halves]
    torch.cuda.synchronize()
    with torch.inference_mode(), device.step_stream.activate():
        torch.cuda._sleep(1_000_000_000)  # cycles, about half a second
        saved = copier.launch(copies, [])
        for half in halves:
            half[:, :32].zero_()
        busy = not torch.cuda.current_stream().query()
    assert busy, "the host waited for the device"
    saved()
    with torch.inference_mode(), device.step_stream.activate():
        copier.launch([], copies)()
    assert all(torch.equal(half, old) for half, old in zip(halves, before, strict=True))
    copier.detach_host_memory()
