"""check_gpu_memory: how an engine would use the memory of this machine's GPUs, for `emberline doctor --model`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from emberline.cli.doctor_finding import DoctorFinding
from emberline.cli.doctor_gpu import DetectedGPU
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.engine import memory
from emberline.engine.draft_estimate import estimate_draft_memory
from emberline.engine.group_choice import choose_groups
from emberline.engine.memory_plan import MemoryPlan
from emberline.engine.quantised_estimate import describe_quantised_sizes, estimate_quantised_sizes
from emberline.engine.rank_plan import RankPlan, plan_ranks
from emberline.engine.ranks.device_settings import check_device_drafts, check_device_settings, check_gpu_count
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.settings import check_divisible
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig
from emberline.models.config_outline import outline_of
from emberline.models.kv_groups import group_layers
from emberline.models.weight_dtype import choose_weight_dtype, stored_weight_dtype
from emberline.models.weight_form import check_requested_weights


def check_gpus_of_ranks(settings: EngineConfig, gpus: Sequence[DetectedGPU]) -> Iterator[DoctorFinding]:
    """Report if this machine has GPUs, but too few for the ranks."""
    if settings.parallel.num_ranks > 1 and gpus:
        try:
            check_gpu_count(settings.parallel, len(gpus))
        except InvalidRequest as e:
            yield DoctorFinding("  gpus", e.message, False, e.hint or "")


def check_gpu_memory(
    checkpoint: Checkpoint, config: ModelConfig, requested: EngineConfig, gpu_bytes: int | None, kernels: str = ""
) -> Iterator[DoctorFinding]:
    """Show how the engine would use a GPU's memory, computed by the same functions that the engine uses.

    `requested`: the settings, without the defaults of a GPU. `gpu_bytes`: the memory of each GPU; None: there are none.
    `kernels`: the name of the kernels that the GPUs use; empty: not known."""
    settings = requested.with_gpu_defaults()
    kernels = settings.gpu.named_kernels or kernels
    dtype = choose_weight_dtype(checkpoint, settings.dtype, on_gpu=gpu_bytes is not None)
    block_size = (requested if gpu_bytes is None else settings).scheduler.block_size
    yield from _describe_kv_cache(config, settings, dtype, block_size)
    check_requested_weights(settings.gpu.weights, on_gpu=gpu_bytes is not None)
    if gpu_bytes is None or not _is_divisible(settings, config):
        return
    packed = memory.uses_packed_weights(checkpoint, settings, dtype, config)
    quantised = estimate_quantised_sizes(checkpoint, config, settings, dtype)
    if settings.parallel.num_ranks > 1:
        check_device_settings(settings, settings.parallel.num_ranks)
        check_device_drafts(settings, config)
        plans = plan_ranks(checkpoint, config, settings, gpu_bytes, dtype, kernels=kernels)
    else:
        draft = estimate_draft_memory(settings, checkpoint, config, dtype)
        forms: dict[str, Any] = {"packed": packed, "quantised": quantised, "kernels": kernels, "draft": draft}
        plan = memory.plan_engine_memory(config, settings, gpu_bytes, dtype, **forms)
        plans = [RankPlan((0,), plan)]
    form = "packed" if packed else "both plain and packed" if settings.gpu.weights == "both" else "plain"
    form += describe_quantised_sizes(checkpoint, settings, quantised)
    rounded = " (rounded from float16)" * (dtype == "bfloat16" and stored_weight_dtype(checkpoint) == "float16")
    batch = f"{settings.scheduler.max_running} requests and {settings.scheduler.max_batch_tokens} tokens per step"
    context, kv_dtype = memory.choose_max_context(config, settings), memory.kv_dtype(settings, dtype)
    size = _format_gib(gpu_bytes) + " each" * (settings.parallel.num_ranks > 1)
    formats = f"{dtype}{rounded} {form}, KV cache {kv_dtype}"
    yield DoctorFinding("gpu memory", f"{size}: {formats}, {batch}, context {context}")
    for part in plans:
        yield from _describe_plan(part, settings)
    yield from _describe_limit(plans[0].plan, settings, context)


def _describe_kv_cache(
    config: ModelConfig, settings: EngineConfig, dtype: str, block_size: int
) -> Iterator[DoctorFinding]:
    """Show the size of the KV cache of one token and of one context, and of a recurrent state, for all layers."""
    kv_dtype, context = memory.kv_dtype(settings, dtype), memory.choose_max_context(config, settings)
    width = memory.DTYPE_BYTES[kv_dtype]
    token_bytes = memory.kv_token_bytes(config, width)
    groups = choose_groups(config.windows, context, config.parts.attention.state_layers)
    context_bytes, in_groups = token_bytes * context, ""
    if len(groups.windows) > 1:  # layers with a window keep only the newest blocks
        block_bytes = block_size * memory.kv_token_bytes(config, width, groups.block_layers)
        context_bytes = groups.num_held_blocks(context, block_size) * block_bytes
        in_groups = f" in {len(groups.windows)} groups of layers"
    per_context = f"{context_bytes / 1e6:.0f} MB per context of {context} tokens{in_groups}"
    yield DoctorFinding("  kv cache", f"{token_bytes / 1e3:.1f} kB per token, {per_context} ({kv_dtype})")
    if state_bytes := sum(g.bytes_per_sequence for g in group_layers(outline_of(config), "float32", block_size)):
        each = f"{state_bytes / 1e6:.2f} MB for each running request and each snapshot of a prefix"
        yield DoctorFinding("  states", f"{each}, at most half of the KV cache's memory (float32)")


def _is_divisible(settings: EngineConfig, config: ModelConfig) -> bool:
    """Whether the ranks can divide the model. If not, another finding of `emberline doctor` reports it."""
    try:
        check_divisible(Layout.of_gpus(settings.parallel), config)
    except InvalidRequest:
        return False
    return True


def _describe_plan(part: RankPlan, settings: EngineConfig) -> Iterator[DoctorFinding]:
    indent, several = "  ", settings.parallel.num_ranks > 1
    if several:
        used = part.plan.total - part.plan.spare_bytes
        yield DoctorFinding(f"  {part.describe_ranks()}", f"{_format_gib(used):>10} on each GPU")
        indent = "    "
    for name, size in part.plan.named_sizes():
        tokens = f": {part.plan.describe_kv_tokens()}" if name == "kv cache" else ""
        yield DoctorFinding(f"{indent}{name}", f"{_format_gib(size):>10}{tokens}")


def _describe_limit(plan: MemoryPlan, settings: EngineConfig, context: int) -> Iterator[DoctorFinding]:
    """Report if the KV cache is too small for a request of the maximum length."""
    if plan.max_request_tokens < context:
        hint = "raise --kv-memory" if settings.kv_cache.kv_memory else "lower --max-batch-tokens or --max-running"
        hint += ", or --kv-dtype float8"
        limit = f"limited to {plan.max_request_tokens} tokens by the size of the KV cache"
        yield DoctorFinding("  context", limit, None, hint)


def _format_gib(byte_count: int) -> str:
    return f"{byte_count / 2**30:.2f} GiB"
