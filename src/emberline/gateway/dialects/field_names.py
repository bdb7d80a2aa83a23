"""Maps the fields of a canonical request to their names in a wire format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from emberline.gateway.dialects.canonical import CanonicalRequest, Json
from emberline.gateway.dialects.field_reader import FieldReader

_FIELD_TYPES: Mapping[str, type[Any]] = {
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
class FieldNames:
    direct: Mapping[str, str]  # canonical name -> wire name, for fields that are copied unchanged
    special: Mapping[str, str]  # canonical name -> wire path, for converted fields whose name differs
    message_path: str  # path of a message
    part_path: str  # path of a part within its message
    essential: Mapping[str, str]  # field or part that must not be dropped, because that changes the request -> hint
    system_path: str = "system[]"  # path of the system prompt
    direct_prefix: str = ""  # path before the names in `direct`

    def path_of(self, field: str) -> str:
        """Return the path of a canonical field in this wire format."""
        if field in self.direct:
            return self.direct_prefix + self.direct[field]
        return self.message_path if field in ("messages", "system") else self.special.get(field, field)

    def copy_fields_to_request(self, fields: FieldReader, request: CanonicalRequest) -> None:
        for name, wire_name in self.direct.items():
            setattr(
                request,
                name,
                fields.read_strings(wire_name) if name == "stop" else fields.read(wire_name, _FIELD_TYPES[name]),
            )

    def render_copied_fields(self, request: CanonicalRequest) -> Json:
        return {
            wire_name: value for name, wire_name in self.direct.items() if (value := getattr(request, name)) is not None
        }
