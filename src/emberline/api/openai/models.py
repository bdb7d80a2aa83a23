"""Replies of GET /v1/models and GET /v1/models/{id}, with the fields of both OpenAI and Anthropic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from emberline.core.errors import ModelNotFound


@dataclass(frozen=True, slots=True)
class ServedModel:
    id: str
    created: int  # seconds since the epoch
    max_context: int
    owned_by: str = "emberline"
    kind: str = "chat"  # or "embedding"; the playground offers each kind its own page
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # values for requests that do not set them
    description: str = ""  # for names that do not say what the model is


def list_models(models: Sequence[ServedModel]) -> dict[str, Any]:
    """Return the list of models, with chat models before all others: many clients chat with the first."""
    models = sorted(models, key=lambda model: model.kind != "chat")
    data = [_render_model_entry(model) for model in models]
    ends = {"first_id": models[0].id, "last_id": models[-1].id} if models else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, "has_more": False, **ends}


def retrieve_model(models: Sequence[ServedModel], id: str) -> dict[str, Any]:
    for model in models:
        if model.id == id:
            return _render_model_entry(model)
    raise ModelNotFound(f"model {id[:200]!r} not found", hint="GET /v1/models lists the models")


def _render_model_entry(model: ServedModel) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": model.owned_by,
        "root": model.id,  # `root` and `parent`: fields of vLLM and SGLang about adapters
        "parent": None,
        "max_model_len": model.max_context,
        "kind": model.kind,
        "type": "model",
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    if model.description:
        entry["description"] = model.description
    if model.sampling_defaults:
        entry["default_sampling_params"] = dict(model.sampling_defaults)
    return entry
