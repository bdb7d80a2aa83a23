"""Admin: the management API in one call. Who asks must be an admin of the account; every path is known to the OpenAPI
document; what goes wrong is an error in the shape of the path's face."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from emberline.api.errors import openai_error
from emberline.core.errors import EmberlineError, InvalidRequest, MethodNotAllowed, NotFound, Unauthorized
from emberline.gateway.admin import gateways
from emberline.gateway.admin.ask import Ask, named
from emberline.gateway.admin.audit import AuditDesk
from emberline.gateway.admin.catalogue import CatalogueDesk
from emberline.gateway.admin.cloudflare import CloudflareDesk, envelope, error_envelope
from emberline.gateway.admin.cloudflare_datasets import Datasets
from emberline.gateway.admin.cloudflare_providers import CloudflareProviders
from emberline.gateway.admin.cloudflare_routes import CloudflareRoutes
from emberline.gateway.admin.desk import Desk
from emberline.gateway.admin.endpoint import Endpoint
from emberline.gateway.admin.keys import KeyDesk, ProviderKeyDesk
from emberline.gateway.admin.logquery import gathered, unknown
from emberline.gateway.admin.logs import LogDesk
from emberline.gateway.admin.openapi import document
from emberline.gateway.admin.routes import RouteDesk
from emberline.gateway.admin.spent import SpentDesk
from emberline.gateway.costs.catalogue import CatalogueFiles
from emberline.gateway.errors import Forbidden
from emberline.gateway.keys.identity import Identity

log = logging.getLogger("emberline.gateway.admin")

CLIENT = "/client/v4"  # where Cloudflare's clients begin
MOST_PARAMETERS = 64
_OURS = re.compile(r"/admin/|/accounts/[^/]+/ai-gateway(/|$)")  # what else an account has is inference


class Admin:
    def __init__(self, desk: Desk, version: str = "", catalogue: CatalogueFiles | None = None) -> None:
        self._logs = LogDesk(desk)
        self._endpoints = [
            Endpoint("GET", "/admin/openapi.json", "This document", self._document),
            *gateways.endpoints(desk),
            *SpentDesk(desk).endpoints(),
            *KeyDesk(desk).endpoints(),
            *ProviderKeyDesk(desk).endpoints(),
            *CatalogueDesk(desk, catalogue or CatalogueFiles()).endpoints(),
            *RouteDesk(desk).endpoints(),
            *self._logs.endpoints(),
            *AuditDesk(desk).endpoints(),
            *CloudflareDesk(desk).endpoints(),
            *CloudflareRoutes(desk).endpoints(),
            *CloudflareProviders(desk).endpoints(),
            *Datasets(desk).endpoints(),
        ]
        self._openapi = document(self._endpoints, version)

    @staticmethod
    def owns(path: str) -> bool:
        """Whether a path belongs to this API. Paths are as on the wire, still percent-encoded."""
        return _OURS.match(path.removeprefix(CLIENT)) is not None

    async def handle(
        self, method: str, path: str, query: str, body: bytes, identity: Identity, origin: str = ""
    ) -> tuple[int, Any]:
        """Status, and what to send as JSON. `origin`: scheme and host by which the caller reached the gateway."""
        path = path.removeprefix(CLIENT)
        cloudflare = path.startswith("/accounts/")
        try:
            endpoint, ask = self._asked(method, path, query, body, identity)
            if endpoint.lines:
                raise InvalidRequest("this answers with JSON lines")
            found = await endpoint.handle(replace(ask, origin=origin))
            return endpoint.status, msgspec.to_builtins(envelope(found) if cloudflare else found)
        except Exception as e:
            if not isinstance(e, EmberlineError):
                log.exception("%s %s", method, path)
                e = EmberlineError("the gateway made a mistake", hint="its log says more; please report it")
            return e.status, error_envelope(e) if cloudflare else openai_error(e).body

    def exports(self, method: str, path: str) -> bool:
        """Whether this is answered with JSON lines."""
        return any(e.lines and e.method == method and e.match(path) is not None for e in self._endpoints)

    def export(self, method: str, path: str, query: str, identity: Identity) -> AsyncIterator[bytes]:
        """Raises before the first line if it may not be, or is wrongly asked."""
        _, ask = self._asked(method, path, query, b"", identity)
        return self._logs.lines(ask)

    def _asked(self, method: str, path: str, query: str, body: bytes, identity: Identity) -> tuple[Endpoint, Ask]:
        endpoint, parts = self._found(method, path)
        if "account" in parts:
            _admit(identity, named(parts["account"], "account"))
        ask = Ask(identity, parts, _read(query), body)
        if wrong := unknown(ask.query, endpoint.query):
            raise InvalidRequest(f"there is no parameter {wrong[:80]!r} here", param=wrong[:80])
        if body and endpoint.request is None and method not in ("PATCH",):
            raise InvalidRequest("this takes no body")
        return endpoint, ask

    def _found(self, method: str, path: str) -> tuple[Endpoint, dict[str, str]]:
        others = []
        for endpoint in self._endpoints:
            if (parts := endpoint.match(path)) is not None:
                if endpoint.method == method:
                    return endpoint, parts
                others.append(endpoint.method)
        if others:
            allowed = ", ".join(dict.fromkeys(others))
            raise MethodNotAllowed(f"this takes {allowed}, not {method[:20]}", allowed=allowed)
        raise NotFound(f"there is no {path[:200]}", hint="/admin/openapi.json lists what there is")

    async def _document(self, ask: Ask) -> dict[str, Any]:
        return self._openapi


def _admit(identity: Identity, account: str) -> None:
    if identity.kind == "anonymous":
        raise Unauthorized("the management API needs a key", hint="send Authorization: Bearer KEY")
    if not identity.admin:
        raise Forbidden("this key may not manage", hint="it needs the scope admin")
    if not fnmatchcase(account, identity.account):
        raise Forbidden(f"this key is not of account {account!r}")


def _read(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=MOST_PARAMETERS, errors="strict")
    except ValueError as e:
        raise InvalidRequest(f"the query cannot be read: {e}") from e
    pairs = gathered(pairs)
    found = dict(pairs)
    if len(found) < len(pairs):
        raise InvalidRequest("a parameter is given twice", hint="put several values in one, with commas between")
    return found
