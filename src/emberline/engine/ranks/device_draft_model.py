"""load_draft_model_on_gpu: loads the draft model of an engine on several GPUs, for the leader only."""

from __future__ import annotations

from emberline.core.engine_config import EngineConfig
from emberline.engine.gpu.device import Device
from emberline.engine.gpu.draft_boot import open_draft_weights
from emberline.engine.ranks.draft_model import load_draft_model_of_ranks
from emberline.hub.checkpoint import Checkpoint
from emberline.models.decoder import DecoderModel
from emberline.models.device_weights import DeviceWeights
from emberline.models.draft_model import DraftModel


def load_draft_model_on_gpu(
    config: EngineConfig, checkpoint: Checkpoint, part: DecoderModel, device: Device, *, packed: bool
) -> DraftModel | None:
    """Return the whole draft model that the settings name, on the leader's GPU; None if they name none.

    `checkpoint`: of the target model. `part`: the leader's part of that model. `packed`: whether to pack the draft
    model's weights (12 bits each), which is not done if it has experts."""

    def open_weights(source: Checkpoint) -> DeviceWeights:
        weights = open_draft_weights(config.speculation, part, device, source, packed=packed)
        weights.reads_ranges = True  # of the target's files, only few tensors are loaded here
        return weights

    return load_draft_model_of_ranks(config, checkpoint, part, open_weights)
