"""Baseten: chat with its shared models, and an account's deployments, each of which has its own host."""

from __future__ import annotations

import re

from emberline.core.errors import InvalidRequest
from emberline.gateway.providers.chatty import Chatty

MODEL = "model/"  # a deployment's path is model/{id} or model/{id}/{path}
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
        if not _ID.fullmatch(id):  # the id becomes part of the host name
            raise InvalidRequest(
                f"{id[:80]!r} is not the id of a Baseten deployment",
                param="endpoint",
                hint="an id has 1 to 32 lower-case letters and digits",
            )
        return f"https://model-{id}.api.baseten.co/{path or PREDICT}" + (f"?{query}" if query else "")
