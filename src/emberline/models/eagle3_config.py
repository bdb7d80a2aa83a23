"""Eagle3Config: the checked config of an EAGLE-3 head. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.errors import UnsupportedModel
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig
from emberline.models.fields import ConfigFields

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_CAPTURED_LAYERS = 3
EMBEDDING_NAMES = ("embed_tokens.weight", "model.embed_tokens.weight")
IGNORABLE_TENSORS = r"t2d|.*rotary_emb\.inv_freq"  # t2d marks the tokens of the draft vocabulary, as d2t does


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The checked config of a head, from its config.json."""

    model: ModelConfig  # shape of its layer; `vocab` is the target model's
    draft_vocab: int  # tokens that it can predict
    captured_layers: tuple[int, ...]
    norm_before_residual: bool  # whether the residual is the normed hidden state

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint, target: ModelConfig) -> Eagle3Config:
        """Read the config of a head. Raise UnsupportedModel if it does not belong to the target model."""
        fields = ConfigFields(checkpoint.config, "config.json")
        classes = fields.text_list("architectures")
        if ARCHITECTURE not in classes:
            found = classes[0][:80] if classes else "no architecture"
            raise UnsupportedModel(
                f"{checkpoint.directory} has {found}, not an EAGLE-3 head",
                hint=f"its architecture must be {ARCHITECTURE}",
            )
        model = ModelConfig.from_hf({**checkpoint.config, "model_type": "llama", "architectures": None})
        if model.layers != 1:
            raise UnsupportedModel(f"{checkpoint.directory} has {model.layers} layers; an EAGLE-3 head has one")
        states = fields.size("target_hidden_size", model.hidden, maximum=1 << 17)
        for name, ours, theirs in (
            ("hidden size", model.hidden, target.hidden),
            ("hidden size of the target model", states, target.hidden),
            ("vocabulary", model.vocab, target.vocab),
        ):
            if ours != theirs:
                raise UnsupportedModel(
                    f"the EAGLE-3 head in {checkpoint.directory} has a {name} of {ours}; the model has {theirs}",
                    hint="use a head that was trained for this model",
                )
        return Eagle3Config(
            model=model,
            draft_vocab=fields.size("draft_vocab_size", model.vocab, maximum=model.vocab),
            captured_layers=_read_captured_layers(fields, target.layers),
            norm_before_residual=fields.flag("norm_before_residual", False),
        )


def _read_captured_layers(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    """Return the three layers of the target model whose inputs the head reads, by default `default_captured_layers`.

    Checkpoints of several publishers have the field in different places, or leave it out."""
    nested = fields.values.get("eagle_config")
    places = [nested, fields.values] if isinstance(nested, dict) else [fields.values]
    name = "eagle_aux_hidden_state_layer_ids"
    listed = next((place[name] for place in places if place.get(name) is not None), None)
    if listed is None:
        return default_captured_layers(layers)
    is_valid = (
        isinstance(listed, list)
        and len(listed) == NUM_CAPTURED_LAYERS
        and all(type(layer) is int and 0 <= layer < layers for layer in listed)
        and listed == sorted(set(listed))
    )
    if not is_valid:
        raise fields.invalid_error(name, f"{NUM_CAPTURED_LAYERS} ascending layers from 0 to {layers - 1}")
    return tuple(listed)


def default_captured_layers(layers: int) -> tuple[int, ...]:
    """Return the layers that a head reads if its config names none. A model needs at least three layers."""
    if layers < NUM_CAPTURED_LAYERS:
        raise UnsupportedModel(
            f"an EAGLE-3 head needs a model with at least {NUM_CAPTURED_LAYERS} layers, not {layers}"
        )
    low, middle, high = 2, layers // 2, layers - 3
    if low < middle < high:
        return low, middle, high
    return 0, layers // 2, layers - 1
