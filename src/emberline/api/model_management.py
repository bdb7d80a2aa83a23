"""Requests and replies of the endpoints that pull, load, unload and remove models.

Progress is sent as lines of JSON in Ollama's form, on Emberline's own paths too:

    {"status": "pulling qwen3-0.6b", "digest": "sha256:..", "total": 639000000, "completed": 1048576}
    {"status": "loading qwen3-0.6b"}
    {"status": "success"}
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from msgspec import Meta

from emberline.api.fields import IgnoredField, IgnoredFields
from emberline.api.openai.sampling import ModelName
from emberline.api.parse import WireStruct, decode_request
from emberline.core.errors import InvalidRequest

SUCCESS = {"status": "success"}


class ModelRequest(WireStruct):
    model: ModelName | None = None
    name: ModelName | None = None  # Ollama's older name of `model`
    stream: bool | None = None  # None: true
    insecure: IgnoredField = None
    username: IgnoredField = None
    password: IgnoredField = None

    def require_model(self) -> str:
        if not (name := self.model or self.name):
            raise InvalidRequest("model is required and missing", param="model", hint="GET /admin/models lists models")
        return name


class UnloadRequest(ModelRequest):
    timeout_s: Annotated[float, Meta(ge=0, le=86400)] = 60.0  # for open requests, which fail after it


def parse_model_request(body: bytes) -> tuple[ModelRequest, IgnoredFields]:
    return decode_request(body, ModelRequest)


def parse_unload_request(body: bytes) -> tuple[UnloadRequest, IgnoredFields]:
    return decode_request(body, UnloadRequest)


def render_pull_progress(name: str, completed: int, total: int) -> dict[str, Any]:
    if not total:
        return {"status": f"pulling {name}"}
    digest = "sha256:" + hashlib.sha256(name.encode()).hexdigest()
    return {"status": f"pulling {name}", "digest": digest, "total": total, "completed": min(completed, total)}


def render_loading(name: str) -> dict[str, Any]:
    return {"status": f"loading {name}"}
