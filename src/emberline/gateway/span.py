"""Span: one call as OpenTelemetry tells it, in OTLP's JSON. Whole numbers are strings there, ids are hexadecimal."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import msgspec

from emberline.gateway.record import Record

CLIENT = 3  # its kind: we ask somebody else
OK, ERROR = 1, 2
LONGEST = 1 << 16  # characters of a prompt or a completion

Attribute = str | int | float | bool


class Span(msgspec.Struct, frozen=True, kw_only=True):
    record: Record
    trace: str  # 32 digits; "": one of its own
    parent: str  # 16 digits; "": there is none
    prompt: bytes | None = None
    completion: bytes | None = None

    def __len__(self) -> int:
        """Bytes that wait with it."""
        return len(self.prompt or b"") + len(self.completion or b"")

    def told(self) -> dict[str, Any]:
        record, begins = self.record, self.record.created * 1_000_000
        kind = record.request_type or "call"
        status: dict[str, Any] = {"code": OK} if record.success else {"code": ERROR, "message": _why(record)}
        parent = {"parentSpanId": self.parent} if self.parent else {}
        return {
            "traceId": self.trace or os.urandom(16).hex(),
            "spanId": os.urandom(8).hex(),
            **parent,
            "name": f"{kind} {record.model}".strip(),
            "kind": CLIENT,
            "startTimeUnixNano": str(begins),
            "endTimeUnixNano": str(begins + record.duration_ms * 1_000_000),
            "attributes": attributes(self._about()),
            "status": status,
        }

    def _about(self) -> dict[str, Attribute | None]:
        record = self.record
        return {
            **{f"metadata.{name}": value for name, value in record.metadata.items()},
            "gen_ai.operation.name": record.request_type or None,
            "gen_ai.provider.name": record.provider,
            "gen_ai.model.provider": record.provider,
            "gen_ai.request.model": record.model,
            "gen_ai.usage.input_tokens": record.usage.input,
            "gen_ai.usage.output_tokens": record.usage.output,
            "gen_ai.usage.cost": None if record.micros is None else record.micros / 1e6,  # dollars
            "gen_ai.conversation.id": record.session_id or None,
            "gen_ai.prompt_json": _text(self.prompt),
            "gen_ai.completion_json": _text(self.completion),
            "http.response.status_code": record.status,
            "error.type": None if record.success else _why(record),
            "emberline.log_id": record.id,
            "emberline.gateway": f"{record.account}/{record.gateway}",
            "emberline.cached": record.cached,
            "emberline.step": record.step,
            "emberline.attempts": record.attempts,
            "emberline.stream": record.stream,
            "emberline.first_byte_ms": record.first_byte_ms,
            "user.id": record.user or None,
        }


def exported(spans: Iterable[Span], version: str) -> bytes:
    """The body of an export."""
    resource = {"attributes": attributes({"service.name": "emberline-gateway", "service.version": version})}
    scope = {"name": "emberline.gateway", "version": version}
    scoped = [{"scope": scope, "spans": [span.told() for span in spans]}]
    return msgspec.json.encode({"resourceSpans": [{"resource": resource, "scopeSpans": scoped}]})


def attributes(found: dict[str, Attribute | None]) -> list[dict[str, Any]]:
    """What is None is not known, and not told."""
    return [{"key": name, "value": _value(value)} for name, value in found.items() if value is not None]


def _value(value: Attribute) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
    return {"stringValue": value}


def _text(said: bytes | None) -> str | None:
    return None if said is None else said.decode("utf-8", "replace")[:LONGEST]


def _why(record: Record) -> str:
    return record.error or record.ended
