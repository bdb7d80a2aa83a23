"""load_draft_model_of_ranks: the leader's draft model. The other ranks only verify its drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from emberline.core.engine_config import EngineConfig
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel, load_vocabulary_matrices
from emberline.models.draft_model import DraftModel
from emberline.models.eagle3 import Eagle3Head
from emberline.models.mtp import MTPHead
from emberline.models.stage import Stage
from emberline.models.weight_form import choose_weight_form
from emberline.models.weights import Weights

OpenWeights = Callable[[Checkpoint], Weights]


def load_draft_model_of_ranks(
    config: EngineConfig, checkpoint: Checkpoint, part: DecoderModel, open_weights: OpenWeights | None = None
) -> DraftModel | None:
    """Return the whole draft model that the settings name; None if they name none.

    `checkpoint`: of the target model. `part`: the leader's part of that model. `open_weights`: returns the tensors of a
    checkpoint on the leader's device; None: on the CPU. An EAGLE-3 or MTP head that shares the target's embedding or
    output head gets all rows of these. Raises UnsupportedModel or ModelFileError."""
    if not config.speculation.uses_draft_model:
        return None
    from emberline.engine.speculation.draft_loader import load_draft_model

    dtype = torch.bfloat16 if part.dtype is torch.float16 else part.dtype

    def open_host_weights(source: Checkpoint) -> Weights:
        return Weights(source, dtype, form=choose_weight_form(source, config.dtype))

    open_weights = open_weights or open_host_weights
    target = replace(part, config=ModelConfig.from_checkpoint(checkpoint), vocabulary=None)
    if config.speculation.method != "draft":
        target = _load_vocabulary(target, open_weights(checkpoint), needs_head=config.speculation.method == "mtp")
    model = load_draft_model(config.speculation, target, Path(config.model), open_weights)
    if isinstance(model, Eagle3Head | MTPHead):
        return replace(model, weight_bytes=model.weight_bytes + _count_copies(model, target))
    return model


def _load_vocabulary(target: DecoderModel, weights: Weights, *, needs_head: bool) -> DecoderModel:
    """Return the target model with all rows of the embedding, and of the output head if that is needed."""
    config = target.config
    stage = Stage.from_config(config) if needs_head else Stage(0, 2, range(config.layers))
    embedding, head = load_vocabulary_matrices(config, weights, stage)
    weights.finish(".*")  # the other tensors are not needed here: the ranks' parts of the model have them
    return replace(target, embedding=embedding, head=replace(target.head, weight=head))


def _count_copies(model: Eagle3Head | MTPHead, target: DecoderModel) -> int:
    """Return the bytes of the target model's embedding and output head, as far as the draft model uses them too.

    On this rank, both are copies that were loaded for the draft model only."""
    embedding, head = model.embedding, model.head.weight
    copies = [embedding.nbytes] * (embedding is target.embedding)
    copies += [head.nbytes] * (head is target.head.weight and head is not embedding)
    return sum(copies)
