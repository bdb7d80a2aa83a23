"""The base class of providers with an OpenAI-compatible chat API that does not accept all fields.

Fields that would make the provider reject the request are dropped or rewritten, and a reply header lists them. Requests
to the provider's own paths are not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from emberline.gateway.core.request import Dialect, GatewayRequest
from emberline.gateway.providers.base import Provider, report_change
from emberline.gateway.providers.inference_paths import OPENAI_INFERENCE, InferencePaths
from emberline.gateway.upstream.provider_request import ProviderRequest

MAX_TOKENS_FIELDS = ("max_completion_tokens", "max_tokens")
_RAW_FIELDS_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ChatProvider(Provider):
    """A provider with an OpenAI-compatible chat API.

    base_url ends with the API version (/v1). A path that repeats the version is accepted.
    """

    paths: ClassVar[Mapping[Dialect, str]] = {"openai-chat": "chat/completions"}
    max_tokens_field = "max_tokens"
    inference_paths = InferencePaths(OPENAI_INFERENCE)
    renamed_fields: ClassVar[Mapping[str, str]] = {}  # OpenAI's name -> the provider's
    unsupported_fields: ClassVar[frozenset[str]] = frozenset()  # fields that the provider rejects

    def normalize_endpoint(self, endpoint: str) -> str:
        return endpoint.removeprefix("v1/")

    def dialect_at(self, endpoint: str, query: str = "") -> Dialect:
        return super().dialect_at(self.normalize_endpoint(endpoint))

    def build_url(self, endpoint: str, query: str) -> str:
        if self._base_url.endswith("/v1"):
            endpoint = endpoint.removeprefix("v1/")
        return super().build_url(endpoint, query)

    def build_request(self, call: GatewayRequest, key: str | None) -> ProviderRequest:
        if call.is_dialect_endpoint and call.dialect == "openai-chat":
            call = call.with_changes(body=self._adapt_request(call))
        return super().build_request(call, key)

    def _adapt_request(self, call: GatewayRequest) -> bytes:
        fields: dict[str, Any] = dict(_RAW_FIELDS_DECODER.decode(call.body))
        before = dict(fields)
        for field in MAX_TOKENS_FIELDS:
            if field in fields and field != self.max_tokens_field:
                fields.setdefault(self.max_tokens_field, fields.pop(field))
        if not self.supports_include_usage:
            fields.pop("stream_options", None)  # these providers always send the usage
        for field, own in self.renamed_fields.items():
            if field in fields:
                fields[own] = fields.pop(field)
        for field in sorted(self.unsupported_fields_for(call.model) & fields.keys()):
            if bytes(fields.pop(field)) != b"null":
                report_change(call, field, f"{self.slug} does not accept it")
        self.adapt_fields(fields, call)
        return call.body if fields == before else msgspec.json.encode(fields)

    def unsupported_fields_for(self, model: str) -> frozenset[str]:
        return self.unsupported_fields

    def adapt_fields(self, fields: dict[str, Any], call: GatewayRequest) -> None:
        """Change `fields` in place for this provider. Values are raw JSON until `decode_field` decodes them."""


def decode_field(fields: dict[str, Any], name: str) -> Any:
    return msgspec.json.decode(fields[name]) if name in fields else None
