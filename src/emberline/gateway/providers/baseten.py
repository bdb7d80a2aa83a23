"""Baseten: chat with the models it serves for all, and the deployments of an account, which have hosts of their own."""

from __future__ import annotations

import re

from emberline.core.errors import InvalidRequest
from emberline.gateway.providers.chatty import Chatty

MODEL = "model/"  # begins the path of a deployment: model/{id}, model/{id}/{path}
PREDICT = "environments/production/predict"
_ID = re.compile(r"[a-z0-9]{1,32}")


class Baseten(Chatty):
    slug = "baseten"
    base_url = "https://inference.baseten.co/v1"

    def model_in(self, endpoint: str) -> str:
        return endpoint.removeprefix(MODEL).partition("/")[0] if endpoint.startswith(MODEL) else ""

    def url(self, endpoint: str, query: str) -> str:
        if not endpoint.startswith(MODEL) or self._base_url != self.base_url:
            return super().url(endpoint, query)
        id, _, path = endpoint.removeprefix(MODEL).partition("/")
        if not _ID.fullmatch(id):  # it becomes a part of the host
            raise InvalidRequest(
                f"{id[:80]!r} is not the id of a deployment", param="endpoint", hint="1 to 32 letters and digits"
            )
        return f"https://model-{id}.api.baseten.co/{path or PREDICT}" + (f"?{query}" if query else "")
