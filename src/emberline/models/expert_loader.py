"""ExpertLoader: loads single experts of a checkpoint for a rank that keeps other experts than at its start."""

from __future__ import annotations

from dataclasses import replace

from emberline.hub.checkpoint import Checkpoint
from emberline.kernels.mixture import Expert
from emberline.models.config import ModelConfig
from emberline.models.loader import DTYPES
from emberline.models.moe import load_expert
from emberline.models.shard import Shard
from emberline.models.weight_form import WeightForm
from emberline.models.weights import Weights


class ExpertLoader:
    def __init__(self, checkpoint: Checkpoint, dtype: str, form: WeightForm, shard: Shard) -> None:
        """The arguments are those with which the rank's model was loaded."""
        self._checkpoint, self._dtype, self._form, self._shard = checkpoint, dtype, form, shard
        self._config = ModelConfig.from_checkpoint(checkpoint)

    def load(self, layer: int, expert: int) -> Expert:
        """Return this rank's part of an expert. Raises ModelError if the checkpoint cannot be read."""
        shard = replace(self._shard, only_expert=expert)
        weights = Weights(self._checkpoint, DTYPES[self._dtype], form=self._form, shard=shard)
        return load_expert(shard.shard_config(self._config), weights, layer)
