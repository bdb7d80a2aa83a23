"""select_model_tensors: the tensors that a model loads, with the stored parts of each quantised matrix joined.

This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from emberline.core.errors import ModelFileError
from emberline.hub.checkpoint import Checkpoint, format_names
from emberline.models.quantisation_config import QuantisationConfig, read_quantisation
from emberline.models.quantised_layouts import QuantisedTensorInfo, TensorJoiner
from emberline.models.textmodel import select_text_config, select_text_model
from emberline.models.weight_formats import QuantisedSize

__all__ = ["QuantisedTensorInfo", "list_quantised_sizes", "read_loaded_quantisation", "select_model_tensors"]

# Output heads, embeddings, projections from latents, and projections that are split before they are packed.
DEQUANTISED_TENSORS = re.compile(r"^lm_head\.|\.embed_tokens\.|\.kv_b_proj\.|\.linear_attn\.in_proj")
GATED_QUERY_TENSORS = re.compile(r"\.self_attn\.[qkv]_proj\.")  # whose rows are reordered, if queries have gates


def read_loaded_quantisation(config: Mapping[str, Any]) -> QuantisationConfig | None:
    """Return how a checkpoint's matrices are quantised; None: they are not.

    `config`: that of the language model. Raises UnsupportedModel if the format cannot be loaded."""
    return read_quantisation(config) if config.get("quantization_config") else None


def list_quantised_sizes(checkpoint: Checkpoint, *, has_query_gate: bool = False) -> list[QuantisedSize]:
    """Return the sizes of the matrices that a GPU keeps quantised, from the headers of the files.

    `has_query_gate`: whether queries have gates; then the projections of queries, keys and values are dequantised."""
    return list_selected_quantised_sizes(select_model_tensors(checkpoint), has_query_gate=has_query_gate)


def list_selected_quantised_sizes(selected: Checkpoint, *, has_query_gate: bool = False) -> list[QuantisedSize]:
    """Return the same as `list_quantised_sizes`, for the model's tensors or for a rank's part of them.

    `selected`: a checkpoint that `select_model_tensors` or `shard_checkpoint` returned."""
    sizes = []
    for name, info in selected.tensors.items():
        is_dequantised = DEQUANTISED_TENSORS.search(name) or (has_query_gate and GATED_QUERY_TENSORS.search(name))
        if isinstance(info, QuantisedTensorInfo) and not is_dequantised:
            rows, columns = info.shape[-2:][:: -1 if info.is_transposed else 1]
            form = info.format.name, info.format.group_columns
            sizes.append(QuantisedSize(rows, columns, prod(info.shape[:-2]), info.kept_bytes, *form))
    return sizes


def select_model_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with only the tensors of the language model, under the names that the model loads.

    Raises ModelFileError, which lists the missing scales, if quantised tensors lack scales."""
    selected = select_text_model(checkpoint)
    found = read_loaded_quantisation(select_text_config(checkpoint.config))
    if found is None:
        return selected
    joiner = TensorJoiner(found, dict(selected.tensors))
    joiner.join_all()
    if joiner.lacking:
        raise ModelFileError(
            f"{checkpoint.directory} lacks the scales of quantised tensors ({len(joiner.lacking)}): "
            f"{format_names(joiner.lacking)}",
            hint="check that all files of the model are there",
        )
    return replace(selected, tensors=joiner.tensors)
