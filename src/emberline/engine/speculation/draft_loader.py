"""load_draft_model: loads the draft model that an engine's settings name, and checks that it fits the target model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from emberline.core.engine_config import SpeculationConfig
from emberline.core.errors import UnsupportedModel
from emberline.core.jsonfile import read_object
from emberline.engine.model_support import reject_states
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.source import resolve_model
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.draft_model import DecoderDraftModel, DraftModel
from emberline.models.eagle3 import load_eagle3_head
from emberline.models.mtp import load_mtp_head
from emberline.models.tensor_names import ignorable_tensors, load_model
from emberline.models.weights import Weights

TOKENIZER_FILE = "tokenizer.json"


def load_draft_model(
    settings: SpeculationConfig,
    target: DecoderModel,
    target_directory: Path,
    open_weights: Callable[[Checkpoint], Weights],
) -> DraftModel | None:
    """Return the draft model of an engine; None if its settings name none.

    `open_weights`: returns the tensors of a checkpoint for the engine's device, in the target model's dtype. Raises
    UnsupportedModel if the draft model does not fit the target model, ModelFileError if it is damaged."""
    if settings.method == "mtp":
        return load_mtp_head(open_weights(Checkpoint.open(target_directory)), target)
    if settings.draft_source is None:
        return None
    directory = resolve_model(settings.draft_source)
    checkpoint = Checkpoint.open(directory)
    weights = open_weights(checkpoint)
    if settings.method == "eagle3":
        return load_eagle3_head(checkpoint, weights, target.config, target.context, target.embedding)
    config = ModelConfig.from_checkpoint(checkpoint)
    reject_states(config, "a draft model", "use a draft model without recurrent layers")
    check_vocabulary(directory, config, target_directory, target.config)
    if config.longest_context < target.context:
        raise UnsupportedModel(
            f"the draft model in {directory} has a context of {config.longest_context} tokens; "
            f"the model is served with {target.context}",
            hint=f"use --max-context {config.longest_context}",
        )
    model = load_model(config, weights, target.context)
    weights.finish(ignorable_tensors(config))
    return DecoderDraftModel(model, target.config.vocab, weights.loaded_bytes)


def check_vocabulary(draft: Path, draft_config: ModelConfig, target: Path, target_config: ModelConfig) -> None:
    """Raise UnsupportedModel unless both models have the same tokens.

    The tokenizer files are compared. Without them, the vocabularies must have equal sizes; with them,
    the sizes may differ by padding."""
    hint = "use a draft model with the tokenizer of the model"
    ours, theirs = draft / TOKENIZER_FILE, target / TOKENIZER_FILE
    if not (ours.is_file() and theirs.is_file()):
        if draft_config.vocab != target_config.vocab:
            raise UnsupportedModel(
                f"the draft model in {draft} has {draft_config.vocab} tokens, and the model {target_config.vocab}",
                hint=hint,
            )
        return
    known, expected = _read_tokens(ours), _read_tokens(theirs)
    if known != expected:
        differing = next(token for token in {**expected, **known} if known.get(token) != expected.get(token))
        raise UnsupportedModel(
            f"the draft model in {draft} has another vocabulary than the model: {differing[:40]!r} is token "
            f"{known.get(differing)} there, and {expected.get(differing)} in the model",
            hint=hint,
        )


def _read_tokens(file: Path) -> dict[str, int]:
    """Return the ids of all tokens of a tokenizer.json."""
    content: dict[str, Any] = read_object(file)
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    listed = content.get("added_tokens")
    tokens: dict[str, int] = dict(vocab) if isinstance(vocab, dict) else {}
    for added in listed if isinstance(listed, list) else []:
        if isinstance(added, dict):
            tokens[str(added.get("content"))] = added.get("id", -1)
    return tokens
