"""compile_kernels: compiles all kernels of a GPU engine before it accepts requests."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import torch

from emberline.core.config import kernel_dir
from emberline.engine.gpu.runner import GPURunner
from emberline.kernels import ops
from emberline.models.weight_formats import QuantisedSize


def compile_kernels(runner: GPURunner, quantised: Sequence[QuantisedSize] = (), *, packed: bool = False) -> float:
    """Compile all kernels that steps need, unless an earlier start did; return the seconds spent.

    `quantised`: the matrices that are kept quantised. `packed`: whether the other matrices are packed. A kernel that is
    compiled at its first use would delay a request by a second."""
    began = time.perf_counter()
    if not runner.cache.keys.is_cuda:
        return 0.0
    from emberline.kernels.cuda import driver, nvrtc, sample
    from emberline.kernels.triton import jit

    facts = [*(f"{config!r} {config.parts}" for config in runner.model_configs), *sorted(set(map(repr, quantised)))]
    facts += [nvrtc.digest_sources(driver.device_options()), ops.selected_gpu_kernels().name]
    facts.append(f"packed: {packed}")
    facts.append(f"drafts of recurrent layers: {runner.states is not None and runner.states.max_draft > 0}")
    if runner.rank.draft_model is not None:
        facts.append(f"drafts of the leader: {runner.rank.draft_model}")
    if runner.rank.exchanging_ranks > 1:
        facts.append(f"rows of {runner.rank.exchanging_ranks} ranks")
    slots = {each.movable.slots.count for each in runner.model.movable_layers.values() if each.movable is not None}
    facts += [f"experts in {count} slots" for count in slots]
    limits = runner.shapes, runner.max_batch_tokens, runner.exact, runner.groups.windows, runner.cache.keys.dtype
    done = kernel_dir() / f"compiled-{hashlib.sha256(chr(0).join([*facts, str(limits)]).encode()).hexdigest()[:32]}"
    if not done.exists():
        with driver.compile_in_parallel(sample.get_module()), jit.compile_in_parallel():
            runner.launch_all_kernels()
            torch.cuda.synchronize()
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()
    return time.perf_counter() - began
