"""Summaries of the served models, for Ollama's API."""

from __future__ import annotations

from math import prod
from pathlib import Path

from emberline.api.ollama.models import OllamaModel
from emberline.core.errors import ModelError
from emberline.core.jsonfile import read_object_if_exists
from emberline.hub.checkpoint import Checkpoint
from emberline.worker.catalog import LoadedModel
from emberline.worker.on_demand_embedder import AnyEmbeddingModel

UNKNOWN_ARCHITECTURE = "unknown"
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
INDEX_DTYPES = ("I64", "BOOL")  # of tables such as position ids, which are no weights


def summarize_chat_model(model: LoadedModel, created: int) -> OllamaModel:
    info = model.generator.engine.model_info[model.name]
    config = read_object_if_exists(model.directory / "config.json")
    prompts = model.generator.prompt_builder
    has_template = bool(prompts.template_text)
    abilities = {"tools": has_template, "thinking": prompts.can_reason}
    return OllamaModel(
        name=model.name,
        created=created,
        architecture=str(config.get("model_type") or UNKNOWN_ARCHITECTURE),
        max_context=prompts.max_context,
        num_bytes=info.weight_bytes,
        is_on_gpu=info.device != "cpu",
        parameter_count=_count_parameters(model.directory),
        embedding_length=_read_size(config.get("hidden_size")),
        weight_format=info.stored_dtype,
        template=prompts.template_text,
        capabilities=("completion", *(name for name, is_present in abilities.items() if is_present)),
        sampling_defaults=model.sampling_defaults,
    )


def summarize_embedder(model: AnyEmbeddingModel, created: int) -> OllamaModel:
    config = read_object_if_exists(model.directory / "config.json")
    return OllamaModel(
        name=model.name,
        created=created,
        architecture=str(config.get("model_type") or UNKNOWN_ARCHITECTURE),
        max_context=model.max_tokens,
        num_bytes=sum(file.stat().st_size for file in model.directory.glob("*.safetensors")),
        parameter_count=_count_parameters(model.directory),
        embedding_length=model.dim,
        capabilities=("embedding",),
    )


def _count_parameters(directory: Path) -> int:
    """Return the number of weights; 0 if it is not known, as for formats that pack several weights into an integer."""
    try:
        tensors = Checkpoint.open(directory).tensors.values()
    except (ModelError, OSError):
        return 0
    weights = [tensor for tensor in tensors if tensor.dtype not in INDEX_DTYPES]
    if any(tensor.dtype not in PLAIN_DTYPES for tensor in weights):
        return 0
    return sum(prod(tensor.shape) for tensor in weights)


def _read_size(value: object) -> int:
    return value if isinstance(value, int) else 0
