"""Requests and replies about models: /api/tags, /api/ps, /api/show and /api/version.

Names in Ollama have a tag. The server lists `smollm2` as `smollm2:latest`, and accepts both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from emberline.api.fields import IgnoredField
from emberline.api.openai.sampling import ModelName
from emberline.api.parse import WireStruct, decode_request
from emberline.core.errors import InvalidRequest
from emberline.wire.ollama import format_time

# The version of Ollama whose API the server follows. Clients compare it with the version that they need.
API_VERSION = "0.33.0"
DEFAULT_TAG = ":latest"
NEVER_UNLOADED_AT = 4102444800.0  # 2100-01-01: `expires_at` of models, which stay loaded until they are unloaded

UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """What Ollama's API reports about a model."""

    name: str
    created: int  # Unix time
    architecture: str  # model_type of the checkpoint, such as llama
    max_context: int
    num_bytes: int  # of the weights in memory
    is_on_gpu: bool = False
    parameter_count: int = 0  # 0: not known
    embedding_length: int = 0
    weight_format: str = ""  # such as bfloat16 or Q4_K
    template: str = ""
    capabilities: tuple[str, ...] = ("completion",)
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)


def add_tag(name: str) -> str:
    """Return the name with `:latest`, unless it has a tag."""
    return name if ":" in name.rpartition("/")[2] else name + DEFAULT_TAG


def format_parameter_count(count: int) -> str:
    """Return the number of parameters as model names state it, such as 134.5M; "" if it is 0."""
    for size, unit in UNITS:
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count or "")


def list_models(models: Iterable[OllamaModel]) -> dict[str, Any]:
    return {"models": [_render_entry(model) for model in models]}


def list_loaded_models(models: Iterable[OllamaModel]) -> dict[str, Any]:
    return {
        "models": [
            {
                **_render_entry(model),
                "expires_at": format_time(NEVER_UNLOADED_AT),
                "size_vram": model.num_bytes if model.is_on_gpu else 0,
                "context_length": model.max_context,
            }
            for model in models
        ]
    }


class OllamaShowRequest(WireStruct):
    model: ModelName | None = None
    name: ModelName | None = None  # the older name of `model`
    verbose: IgnoredField = None
    system: IgnoredField = None
    template: IgnoredField = None
    options: IgnoredField = None


def parse_show(body: bytes) -> str:
    """Return the name of the model to describe."""
    request, _ = decode_request(body, OllamaShowRequest)
    if not (name := request.model or request.name):
        raise InvalidRequest("model is required and missing", param="model", hint="GET /api/tags lists the models")
    return name


def render_description(model: OllamaModel) -> dict[str, Any]:
    """Return the reply of /api/show."""
    parameters = "\n".join(f"{name:<30} {value}" for name, value in model.sampling_defaults.items())
    known = {
        "general.parameter_count": model.parameter_count,
        f"{model.architecture}.embedding_length": model.embedding_length,
    }
    return {
        "modelfile": f"FROM {model.name}\n",
        "parameters": parameters,
        "template": model.template,
        "details": _render_details(model),
        "model_info": {
            "general.architecture": model.architecture,
            f"{model.architecture}.context_length": model.max_context,
            **{name: value for name, value in known.items() if value},
        },
        "capabilities": list(model.capabilities),
        "modified_at": format_time(model.created),
    }


def _render_entry(model: OllamaModel) -> dict[str, Any]:
    name = add_tag(model.name)
    return {
        "name": name,
        "model": name,
        "modified_at": format_time(model.created),
        "size": model.num_bytes,
        "digest": hashlib.sha256(model.name.encode()).hexdigest(),
        "details": _render_details(model),
    }


def _render_details(model: OllamaModel) -> dict[str, Any]:
    is_gguf = model.weight_format.startswith("Q")
    return {
        "parent_model": "",
        "format": "gguf" if is_gguf else "safetensors",
        "family": model.architecture,
        "families": [model.architecture],
        "parameter_size": format_parameter_count(model.parameter_count),
        "quantization_level": model.weight_format.upper(),
    }
