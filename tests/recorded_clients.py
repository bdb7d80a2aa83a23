"""Requests of real clients, recorded without their texts by `scripts/test-clients --record tests/wire/clients`.

A recording keeps the structure of a request, the names of its fields and tools, and the shape of the tools' schemas.
Texts, ids and paths are replaced by short ones.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from agent_server import MARKER, RUN

FOLDER = Path(__file__).parent / "wire" / "clients"
KEPT_HEADERS = ("accept", "anthropic-beta", "anthropic-version", "content-type")
KEPT_VALUES = frozenset({"type", "role", "status", "effort", "summary", "display", "keep", "ttl", "model", "name",
                         "tool_choice", "include", "truncation", "service_tier", "phase", "namespace", "required",
                         "tool_name"})  # fmt: skip
ID_FIELDS = frozenset({"id", "call_id", "tool_use_id", "tool_call_id"})
_WORD = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")


def summarise_request(record: dict[str, Any]) -> dict[str, Any]:
    """Return a request as tests/agent_server.py records it, without its texts."""
    headers = {name: value for name, value in record["headers"].items() if name in KEPT_HEADERS}
    ignored = record["reply_headers"].get("x-emberline-ignored", "")
    body = _Summary().strip(json.loads(record["body"])) if record["body"] else None
    return {"method": record["method"], "path": record["path"], "headers": headers, "ignored": ignored, "body": body}


class _Summary:
    """Replaces the texts of one request. The same id gets the same replacement."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}

    def strip(self, value: Any, field: str = "") -> Any:
        if isinstance(value, dict):
            if field in ("metadata", "client_metadata"):
                return {f"key{i}": "x" for i in range(len(value))} if field == "client_metadata" else {"user_id": "x"}
            return {name: self.strip(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.strip(inner, field) for inner in value]
        return self._strip_text(value, field) if isinstance(value, str) else value

    def _strip_text(self, text: str, field: str) -> str:
        if field in ID_FIELDS:
            return self._ids.setdefault(text, f"{text.partition('_')[0][:8]}_{len(self._ids)}")
        if field in KEPT_VALUES and _WORD.fullmatch(text):
            return text
        if RUN in text:  # what the test says to the model
            return RUN
        if MARKER in text and field != "arguments":
            return MARKER
        if field == "arguments":
            return json.dumps(self.strip(json.loads(text)))
        return "x" if text else ""


def list_recordings() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_recording(name: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / f"{name}.json").read_text())["requests"]
