"""select_text_config, select_text_model: the language model inside a multimodal checkpoint.

This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from emberline.hub.checkpoint import Checkpoint
from emberline.models.fields import ConfigFields

# By the model_type of the multimodal config.json.
TEXT_MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "kimi_k25": "kimi_k2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
TENSOR_PREFIXES = re.compile(r"(?:model\.language_model|language_model\.model)\.|language_model\.(?=lm_head\.)")
OTHER_TENSORS = re.compile(r"(?:model\.)?(?:vision_tower|vision_model|multi_modal_projector|mm_projector|visual)\..*")
SHARED_FIELDS = ("quantization_config", "eos_token_id", "tie_word_embeddings")  # of the outer config


def select_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model: `config` itself, or the text_config of a multimodal one."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in TEXT_MODEL_TYPES:
        return config
    text = ConfigFields(config, "config.json").section("text_config").values
    shared = {name: config[name] for name in SHARED_FIELDS if name in config}
    text = {name: value for name, value in text.items() if value is not None or name not in shared}
    return {**shared, **text, "model_type": TEXT_MODEL_TYPES[model_type], "architectures": None}


def select_text_model(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the tensors of the language model only, named as in a checkpoint of text only."""
    if ConfigFields(checkpoint.config, "config.json").text("model_type", "") not in TEXT_MODEL_TYPES:
        return checkpoint
    tensors = {}
    for name, info in checkpoint.tensors.items():
        if not OTHER_TENSORS.fullmatch(name):
            prefix = TENSOR_PREFIXES.match(name)
            bare = name if prefix is None else name[prefix.end() :]
            tensors[bare if prefix is None or bare.startswith("lm_head.") else f"model.{bare}"] = info
    return replace(checkpoint, tensors=tensors)
