"""Words: what a dialect calls the fields of the inner form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from emberline.gateway.dialects.fields import Fields
from emberline.gateway.dialects.inner import Conversation, Json

_KINDS: Mapping[str, type[Any]] = {
    "max_output": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "n": int,
    "parallel_tools": bool,
    "verbosity": str,
    "stream": bool,
    "user": str,
    "metadata": dict,
}


@dataclass(frozen=True, slots=True)
class Words:
    plain: Mapping[str, str]  # ours -> theirs, of what is said in the same way
    others: Mapping[str, str]  # of what is not; those that are missing are called as we do
    message: str  # where one is
    part: str  # where one is in its message
    vital: Mapping[str, str]  # fields and parts without which a request would mean something else -> what to do instead
    system: str = "system[]"
    place: str = ""  # of the plain ones

    def name(self, field: str) -> str:
        """As a client would call it."""
        if field in self.plain:
            return self.place + self.plain[field]
        return self.message if field in ("messages", "system") else self.others.get(field, field)

    def take(self, fields: Fields, request: Conversation) -> None:
        for name, wire_name in self.plain.items():
            setattr(request, name, fields.texts(wire_name) if name == "stop" else fields.take(wire_name, _KINDS[name]))

    def said(self, request: Conversation) -> Json:
        return {
            wire_name: value for name, wire_name in self.plain.items() if (value := getattr(request, name)) is not None
        }
