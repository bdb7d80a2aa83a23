"""Loads the draft model of an engine on a GPU."""

from __future__ import annotations

from pathlib import Path

from emberline.core.engine_config import SpeculationConfig
from emberline.core.errors import UnsupportedModel
from emberline.engine.gpu.device import Device
from emberline.engine.memory import NO_DRAFT_MODEL, DraftMemory
from emberline.engine.speculation.draft_loader import load_draft_model
from emberline.kernels import ops
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.device_weights import DeviceWeights
from emberline.models.draft_model import DraftModel


def load_on_device(
    settings: SpeculationConfig, target: DecoderModel, target_directory: Path, device: Device, *, packed: bool = False
) -> DraftModel | None:
    """Return the draft model that the settings name, on the device; None if they name none.

    `packed`: with packed weights (12 bits each)."""
    if settings.method == "mtp":
        _reject_experts(target.config)  # before the head is loaded, which has experts if the model has
    draft = load_draft_model(
        settings,
        target,
        target_directory,
        lambda checkpoint: DeviceWeights(checkpoint, target.dtype, device.torch_device, packed=packed),
    )
    if draft is not None:
        _reject_experts(draft.config)
    return draft


def _reject_experts(config: ModelConfig) -> None:
    if config.experts is not None and any(config.experts.layers):
        message = f"the draft model is a {config.model_type}, and experts of draft models do not run on a GPU"
        raise UnsupportedModel(message, hint="drop --speculate mtp, or use a draft model without experts")


def measure_draft_model(draft: DraftModel | None) -> DraftMemory:
    if draft is None:
        return NO_DRAFT_MODEL
    return DraftMemory.of(draft.weight_bytes, draft.config, len(draft.captured_layers))


def max_row_queries(target: ModelConfig, draft: DraftModel | None) -> int:
    """Return how many tokens of a request the attention of both models can compute together."""

    def max_queries(config: ModelConfig) -> int:
        if config.parts.attention.latent is not None:
            return ops.max_latent_queries(config.heads)
        # At least 2, so that a row with drafts is known as one: the portable kernel computes rows that are too large.
        return max(2, ops.max_row_heads(config.head_dim) // (config.heads // config.kv_heads))

    return min(max_queries(config) for config in ([target] if draft is None else [target, draft.config]))
