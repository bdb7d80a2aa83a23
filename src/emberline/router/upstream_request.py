"""UpstreamRequest: an HTTP request that a client sent to the router, or that the router sends to a worker."""

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
        """The tracing headers of the request, which are sent with every attempt at a worker."""
        return {name: self.headers[name] for name in FORWARDED_TRACE_HEADERS if name in self.headers}

    def with_headers(self, headers: Mapping[str, str]) -> UpstreamRequest:
        return replace(self, headers={**self.headers, **headers})

    def without_fields(self, *names: str) -> UpstreamRequest:
        """Return the request without these fields of its JSON body, or unchanged if the body has none of them."""
        return self.with_fields({}, *names) if not _FIELDS.decode(self.body).keys().isdisjoint(names) else self

    def with_fields(self, fields: Mapping[str, Any], *removed_names: str) -> UpstreamRequest:
        """Return the request with `fields` added to its JSON body and the fields in `removed_names` left out.

        The values of all other fields stay the same, byte for byte."""
        body: dict[str, Any] = {
            name: raw for name, raw in _FIELDS.decode(self.body).items() if name not in removed_names
        }
        return replace(self, body=msgspec.json.encode(body | dict(fields)))
