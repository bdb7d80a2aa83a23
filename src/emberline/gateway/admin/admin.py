"""AdminAPI: dispatches requests of the management API to its endpoints.

Callers need an admin key of the account. The OpenAPI document describes every path. Errors have OpenAI's form, or the
form of Cloudflare's API on Cloudflare's paths.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from emberline.core.errors import EmberlineError, InvalidRequest, MethodNotAllowed, NotFound, Unauthorized
from emberline.gateway.admin import gateways
from emberline.gateway.admin.admin_context import AdminContext
from emberline.gateway.admin.admin_request import AdminRequest, check_name
from emberline.gateway.admin.audit import AuditEndpoints
from emberline.gateway.admin.budget_usage import BudgetUsageEndpoints
from emberline.gateway.admin.catalogue import CatalogueEndpoints
from emberline.gateway.admin.cloudflare import CloudflareEndpoints, build_error_envelope, build_success_envelope
from emberline.gateway.admin.cloudflare_datasets import DatasetEndpoints
from emberline.gateway.admin.cloudflare_providers import CloudflareProviderEndpoints
from emberline.gateway.admin.cloudflare_routes import CloudflareRouteEndpoints
from emberline.gateway.admin.endpoint import AdminEndpoint
from emberline.gateway.admin.keys import KeyEndpoints, ProviderKeyEndpoints
from emberline.gateway.admin.log_query import find_unknown_parameter, join_filter_parameters
from emberline.gateway.admin.logs import LogEndpoints
from emberline.gateway.admin.openapi import build_openapi_document
from emberline.gateway.admin.routes import RouteEndpoints
from emberline.gateway.core.errors import Forbidden
from emberline.gateway.core.identity import Identity
from emberline.gateway.costs.catalogue import CatalogueFiles
from emberline.wire.errors import render_openai_error

log = logging.getLogger("emberline.gateway.admin")

CLOUDFLARE_PREFIX = "/client/v4"  # optional prefix of the paths that Cloudflare's clients use
MAX_QUERY_PARAMETERS = 64
_ADMIN_PATH = re.compile(r"/admin/|/accounts/[^/]+/ai-gateway(/|$)")  # other paths of an account are inference


class AdminAPI:
    def __init__(self, context: AdminContext, version: str = "", catalogue: CatalogueFiles | None = None) -> None:
        self._endpoints = [
            AdminEndpoint("GET", "/admin/openapi.json", "This document", self._build_openapi_document),
            *gateways.gateway_endpoints(context),
            *BudgetUsageEndpoints(context).endpoints(),
            *KeyEndpoints(context).endpoints(),
            *ProviderKeyEndpoints(context).endpoints(),
            *CatalogueEndpoints(context, catalogue or CatalogueFiles()).endpoints(),
            *RouteEndpoints(context).endpoints(),
            *LogEndpoints(context).endpoints(),
            *AuditEndpoints(context).endpoints(),
            *CloudflareEndpoints(context).endpoints(),
            *CloudflareRouteEndpoints(context).endpoints(),
            *CloudflareProviderEndpoints(context).endpoints(),
            *DatasetEndpoints(context).endpoints(),
        ]
        self._version = version

    @staticmethod
    def handles_path(path: str) -> bool:
        """Return whether a path, still percent-encoded, belongs to this API."""
        return _ADMIN_PATH.match(path.removeprefix(CLOUDFLARE_PREFIX)) is not None

    async def handle(
        self, method: str, path: str, query: str, body: bytes, identity: Identity, origin: str = ""
    ) -> tuple[int, Any]:
        """Handle a request.

        Return the HTTP status and the JSON body of the reply, which describes the error after a failure. `origin`:
        scheme and host under which the caller reached the gateway.
        """
        path = path.removeprefix(CLOUDFLARE_PREFIX)
        is_cloudflare = path.startswith("/accounts/")
        try:
            endpoint, request = self._read_request(method, path, query, body, identity)
            if endpoint.is_export:
                raise InvalidRequest(
                    f"{method[:20]} {path[:200]} replies with JSON lines and cannot be handled as a JSON request",
                    hint="send GET",
                )
            result = await endpoint.handle(replace(request, origin=origin))
            return endpoint.status, msgspec.to_builtins(build_success_envelope(result) if is_cloudflare else result)
        except Exception as e:
            if not isinstance(e, EmberlineError):
                log.exception("Management request failed with an internal error: method=%s path=%s", method, path)
                e = EmberlineError(
                    f"{method[:20]} {path[:200]} failed with an internal error of the gateway",
                    hint="the gateway's log has the details; please report them",
                )
            return _render_error(path, e)

    def find_rejection(self, method: str, path: str, identity: Identity) -> tuple[int, Any] | None:
        """Return the error reply to a request whose path is unknown or whose caller may not use it, else None.

        To be called before the request's body is read."""
        path = path.removeprefix(CLOUDFLARE_PREFIX)
        try:
            self._find_permitted_endpoint(method, path, identity)
        except EmberlineError as e:
            return _render_error(path, e)
        return None

    def is_export(self, method: str, path: str) -> bool:
        """Return whether the endpoint replies with JSON lines (an export) instead of one JSON value.

        A request to such an endpoint must be passed to `export`, not to `handle`.
        """
        return any(e.is_export and e.method == method and e.match(path) is not None for e in self._endpoints)

    def export(self, method: str, path: str, query: str, identity: Identity) -> AsyncIterator[bytes]:
        """Return the JSON lines of an export.

        Raise EmberlineError at once if the request is invalid or forbidden.
        """
        endpoint, request = self._read_request(method, path, query, b"", identity)
        assert endpoint.lines is not None
        return endpoint.lines(request)

    def _read_request(
        self, method: str, path: str, query: str, body: bytes, identity: Identity
    ) -> tuple[AdminEndpoint, AdminRequest]:
        endpoint, path_parameters = self._find_permitted_endpoint(method, path, identity)
        request = AdminRequest(identity, path_parameters, _read_query(query), body)
        if name := find_unknown_parameter(request.query, endpoint.query):
            known = ", ".join(endpoint.query)
            raise InvalidRequest(
                f"unknown query parameter {name[:80]!r} of {method} {path[:200]}",
                param=name[:80],
                hint=f"known parameters: {known}" if known else "this endpoint has no query parameters",
            )
        if body and endpoint.request is None and method not in ("PATCH",):
            raise InvalidRequest(f"{method} {path[:200]} must have no body", hint="send the request without a body")
        return endpoint, request

    def _find_permitted_endpoint(
        self, method: str, path: str, identity: Identity
    ) -> tuple[AdminEndpoint, dict[str, str]]:
        endpoint, path_parameters = self._find_endpoint(method, path)
        if "account" in path_parameters:
            _check_access(identity, check_name(path_parameters["account"], "account"))
        return endpoint, path_parameters

    def _find_endpoint(self, method: str, path: str) -> tuple[AdminEndpoint, dict[str, str]]:
        methods = []
        for endpoint in self._endpoints:
            if (path_parameters := endpoint.match(path)) is not None:
                if endpoint.method == method:
                    return endpoint, path_parameters
                methods.append(endpoint.method)
        if methods:
            allowed = ", ".join(dict.fromkeys(methods))
            raise MethodNotAllowed(f"{path[:200]} must be called with {allowed}, not {method[:20]}", allowed=allowed)
        raise NotFound(f"the management API has no path {path[:200]!r}", hint="GET /admin/openapi.json lists all paths")

    @cached_property
    def _openapi(self) -> dict[str, Any]:
        return build_openapi_document(self._endpoints, self._version)

    async def _build_openapi_document(self, request: AdminRequest) -> dict[str, Any]:
        return self._openapi


