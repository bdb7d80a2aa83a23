"""PlannedModel: a model on a GPU whose weights are still being loaded, with the plan of its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from emberline.core.engine_config import EngineConfig
from emberline.engine import kv_shape, memory
from emberline.engine.gpu.attention_log import log_portable_attention
from emberline.engine.gpu.device import Device
from emberline.engine.gpu.draft_boot import measure_draft_model, summarise_draft_model
from emberline.engine.gpu.draft_summary import DraftModelSummary
from emberline.engine.gpu.rank_role import RankRole
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.gpu.shape import captured_token_counts
from emberline.engine.group_choice import choose_groups
from emberline.engine.memory_plan import MemoryPlan
from emberline.engine.sampler import SamplingStateFactory
from emberline.engine.speculation.draft_cache import draft_block_bytes
from emberline.engine.stage_memory import plan_stage_memory
from emberline.engine.state_memory import allocate_device_states
from emberline.kernels import ops
from emberline.kernels.gpu_choice import name_kernels
from emberline.kv.cache import KVCache, KVShape
from emberline.kv.layer_groups import LayerGroups
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.draft_model import DraftModel
from emberline.models.sleep import iter_instances
from emberline.models.stage import Stage
from emberline.models.weights import Weights

KV_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class PlannedModel:
    model: DecoderModel
    draft: DraftModel | None
    settings: EngineConfig
    device: Device
    plan: MemoryPlan
    rank_config: ModelConfig  # of the layers that this rank has: all of the model's, if there is one stage
    groups: LayerGroups  # of all layers of the model

    @staticmethod
    def from_model(
        model: DecoderModel,
        weights: Weights,
        settings: EngineConfig,
        device: Device,
        device_memory: tuple[int, int],
        *,
        draft: DraftModel | None = None,
        stage: Stage | None = None,
    ) -> PlannedModel:
        """Plan the memory of a model, or of a rank's part of it.

        `device_memory`, `stage`: see `plan_stage_memory`. Raises ModelError if the model does not fit, InvalidRequest
        if GPUs cannot run this pipeline stage."""
        plan, config = plan_stage_memory(
            *(model.config, stage, settings, model.context, device_memory, str(model.dtype).removeprefix("torch.")),
            packed=weights.packed,
            quantised=weights.quantised_sizes,
            draft=measure_draft_model(draft),
            kernels=name_kernels(device.torch_device),
        )
        groups = choose_groups(model.config.windows, model.context, model.config.parts.attention.state_layers)
        return PlannedModel(model, draft, settings, device, plan, config, groups)

    @property
    def kv_shape(self) -> KVShape:
        """The shape of this rank's part of a KV block."""
        dtype = KV_DTYPES[memory.kv_dtype(self.settings, str(self.model.dtype).removeprefix("torch."))]
        return kv_shape.make_kv_shape(self.rank_config, self.settings.scheduler.block_size, dtype, self.plan.groups)

    @property
    def draft_summary(self) -> DraftModelSummary | None:
        """What the other ranks must know of the draft model; None: there is none."""
        return None if self.draft is None else summarise_draft_model(self.model.config, self.draft)

    @property
    def draft_block_bytes(self) -> int:
        """The bytes of a block of the KV cache of the draft model, if there is one."""
        return 0 if self.draft is None else draft_block_bytes(self.draft, self.kv_shape)

    def make_runner(
        self,
        make_state: SamplingStateFactory,
        num_blocks: int,
        num_state_slots: int,
        rank: RankRole | None = None,
        runner_class: Callable[..., GPURunner] = GPURunner,
    ) -> GPURunner:
        """Allocate the caches and return the runner, of one rank if `rank` is given."""
        model, device, settings = self.model, self.device, self.settings
        cache = KVCache(self.kv_shape, num_blocks, str(device.torch_device))
        args = num_state_slots, device.torch_device, settings, model.dtype
        states = allocate_device_states(self.rank_config, *args)
        first = model, cache, frozenset(model.config.eos), make_state, settings, device, model.context
        runner = runner_class(*first, self.draft, self.groups, states, rank)
        log_portable_attention(model, self.kv_shape)
        return runner

    def tune_matrix_products(self) -> float:
        """Find the fastest matrix product kernel for each number of tokens; return the seconds spent.

        Call this before a runner fills the memory. Measurements of an earlier start are reused. Without a GPU
        or captured graphs, and with the setting `exact`, nothing is measured."""
        model, settings = self.model, self.settings
        if model.device.type != "cuda" or not settings.gpu.graphs or settings.gpu.exact:
            return 0.0
        from emberline.kernels import tuning

        weights = set(iter_instances(ops.PackedWeight, model.layers))
        return tuning.tune_products(
            weights,
            model.config.hidden,
            captured_token_counts(settings.scheduler.max_running, settings.scheduler.max_batch_tokens),
            portable=not ops.has_hopper_kernels(),
        )
