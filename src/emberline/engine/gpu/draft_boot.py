"""Loads the draft model of an engine on a GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from emberline.core.engine_config import SpeculationConfig
from emberline.engine.gpu.device import Device
from emberline.engine.gpu.draft_summary import DraftModelSummary
from emberline.engine.memory import NO_DRAFT_MODEL, DraftMemory
from emberline.engine.speculation.draft_loader import load_draft_model
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.device_weights import DeviceWeights
from emberline.models.draft_model import DraftModel


def load_on_device(
    settings: SpeculationConfig, target: DecoderModel, target_directory: Path, device: Device, *, packed: bool = False
) -> DraftModel | None:
    """Return the draft model that the settings name, on the device; None if they name none.

    `packed`: whether weights are packed (12 bits each); those of a separate draft model with experts never are."""
    open_weights = partial(open_draft_weights, settings, target, device, packed=packed)
    return load_draft_model(settings, target, target_directory, open_weights)


def open_draft_weights(
    settings: SpeculationConfig, target: DecoderModel, device: Device, checkpoint: Checkpoint, *, packed: bool = False
) -> DeviceWeights:
    """Return the tensors of a checkpoint in the target model's dtype.

    `packed`: whether to pack them (12 bits each), which is not done for a separate draft model with experts."""
    is_sparse = settings.method == "draft" and ModelConfig.from_checkpoint(checkpoint).experts is not None
    return DeviceWeights(checkpoint, target.dtype, device.torch_device, packed=packed and not is_sparse)


def measure_draft_model(draft: DraftModel | None) -> DraftMemory:
    if draft is None:
        return NO_DRAFT_MODEL
    return DraftMemory.for_model(draft.weight_bytes, draft.config, len(draft.captured_layers))


def summarise_draft_model(target: ModelConfig, draft: DraftModel | None) -> DraftModelSummary:
    """Return what every rank must know of the draft model. `target`: config of one rank's part of the target model."""
    reads_output = draft is not None and target.layers in draft.captured_layers
    return DraftModelSummary(max_row_queries(target, draft), draft is not None, reads_output)


def max_row_queries(target: ModelConfig, draft: DraftModel | None) -> int:
    """Return how many tokens of a request one row may have in the attention kernels of both models."""

    def max_queries(config: ModelConfig) -> int:
        if config.parts.attention.latent is not None:
            return ops.max_latent_queries(config.heads)
        # At least 2, which marks rows with drafts. Rows that are too large for this kernel use the portable kernel.
        return max(2, ops.max_row_heads(config.head_dim) // (config.heads // config.kv_heads))

    return min(max_queries(config) for config in ([target] if draft is None else [target, draft.config]))
