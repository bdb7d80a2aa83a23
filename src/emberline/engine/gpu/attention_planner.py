"""make_attention_planner: the planner of the attention in the steps of a GPU runner."""

from __future__ import annotations

from emberline.core.engine_config import EngineConfig
from emberline.engine.gpu.shape import max_step_rows
from emberline.engine.memory import max_widened_blocks
from emberline.kernels import ops
from emberline.kv.cache import KVCache
from emberline.models.decoder import DecoderModel

MAX_LENGTH_ROUNDING = 64  # keys by which plans of attention may overestimate a length


def make_attention_planner(
    model: DecoderModel, cache: KVCache, settings: EngineConfig, max_context: int, max_queries: int
) -> ops.AttentionPlanner:
    config, limits, size = model.config, settings.scheduler, cache.shape.block_size
    heads = config.heads, config.kv_heads, config.head_dim
    options = ops.PlannerOptions(
        max_widened_blocks=max_widened_blocks(size, max_context, limits.max_batch_tokens),
        max_queries=max_queries,
        fixed_cuts=settings.gpu.exact,
        max_length=-(-max_context // size) * size + MAX_LENGTH_ROUNDING,
        portable=config.parts.needs_portable_attention,
    )
    planner = ops.LatentPlanner if config.parts.attention.latent else ops.AttentionPlanner
    return planner(heads, cache.keys, model.dtype, max_step_rows(limits.max_running), options)
