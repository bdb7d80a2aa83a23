"""Baseten: chat with Baseten's shared models, and an account's deployments, each at a host of its own."""

from __future__ import annotations

import re

from emberline.core.errors import InvalidRequest
from emberline.gateway.providers.chat_provider import ChatProvider
from emberline.gateway.providers.inference_paths import OPENAI_INFERENCE, InferencePaths

MODEL_PREFIX = "model/"  # a deployment's path is model/{id} or model/{id}/{path}
PREDICT_PATH = "environments/production/predict"
_DEPLOYMENT_ID = re.compile(r"[a-z0-9]{1,32}")


class Baseten(ChatProvider):
    slug = "baseten"
    base_url = "https://inference.baseten.co/v1"
    inference_paths = InferencePaths(
        (
            *OPENAI_INFERENCE,
            f"{MODEL_PREFIX}{{model}}",
            f"{MODEL_PREFIX}{{model}}/production/predict",
            f"{MODEL_PREFIX}{{model}}/environments/{{}}/predict",
            *(f"{MODEL_PREFIX}{{model}}/environments/{{}}/sync/v1/{each}" for each in OPENAI_INFERENCE),
        )
    )

    def model_from_path(self, endpoint: str) -> str:
        return endpoint.removeprefix(MODEL_PREFIX).partition("/")[0] if endpoint.startswith(MODEL_PREFIX) else ""

    def build_url(self, endpoint: str, query: str) -> str:
        if not endpoint.startswith(MODEL_PREFIX) or self._base_url != self.base_url:
            return super().build_url(endpoint, query)
        id, _, path = endpoint.removeprefix(MODEL_PREFIX).partition("/")
        if not _DEPLOYMENT_ID.fullmatch(id):  # the id becomes part of the host name
            raise InvalidRequest(
                f"{id[:80]!r} is not the id of a Baseten deployment",
                param="endpoint",
                hint="an id has 1 to 32 lower-case letters and digits",
            )
        return f"https://model-{id}.api.baseten.co/{path or PREDICT_PATH}" + (f"?{query}" if query else "")
