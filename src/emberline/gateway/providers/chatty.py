"""The base class of providers with an OpenAI-compatible chat API that lacks some fields.

Fields for which the provider would reject the whole request are dropped or rewritten, and reported in a reply header. A
request to the provider's own path is not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from emberline.gateway.call import Call, Dialect
from emberline.gateway.providers.base import Provider, report
from emberline.gateway.upstream.outgoing import Outgoing

LIMITS = ("max_completion_tokens", "max_tokens")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Chatty(Provider):
    """A provider whose base_url ends with the version, which paths may repeat."""

    paths: ClassVar[Mapping[Dialect, str]] = {"openai-chat": "chat/completions"}
    max_tokens_name = "max_tokens"
    renames: ClassVar[Mapping[str, str]] = {}  # OpenAI's name -> the provider's
    refuses: ClassVar[frozenset[str]] = frozenset()  # fields that the provider rejects

    def dialect_of(self, endpoint: str, query: str = "") -> Dialect:
        return super().dialect_of(endpoint.removeprefix("v1/"))

    def url(self, endpoint: str, query: str) -> str:
        if self._base_url.endswith("/v1"):
            endpoint = endpoint.removeprefix("v1/")
        return super().url(endpoint, query)

    def request(self, call: Call, key: str | None) -> Outgoing:
        if call.plain and call.dialect == "openai-chat":
            call = call.moved(body=self._reworded(call))
        return super().request(call, key)

    def _reworded(self, call: Call) -> bytes:
        fields: dict[str, Any] = dict(_FIELDS.decode(call.body))
        before = dict(fields)
        for field in LIMITS:
            if field in fields and field != self.max_tokens_name:
                fields.setdefault(self.max_tokens_name, fields.pop(field))
        if not self.counts_streams:
            fields.pop("stream_options", None)  # these providers always send the usage
        for field, own in self.renames.items():
            if field in fields:
                fields[own] = fields.pop(field)
        for field in sorted(self.refused(call.model) & fields.keys()):
            if bytes(fields.pop(field)) != b"null":
                report(call, field, f"{self.slug} does not accept it")
        self.reword(fields, call)
        return call.body if fields == before else msgspec.json.encode(fields)

    def refused(self, model: str) -> frozenset[str]:
        return self.refuses

    def reword(self, fields: dict[str, Any], call: Call) -> None:
        """Adapt `fields` in place for this provider; values are raw JSON until `decode_field` decodes them."""


def decoded_field(fields: dict[str, Any], name: str) -> Any:
    return msgspec.json.decode(fields[name]) if name in fields else None
