"""The key of a call: equal for those calls, and only those, that may share a reply.

It has the tenant in it: the gateway, or by its settings the key or the user. A caller that brings a provider's key, or
names a stored one, shares only with calls of the same: a reply made with another credential is not served. The body
counts as canonical JSON, so that neither spaces nor the order of fields matter. One that two parsers could read in two
ways (a name twice in an object) counts as its bytes: else who asks one thing could leave the answer to another.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from emberline.gateway.body import canonical
from emberline.gateway.call import Call
from emberline.gateway.providers.base import CREDENTIALS

VERSION = 4  # of what a key is made of
SPEAKING = ("anthropic-version", "anthropic-beta", "openai-beta")  # headers that change a reply
SECRET = ("key", "api_key")  # query parameters that are credentials, of Gemini and others


def cache_key(call: Call) -> str:
    settings = call.settings
    tenant = [VERSION, call.account, call.gateway, *scope(call)]
    if settings.cache_invalidate_on_update:
        tenant.append(f"version {settings.version}")
    if call.options.cache_key is not None:
        return _digest([*tenant, "custom", call.dialect, call.stream, call.options.cache_key], b"")
    headers = [call.headers.get(name, "") for name in SPEAKING]
    given = call.settings.providers.get(call.provider)  # one that has moved is another
    place = [call.provider, given and given.base_url, call.endpoint, _public(call.query)]
    about = [*tenant, "exact", call.method, *place, call.dialect, call.model]
    surveyed = call.surveyed
    return _digest([*about, call.stream, *headers], canonical(call.body) if surveyed is None else surveyed.canonical)


def scope(call: Call) -> list[str]:
    """Who shares with this caller, within the gateway."""
    who = call.identity
    match call.settings.cache_scope:
        case "key":
            return ["key", who.key_id, *_credentials(call)]
        case "user":
            return ["user", who.user or who.key_id, *_credentials(call)]
    return ["gateway", *_credentials(call)]


def _credentials(call: Call) -> list[str]:
    """Those that the call brings or names itself; a call without any shares what the gateway's own keys paid for."""
    found = [f"alias {call.options.byok_alias}"] if call.options.byok_alias is not None else []
    found += _secrets(call.headers, call.query)
    for step in call.steps:  # a universal request has its keys there
        found += _secrets(step.headers or {}, (step.endpoint or "").partition("?")[2])
        if step.options is not None and step.options.byok_alias is not None:
            found.append(f"alias {step.options.byok_alias}")
    return found


def _secrets(headers: dict[str, str], query: str) -> list[str]:
    said = [part for part in query.split("&") if part.partition("=")[0] in SECRET]
    return [*(f"{name} {value}" for name in CREDENTIALS if (value := headers.get(name))), *said]


def _public(query: str) -> list[str]:
    if not query:
        return []
    return sorted(part for part in query.split("&") if part and part.partition("=")[0] not in SECRET)


def _digest(about: list[Any], body: bytes) -> str:
    return hashlib.sha256(msgspec.json.encode(about) + b"\n" + body).hexdigest()
