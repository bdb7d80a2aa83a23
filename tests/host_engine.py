"""Engines of the GPU runner with the CPU as device. Their memory can be freed, so that they can really sleep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from gpu_settings import gpu_config

from emberline.core.engine_config import SchedulerConfig
from emberline.core.gpu_kernels import GPUKernels
from emberline.engine.engine import Engine
from emberline.engine.gpu import boot as gpu_boot
from emberline.engine.gpu.boot import BootedGPUEngine, Checkpoint, ModelConfig
from emberline.engine.gpu.device import HostDevice
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.memory import MemoryPlan, plan_memory
from emberline.engine.sampler import SamplingStateFactory
from emberline.kernels import backend, gpu_choice, ops, reference
from emberline.kv.cache import KVCache, KVShape
from emberline.models.loader import load_decoder

if TYPE_CHECKING:
    import pytest

TOTAL = 4 << 30  # memory of the simulated device


def plain_arithmetic() -> None:
    """Use torch's own arithmetic, which like GPU kernels reads the tensors' addresses at each call."""
    backend._backend = ops.ReferenceBackend("asked for")
    uniform = reference.uniform_from_seed  # on copies: memory that numpy has used cannot be freed
    reference.uniform_from_seed = lambda seed, position: uniform(seed.clone(), position.clone())


def simulate_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `boot` start engines for a GPU on the CPU, as if it had 8 GiB of memory.

    Tokens of such engines mean nothing: kernels for a CPU pack copies of the weights before these are loaded."""
    monkeypatch.setattr(gpu_boot, "CudaDevice", lambda kernels: HostDevice())
    monkeypatch.setattr(gpu_boot, "measure_memory", lambda device: (8 << 30, 0))
    monkeypatch.setattr(gpu_choice, "_selected", GPUKernels("hopper", "there is no GPU"))
    monkeypatch.setattr(gpu_boot.gc, "freeze", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "pretended")


def booted(directory: Path, memory: MemoryPlan | None = None) -> BootedGPUEngine:
    model = load_decoder(directory, "float32")
    c = model.config
    cache = KVCache(KVShape(c.layers, c.kv_heads, c.head_dim, 16, torch.float32), 64)
    cache.keys, cache.values = torch.zeros_like(cache.keys), torch.zeros_like(cache.values)  # memory that can be freed
    settings = gpu_config(max_running=8, max_batch_tokens=64, block_size=16)
    eos = frozenset(c.eos)
    runner = GPURunner(model, cache, eos, SamplingStateFactory(eos, None), settings, HostDevice(), model.context)
    scheduler = SchedulerConfig(block_size=16, max_batch_tokens=64, max_running=8, max_context=model.context)
    return BootedGPUEngine(Engine(scheduler, runner), runner, memory or planned(directory), {})


def planned(directory: Path) -> MemoryPlan:
    config = ModelConfig.from_hf(Checkpoint.open(directory).config)
    return plan_memory(
        config, TOTAL, dtype_bytes=4, kv_dtype_bytes=4, block_size=16, max_running=8, max_batch_tokens=64,
        max_context=config.max_context, kv_tokens=1024,
    )  # fmt: skip
