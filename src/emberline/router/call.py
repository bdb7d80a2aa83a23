"""Call: what is sent to a worker, or came from a client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from emberline.trace.context import HEADERS

TRACES = (*HEADERS, "x-request-id")

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    target: str  # path and query
    headers: Mapping[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def traces(self) -> dict[str, str]:
        """By which the legs of one request are known to belong together."""
        return {name: self.headers[name] for name in TRACES if name in self.headers}

    def with_headers(self, headers: Mapping[str, str]) -> Call:
        return replace(self, headers={**self.headers, **headers})

    def without_fields(self, *names: str) -> Call:
        """As it was written, where it has none of them."""
        return self.with_fields({}, *names) if not _FIELDS.decode(self.body).keys().isdisjoint(names) else self

    def with_fields(self, fields: Mapping[str, Any], *without: str) -> Call:
        """Its body with other fields; all else stays as it was written."""
        body: dict[str, Any] = {name: raw for name, raw in _FIELDS.decode(self.body).items() if name not in without}
        return replace(self, body=msgspec.json.encode(body | dict(fields)))
