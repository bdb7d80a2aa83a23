"""Gateway: turns an HTTP request into a GatewayRequest and sends it through the layers.

Every failure becomes an error reply in the client's dialect (wire format).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Protocol
from urllib.parse import parse_qsl

import msgspec

from emberline.core.clock import Clock
from emberline.core.errors import EmberlineError, InvalidRequest, MethodNotAllowed, Unauthorized
from emberline.core.fair_threads import current_client
from emberline.core.offload import LARGE_INPUT_BYTES, offload
from emberline.gateway.core.body_summary import summarize_body
from emberline.gateway.core.forms import is_form, read_form_fields
from emberline.gateway.core.identity import ANONYMOUS, Identity
from emberline.gateway.core.options import GATEWAY_ID_HEADER, NO_OPTIONS, RequestOptions
from emberline.gateway.core.paths import DEFAULT_NAME, RequestTarget, parse_path
from emberline.gateway.core.request import (
    Dialect,
    GatewayReply,
    GatewayRequest,
    Handler,
    Layer,
    RequestStep,
)
from emberline.gateway.core.request_body import BodyFields, read_body_fields
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.core.unified_endpoints import PROVIDER_HEADER
from emberline.gateway.error_replies import error_reply
from emberline.gateway.keys.key_store import is_gateway_key
from emberline.gateway.logs.request_ids import RequestIDGenerator
from emberline.gateway.providers.base import CREDENTIAL_HEADERS
from emberline.gateway.providers.registry import ProviderRegistry
from emberline.gateway.routes.model_names import resolve_model
from emberline.gateway.routes.universal import read_steps
from emberline.trace.context import TRACE_HEADERS as TRACES

log = logging.getLogger("emberline.gateway")

GATEWAY_KEY_HEADERS = ("cf-aig-authorization", "x-auth-token")  # headers for gateway keys only
MAX_CACHED_PATHS, MAX_CACHED_PATH_CHARS = 1000, 200  # parsed paths that are kept
KEY_HEADERS = (*GATEWAY_KEY_HEADERS, *CREDENTIAL_HEADERS)  # headers that may have a gateway key


class InboundRequest(msgspec.Struct, frozen=True):
    """An HTTP request as received from the client."""

    method: str
    path: str
    query: str
    headers: dict[str, str]  # names in lower case
    body: bytes


# Takes the body of a request whose head was accepted, and answers it.
BodyHandler = Callable[[bytes], Awaitable[GatewayReply]]


class SettingsSource(Protocol):
    """Looks up the settings of a gateway."""

    async def get_settings(self, account: str, gateway: str) -> GatewaySettings:
        """Return the settings. Raise GatewayNotFound if the account has no such gateway."""
        ...


class IdentitySource(Protocol):
    """Looks up the identity of a gateway key."""

    async def identify(self, secret: str) -> Identity | None:
        """Return the identity of the key with this secret, or None if it is not a valid gateway key."""
        ...

    async def identity_by_key_id(self, key_id: str) -> Identity | None:
        """Return the identity of the key with this id, or None if the key expired or was revoked."""
        ...


class Gateway:
    def __init__(
        self,
        handler: Handler,
        session_handler: Handler,
        registry: ProviderRegistry,
        settings_source: SettingsSource,
        identity_source: IdentitySource,
        clock: Clock,
        wall_clock: Clock,
        outer_layer: Layer = lambda inner: inner,
    ) -> None:
        """Create a gateway. `session_handler` opens realtime sessions at providers.

        `clock` is monotonic; `wall_clock` returns seconds since 1970. `outer_layer` counts and logs the requests that
        are rejected before they reach `handler`.
        """
        self._outer_layer = outer_layer
        self._handler = handler
        self._session_handler = session_handler
        self._registry = registry
        self._settings_source = settings_source
        self._identity_source = identity_source
        self._clock = clock
        self._wall_clock = wall_clock
        self._ids = RequestIDGenerator()
        self._targets: dict[str, RequestTarget] = {}  # cache, by path

    async def admit(self, head: InboundRequest) -> BodyHandler | GatewayReply:
        """Check a request by its path and headers, before its body is read.

        Return the function that answers the request, or an error reply if the path is unknown or the key is missing or
        wrong. `head` is the request without its body.
        """
        started = await self._start_or_reject(head)
        return started if isinstance(started, GatewayReply) else partial(self._answer_body, *started)

    async def answer(self, inbound: InboundRequest, key_id: str | None = None) -> GatewayReply:
        """Answer a request. Every failure becomes an error reply.

        `key_id` is set only for a request from the batch queue: the id of the key that queued the request, or "" if no
        key was used.
        """
        started = await self._start_or_reject(inbound, key_id)
        if isinstance(started, GatewayReply):
            return started
        return await self._answer_body(*started, inbound.body)

    async def _start_or_reject(
        self, head: InboundRequest, key_id: str | None = None
    ) -> tuple[GatewayRequest, RequestTarget] | GatewayReply:
        """Return the request without its body, and its target; or an error reply if its head is invalid."""
        try:
            target = self._find_target(head.path)
            request = await self._start_request(target, head)
            if key_id:
                request.identity = await self._current_identity(key_id)
            request.settings.check_caller(request.identity)
        except Exception as e:
            return self._reply_with_error(head, e)
        try:
            _read_head(request, target, head)
        except Exception as e:
            return await self._reject(request, e)
        return request, target

    async def _answer_body(self, request: GatewayRequest, target: RequestTarget, body: bytes) -> GatewayReply:
        request.body = body
        try:
            await self._read_destination(request, target)
        except Exception as e:
            return await self._reject(request, e)
        return await self._run(self._handler, request)

    async def _reject(self, request: GatewayRequest, error: Exception) -> GatewayReply:
        """Reply with an error. Of the layers, only the outer one sees the request, for metrics and log."""

        async def raise_error(_: GatewayRequest) -> GatewayReply:
            raise error

        return await self._run(self._outer_layer(raise_error), request)

    async def _run(self, handler: Handler, request: GatewayRequest) -> GatewayReply:
        try:
            reply = await handler(request)
        except Exception as e:
            if not isinstance(e, EmberlineError):
                log.exception("Request failed with an internal error: endpoint=%s", request.endpoint)
            return error_reply(request.dialect, e)
        reply.send_timeout_s, reply.dialect = request.deadline - self._clock.now(), request.dialect
        return reply

    def _reply_with_error(self, head: InboundRequest, error: Exception) -> GatewayReply:
        """Return the error reply in the dialect of the path."""
        if not isinstance(error, EmberlineError):
            log.exception("Request failed with an internal error: method=%s path=%s", head.method, head.path)
        return error_reply(self._dialect_of_path(head.path), error)

    def _dialect_of_path(self, path: str) -> Dialect:
        try:
            return self._find_target(path).dialect
        except EmberlineError:
            return "raw"

    async def open_realtime_session(self, target: RequestTarget, inbound: InboundRequest, model: str) -> GatewayReply:
        """Open a realtime session at a provider. Return the open session, or an error reply if that failed."""
        try:
            request = await self.build_request(target, inbound)
            request.model, request.stream = model, True
            request.deadline = request.started_at + request.settings.timeouts.session
            return await self._session_handler(request)
        except Exception as e:
            if not isinstance(e, EmberlineError):
                log.exception("Realtime session failed with an internal error: path=%s", inbound.path)
            return error_reply("raw", e)

    def _find_target(self, path: str) -> RequestTarget:
        """Return the target of a path. Raise NotFound or InvalidRequest if it has none."""
        if (known := self._targets.get(path)) is not None:
            return known
        target = parse_path(path)
        if len(path) < MAX_CACHED_PATH_CHARS:
            if len(self._targets) >= MAX_CACHED_PATHS:
                self._targets.clear()
            self._targets[path] = target
        return target

    async def build_request(self, target: RequestTarget, inbound: InboundRequest) -> GatewayRequest:
        """Return the request for the layers. Raise an EmberlineError if the request is rejected."""
        request = await self._start_request(target, inbound)
        _read_head(request, target, inbound)
        request.body = inbound.body
        await self._read_destination(request, target)
        return request

    async def _start_request(self, target: RequestTarget, head: InboundRequest) -> GatewayRequest:
        """Return a request without its body, with its gateway and its caller.

        These must be known before anything is recorded. Raise GatewayNotFound or Unauthorized.
        """
        began = self._clock.now()
        gateway = target.gateway or head.headers.get(GATEWAY_ID_HEADER, "").strip() or DEFAULT_NAME
        settings = await self._settings_source.get_settings(target.account, gateway)
        received = headers_with_query_key(head.headers, head.query) if target.dialect == "gemini" else head.headers
        identity, headers = await self._identify_and_strip_keys(target, received)
        return GatewayRequest(
            id=self._ids.next_id(round(self._wall_clock.now() * 1e3)),
            account=target.account,
            gateway=gateway,
            provider=target.provider,
            endpoint=target.endpoint,
            dialect=target.dialect,
            method=head.method,
            headers=headers,
            query=head.query,
            body=b"",
            model="",
            stream=False,
            max_output=None,
            options=NO_OPTIONS,
            identity=identity,
            settings=settings,
            started_at=began,
            deadline=began + settings.timeouts.total,
            trace_headers={name: headers[name] for name in TRACES if name in headers},
        )

    async def _read_destination(self, request: GatewayRequest, target: RequestTarget) -> None:
        """Read from path and body where the request goes. Raise an EmberlineError if they are invalid."""
        if len(request.body) >= LARGE_INPUT_BYTES and target.kind != "universal" and not _has_form(request):
            request.body_summary = await offload.run(len(request.body), summarize_body, request.body)
        await self._set_destination(request, target)
        if len(request.body) >= LARGE_INPUT_BYTES and request.body_summary is None and not _has_form(request):
            # the body is that of a step
            request.body_summary = await offload.run(len(request.body), summarize_body, request.body)

    async def authenticate(self, target: RequestTarget, headers: dict[str, str]) -> tuple[Identity, GatewaySettings]:
        """Return the caller's identity and the gateway's settings.

        This method is for requests that are answered without a provider. Raise Unauthorized if the gateway requires a
        key and the headers have none.
        """
        gateway = target.gateway or RequestOptions.from_headers(headers).gateway_id or DEFAULT_NAME
        identity, _ = await self._identify_and_strip_keys(target, headers)
        settings = await self._settings_source.get_settings(target.account, gateway)
        settings.check_caller(identity)
        return identity, settings

    async def identify(self, headers: dict[str, str]) -> Identity:
        """Return the identity of a caller whose request is not for a provider.

        Raise Unauthorized if the headers have only invalid keys.
        """
        identity, _ = await self._identify_and_strip_keys(RequestTarget("plain"), headers)
        if identity is ANONYMOUS and (name := next((name for name in KEY_HEADERS if headers.get(name)), None)):
            raise _make_wrong_key_error(name)
        return identity

    async def _current_identity(self, key_id: str) -> Identity:
        """Return the present identity of the key that queued a request.

        Raise Unauthorized if the key expired or was revoked.
        """
        if (found := await self._identity_source.identity_by_key_id(key_id)) is None:
            raise Unauthorized(
                f"API key {key_id[:80]!r}, which queued this request, expired or was revoked",
                hint="create a new key at /keys and submit the request again",
            )
        return found

    async def _identify_and_strip_keys(
        self, target: RequestTarget, headers: dict[str, str]
    ) -> tuple[Identity, dict[str, str]]:
        """Return the caller's identity, and the headers without gateway keys.

        Providers never receive gateway keys, not even invalid ones. If the path names a provider, the usual key headers
        contain the provider's key, unless their value is a gateway key.
        """
        identity, removed = None, [*GATEWAY_KEY_HEADERS]
        for name in KEY_HEADERS:
            if name in headers and (token := _strip_bearer_prefix(headers[name])):
                if (found := await self._identity_source.identify(token)) is not None:
                    identity = identity or found
                    removed.append(name)
                elif name in GATEWAY_KEY_HEADERS or is_gateway_key(token):
                    raise _make_wrong_key_error(name)
        forwarded = dict(headers)
        for name in (*removed, *(CREDENTIAL_HEADERS if target.kind == "plain" else ())):
            forwarded.pop(name, None)
        identity = identity or ANONYMOUS
        current_client.set(identity.key_id.encode())
        return identity, forwarded

    async def _set_destination(self, request: GatewayRequest, target: RequestTarget) -> None:
        """Set the request's provider, model and dialect from the path, or from the body's model or steps."""
        match target.kind:
            case "universal":
                steps = await read_steps(request.body, request.options, request.settings, self._registry)
                self._set_first_step(request, steps[0], is_only_step=len(steps) == 1)
                if not request.is_dialect_endpoint:
                    request.steps = steps
            case "native":
                provider = self._registry.find_provider(target.provider, request.settings)
                if request.method == "POST":
                    request.dialect = provider.dialect_at(target.endpoint, request.query)
                fields = _read_request_fields(request) if request.dialect != "raw" else _read_fields_or_empty(request)
                self._set_body_fields(request, fields)
                request.model = provider.model_of(target.endpoint, request.model)
                request.stream = request.stream or provider.is_stream_path(target.endpoint, request.query)
            case _:
                request.is_dialect_endpoint = True
                if request.method == "POST" and (request.body or _requires_model(target)):
                    self._set_body_fields(request, _read_request_fields(request))
                if target.dialect == "gemini":
                    self._set_gemini_destination(request, target)
                if request.model:
                    request.provider, request.model = resolve_model(
                        request.model, request.settings, require_provider=target.kind == "compat"
                    )
                elif _requires_model(target):
                    raise InvalidRequest(
                        "model must be set to a string", param="model", hint="GET /v1/models lists the models"
                    )
                else:
                    request.provider = request.headers.get(PROVIDER_HEADER) or request.settings.default_provider
                    self._registry.find_provider(request.provider, request.settings)  # not a pool or a route

    def _set_gemini_destination(self, request: GatewayRequest, target: RequestTarget) -> None:
        """Set the model and the stream flag from Gemini's path.

        Remove the query, which may contain a gateway key.
        """
        if target.stream and "alt=sse" not in request.query.split("&"):
            raise InvalidRequest(
                "alt must be sse for streamGenerateContent: the gateway streams server-sent events, not a JSON list",
                param="alt",
                hint="add ?alt=sse to the URL",
            )
        request.model, request.stream, request.query = target.model, target.stream, ""

    def _set_first_step(self, request: GatewayRequest, first_step: RequestStep, *, is_only_step: bool) -> None:
        """Set the request's provider, model and endpoint to those of its first step.

        A step with the provider `compat` names the real provider in its model (PROVIDER/MODEL). If such a step is the
        only one, the request is treated like a request to the endpoint `compat`: the model can also be a dynamic route
        or a pool.
        """
        assert first_step.endpoint is not None and first_step.dialect is not None and first_step.body is not None
        self._set_body_fields(request, first_step.body_fields or read_body_fields(first_step.body))
        if is_only_step and first_step.is_dialect_endpoint:
            request.is_dialect_endpoint, request.body, request.headers = True, first_step.body, first_step.headers or {}
            request.body_summary = first_step.body_summary
        else:
            request.body_fields = None  # these are the step's, not those of request.body
        request.provider, request.model, request.endpoint = first_step.provider, first_step.model, first_step.endpoint
        request.dialect, request.stream = first_step.dialect, first_step.stream is True
        if first_step.options is not None:
            request.options = first_step.options

    def _set_body_fields(self, request: GatewayRequest, fields: BodyFields) -> None:
        request.body_fields = fields
        request.model = fields.model if isinstance(fields.model, str) else ""
        request.stream = fields.stream is True
        request.max_output, request.choice_count = fields.max_output, fields.choice_count


def _read_head(request: GatewayRequest, target: RequestTarget, head: InboundRequest) -> None:
    """Read the method and the options of a request. Raise an EmberlineError if they are invalid."""
    methods = target.unified_endpoint.methods if target.unified_endpoint is not None else ("POST",)
    if head.method not in methods and target.kind != "native":
        allowed = ", ".join(methods)
        raise MethodNotAllowed(
            f"{head.path[:200]} must be called with {allowed}, not {head.method[:20]}", allowed=allowed
        )
    request.options = RequestOptions.from_headers(head.headers)
    if target.unified_endpoint is not None and target.unified_endpoint.access != "inference":
        request.options = replace(request.options, skip_cache=True)


def _make_wrong_key_error(header: str) -> Unauthorized:
    return Unauthorized(
        f"the gateway key in the header {header} is unknown, expired or revoked", hint="create a new key at /keys"
    )


def headers_with_query_key(headers: dict[str, str], query: str) -> dict[str, str]:
    """Return the headers. Add the key that Gemini's clients may send as the query parameter `key`."""
    key = dict(parse_qsl(query)).get("key")
    return {**headers, "x-goog-api-key": key} if key else headers


def _strip_bearer_prefix(credential: str) -> str:
    """Return the credential without the prefix "Bearer ", which is matched in any letter case."""
    return (credential[7:] if credential[:7].lower() == "bearer " else credential).strip()


def _requires_model(target: RequestTarget) -> bool:
    return target.unified_endpoint is None or target.unified_endpoint.requires_model


def _has_form(request: GatewayRequest) -> bool:
    return is_form(request.headers.get("content-type", ""))


def _read_request_fields(request: GatewayRequest) -> BodyFields:
    if request.dialect == "raw" and _has_form(request):
        return read_form_fields(request.body, request.headers["content-type"])
    if request.body_summary is None:
        return read_body_fields(request.body)
    if request.body_summary.body_fields is None:
        raise InvalidRequest(request.body_summary.error)
    return request.body_summary.body_fields


def _read_fields_or_empty(request: GatewayRequest) -> BodyFields:
    try:
        return _read_request_fields(request) if request.body[:1] == b"{" or _has_form(request) else BodyFields()
    except InvalidRequest:
        return BodyFields()  # a provider's own endpoint may take any body
