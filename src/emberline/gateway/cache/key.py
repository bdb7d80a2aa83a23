"""The key under which the reply to a request is cached. Requests with equal keys may share a reply.

The key contains the gateway and, depending on the setting `cache_scope`, the caller's API key or user. It also contains
the provider credential that the request sends or names, so a reply that was paid with one credential is never served
for a request with a different credential.

A JSON body is compared in canonical form, so whitespace and the order of fields do not matter. A body in which an
object has the same field twice is compared byte by byte: parsers disagree about such a body, and a caller could use it
to store the reply to one question under the key of another question.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from emberline.gateway.core.request import GatewayRequest
from emberline.gateway.core.request_body import canonicalize_body
from emberline.gateway.providers.base import CREDENTIAL_HEADERS

KEY_VERSION = 4  # changes with the contents of the key
VARY_HEADERS = ("anthropic-version", "anthropic-beta", "openai-beta")  # request headers that change the reply
SECRET_QUERY_PARAMETERS = ("key", "api_key")  # credentials, of Gemini and others


def cache_key(call: GatewayRequest) -> str:
    settings = call.settings
    tenant = [KEY_VERSION, call.account, call.gateway, *sharing_scope(call)]
    if settings.cache_invalidate_on_update:
        tenant.append(f"version {settings.version}")
    if call.options.cache_key is not None:
        return _hash_parts([*tenant, "custom", call.dialect, call.stream, call.options.cache_key], b"")
    headers = [call.headers.get(name, "") for name in VARY_HEADERS]
    configured = call.settings.providers.get(call.provider)  # another base URL is another provider
    target = [call.provider, configured and configured.base_url, call.endpoint, _query_without_credentials(call.query)]
    parts = [*tenant, "exact", call.method, *target, call.dialect, call.model]
    summary = call.body_summary
    return _hash_parts(
        [*parts, call.stream, *headers], canonicalize_body(call.body) if summary is None else summary.canonical_digest
    )


def sharing_scope(call: GatewayRequest) -> list[str]:
    """Return the parts of the cache key that decide which callers of the gateway share a reply."""
    identity = call.identity
    match call.settings.cache_scope:
        case "key":
            return ["key", identity.key_id, *_request_credentials(call)]
        case "user":
            return ["user", identity.user or identity.key_id, *_request_credentials(call)]
    return ["gateway", *_request_credentials(call)]


def _request_credentials(call: GatewayRequest) -> list[str]:
    """Return the provider credentials in the request, and the aliases of stored keys that it names."""
    found = [f"alias {call.options.byok_alias}"] if call.options.byok_alias is not None else []
    found += _credential_parts(call.headers, call.query)
    for step in call.steps:  # a universal request has its keys in the steps
        found += _credential_parts(step.headers or {}, (step.endpoint or "").partition("?")[2])
        if step.options is not None and step.options.byok_alias is not None:
            found.append(f"alias {step.options.byok_alias}")
    return found


def _credential_parts(headers: dict[str, str], query: str) -> list[str]:
    parameters = [part for part in query.split("&") if part.partition("=")[0] in SECRET_QUERY_PARAMETERS]
    return [*(f"{name} {value}" for name in CREDENTIAL_HEADERS if (value := headers.get(name))), *parameters]


def _query_without_credentials(query: str) -> list[str]:
    if not query:
        return []
    return sorted(part for part in query.split("&") if part and part.partition("=")[0] not in SECRET_QUERY_PARAMETERS)


def _hash_parts(parts: list[Any], body: bytes) -> str:
    return hashlib.sha256(msgspec.json.encode(parts) + b"\n" + body).hexdigest()
