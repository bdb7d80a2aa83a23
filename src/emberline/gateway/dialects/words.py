"""The names of the canonical request fields in a wire format."""

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
    plain: Mapping[str, str]  # canonical name -> wire name, for fields that are copied unchanged
    others: Mapping[str, str]  # canonical name -> wire path, for converted fields whose name differs
    message: str  # path of a message
    part: str  # path of a part within its message
    vital: Mapping[str, str]  # field or part that must not be dropped, because that changes the request -> hint
    system: str = "system[]"  # path of the system prompt
    place: str = ""  # path before the names in `direct`

    def name(self, field: str) -> str:
        """Return the path of a canonical field in this wire format."""
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