def _render_error(path: str, error: EmberlineError) -> tuple[int, Any]:
    is_cloudflare = path.startswith("/accounts/")
    return error.status, build_error_envelope(error) if is_cloudflare else render_openai_error(error).body


def _check_access(identity: Identity, account: str) -> None:
    """Raise Unauthorized or Forbidden unless the caller has an admin key of the account."""
    if identity.kind == "anonymous":
        raise Unauthorized(
            "the management API requires an admin key and the request has none", hint="send Authorization: Bearer KEY"
        )
    if not identity.is_admin:
        raise Forbidden(
            f"key {identity.name!r} may not use the management API because the key lacks the scope admin",
            hint="use an admin key, or add the scope admin to this key",
        )
    if not fnmatchcase(account, identity.account):
        raise Forbidden(
            f"key {identity.name!r} belongs to account {identity.account!r} and may not manage account {account!r}",
            hint=f"use an admin key of account {account!r}",
        )


def _read_query(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_QUERY_PARAMETERS, errors="strict")
    except ValueError as e:
        raise InvalidRequest(
            f"the URL's query is invalid: {e}",
            hint=f"send at most {MAX_QUERY_PARAMETERS} parameters NAME=VALUE, joined by &",
        ) from e
    parameters: dict[str, str] = {}
    for name, value in join_filter_parameters(pairs):
        if name in parameters:
            raise InvalidRequest(
                f"query parameter {name[:80]!r} is given twice",
                param=name[:80],
                hint="put several values into one parameter, with commas between them",
            )
        parameters[name] = value
    return parameters
