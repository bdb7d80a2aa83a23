"""UpstreamRequest: an HTTP request as a client sent it, or as the router sends it to a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from emberline.trace.context import TRACE_HEADERS

FORWARDED_TRACE_HEADERS = (*TRACE_HEADERS, "x-request-id")

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    method: str
    target: str  # path and query
    headers: Mapping[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def trace_headers(self) -> dict[str, str]:
        """The headers that tie all attempts of one request to one trace."""
        return {name: self.headers[name] for name in FORWARDED_TRACE_HEADERS if name in self.headers}

    def with_headers(self, headers: Mapping[str, str]) -> UpstreamRequest:
        return replace(self, headers={**self.headers, **headers})

    def without_fields(self, *names: str) -> UpstreamRequest:
        """Return the request without these fields of its JSON body, unchanged if it has none."""
        return self.with_fields({}, *names) if not _FIELDS.decode(self.body).keys().isdisjoint(names) else self

    def with_fields(self, fields: Mapping[str, Any], *removed: str) -> UpstreamRequest:
        """Return the request with `fields` set in its JSON body and `removed` left out.

        All other values keep their bytes."""
        body: dict[str, Any] = {name: raw for name, raw in _FIELDS.decode(self.body).items() if name not in removed}
        return replace(self, body=msgspec.json.encode(body | dict(fields)))
