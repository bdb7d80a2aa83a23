"""Gateway: turns an HTTP request into a GatewayRequest and sends it through the layers.

Every failure becomes an error reply in the client's dialect.
"""

from __future__ import annotations

import logging
from typing import Protocol
from urllib.parse import parse_qsl

import msgspec

from emberline.core.clock import Clock
from emberline.core.errors import EmberlineError, InvalidRequest, MethodNotAllowed, Unauthorized
from emberline.core.offload import LARGE, offload
from emberline.gateway.body import Peek, peek
from emberline.gateway.call import VIRTUAL, Call, Dialect, Handler, Reply, Step
from emberline.gateway.keys.identity import ANONYMOUS, Identity
from emberline.gateway.keys.keys import is_ours
from emberline.gateway.logs.ids import Ids
from emberline.gateway.options import Options
from emberline.gateway.paths import COUNT_TOKENS, DEFAULT, Target, target_of
from emberline.gateway.providers.base import CREDENTIALS
from emberline.gateway.providers.registry import Registry
from emberline.gateway.refusal import error_reply
from emberline.gateway.routes.named import resolve
from emberline.gateway.routes.universal import read_steps
from emberline.gateway.settings import Settings
from emberline.gateway.survey import survey
from emberline.trace.context import HEADERS as TRACES

log = logging.getLogger("emberline.gateway")

OURS = ("cf-aig-authorization", "x-auth-token")  # headers for gateway keys only
MOST_PATHS, LONGEST_PATH = 1000, 200  # parsed paths that are kept
TOKENS = (*OURS, *CREDENTIALS)  # headers that may have a gateway key


class Request(msgspec.Struct, frozen=True):
    """An HTTP request as received from the client."""

    method: str
    path: str
    query: str
    headers: dict[str, str]  # names in lower case
    body: bytes


class Book(Protocol):
    """Looks up the settings of a gateway."""

    async def settings(self, account: str, gateway: str) -> Settings:
        """Return the settings. Raise GatewayNotFound if the account has no such gateway."""
        ...


class Doorkeeper(Protocol):
    """Looks up the identity of a gateway key."""

    async def identify(self, token: str) -> Identity | None:
        """Return the identity of the key with this secret, or None if it is not a valid gateway key."""
        ...

    async def holder(self, id: str) -> Identity | None:
        """Return the identity of the key with this id, or None if it expired or was revoked."""
        ...


class Gateway:
    def __init__(
        self,
        handler: Handler,
        sockets: Handler,
        registry: Registry,
        book: Book,
        doorkeeper: Doorkeeper,
        clock: Clock,
        wall: Clock,
    ) -> None:
        """Create a gateway. `session_handler` opens realtime sessions at providers.

        `clock` is monotonic; `wall_clock` returns seconds since 1970.
        """
        self._handler = handler
        self._session_handler = sockets
        self._registry = registry
        self._settings_source = book
        self._identity_source = doorkeeper
        self._clock = clock
        self._wall_clock = wall
        self._ids = Ids()
        self._targets: dict[str, Target] = {}  # cache, by path

    async def answer(self, inbound: Request, key_id: str | None = None) -> Reply:
        """Answer a request; every failure becomes an error reply.

        `key_id` is the key that a queued request was submitted with; "" means that it was submitted without a key.
        """
        dialect: Dialect = "raw"
        try:
            target = self._targets.get(inbound.path) or self._target(inbound.path)
            dialect = target.dialect
            request = await self.opened(target, inbound)
            if key_id:
                request.identity = await self._valid_identity(key_id)
            dialect = request.dialect
            reply = await self._handler(request)
            reply.patience, reply.dialect = request.deadline - self._clock.now(), dialect
            return reply
        except Exception as e:
            if not isinstance(e, EmberlineError):
                log.exception("Request failed with an internal error: method=%s path=%s", inbound.method, inbound.path)
            return error_reply(dialect, e)

    async def join(self, target: Target, inbound: Request, model: str) -> Reply:
        """Open a realtime session at a provider. Return the open session, or an error reply."""
        try:
            request = await self.opened(target, inbound)
            request.model, request.stream = model, True
            request.deadline = request.began + request.settings.timeouts.session
            return await self._session_handler(request)
        except Exception as e:
            if not isinstance(e, EmberlineError):
                log.exception("Realtime session failed with an internal error: path=%s", inbound.path)
            return error_reply("raw", e)

    def _target(self, path: str) -> Target:
        target = target_of(path)
        if len(path) < LONGEST_PATH:
            if len(self._targets) >= MOST_PATHS:
                self._targets.clear()
            self._targets[path] = target
        return target

    async def opened(self, target: Target, inbound: Request) -> Call:
        """Return the request for the layers, or raise an EmberlineError that says why it is refused."""
        began = self._clock.now()
        if inbound.method != "POST" and target.kind != "native":
            raise MethodNotAllowed(f"{inbound.path[:200]} takes POST, not {inbound.method[:20]}", allowed="POST")
        options = Options.read(inbound.headers)
        gateway = target.gateway or options.gateway_id or DEFAULT
        settings = await self._settings_source.settings(target.account, gateway)
        received = _with_query_key(inbound) if target.dialect == "gemini" else inbound.headers
        identity, headers = await self._identify_and_strip(target, received)
        request = Call(
            id=self._ids.next(round(self._wall_clock.now() * 1e3)),
            account=target.account,
            gateway=gateway,
            provider=target.provider,
            endpoint=target.endpoint,
            dialect=target.dialect,
            method=inbound.method,
            headers=headers,
            query=inbound.query,
            body=inbound.body,
            model="",
            stream=False,
            max_output=None,
            options=options,
            identity=identity,
            settings=settings,
            began=began,
            deadline=began + settings.timeouts.total,
            trace={name: headers[name] for name in TRACES if name in headers},
        )
        if len(request.body) >= LARGE and target.kind != "universal":
            request.surveyed = await offload.run(len(request.body), survey, request.body)
        await self._set_destination(request, target)
        if len(request.body) >= LARGE and request.surveyed is None:  # the body is that of a step
            request.surveyed = await offload.run(len(request.body), survey, request.body)
        return request

    async def entered(self, target: Target, headers: dict[str, str]) -> tuple[Identity, Settings]:
        """Return the caller's identity and the gateway's settings for a request that no provider gets.

        Raise Unauthorized if the gateway requires a key and the headers have none.
        """
        gateway = target.gateway or Options.read(headers).gateway_id or DEFAULT
        identity, _ = await self._identify_and_strip(target, headers)
        settings = await self._settings_source.settings(target.account, gateway)
        if settings.authentication and identity.kind == "anonymous":
            raise Unauthorized(
                f"gateway {gateway[:80]!r} requires a key and the request has none",
                hint="send Authorization: Bearer KEY or cf-aig-authorization: Bearer KEY",
            )
        return identity, settings

    async def who(self, headers: dict[str, str]) -> Identity:
        """Return the caller's identity. Raise Unauthorized if the headers have an invalid gateway key."""
        return (await self._identify_and_strip(Target("plain"), headers))[0]

    async def _valid_identity(self, key_id: str) -> Identity:
        """Return what the key may do now, not when the request was queued."""
        if (found := await self._identity_source.holder(key_id)) is None:
            raise Unauthorized(
                f"API key {key_id[:80]!r} of this queued request expired or was revoked",
                hint="create a new key at /keys and submit the request again",
            )
        return found

    async def _identify_and_strip(self, target: Target, headers: dict[str, str]) -> tuple[Identity, dict[str, str]]:
        """Return the caller's identity, and the headers without gateway keys.

        Providers never see gateway keys, not even invalid ones. If the path names a provider, the usual headers have
        the provider's key unless the value is a gateway key.
        """
        identity, removed = None, [*OURS]
        for name in TOKENS:
            if name in headers and (token := _without_scheme(headers[name])):
                if (found := await self._identity_source.identify(token)) is not None:
                    identity = identity or found
                    removed.append(name)
                elif name in OURS or is_ours(token):
                    raise Unauthorized(
                        f"the gateway key in the header {name} is unknown, expired or revoked",
                        hint="create a new key at /keys",
                    )
        forwarded = dict(headers)
        for name in (*removed, *(CREDENTIALS if target.kind == "plain" else ())):
            forwarded.pop(name, None)
        return identity or ANONYMOUS, forwarded

    async def _set_destination(self, request: Call, target: Target) -> None:
        """Set the provider, model and dialect from the path, the body's model, or the body's steps."""
        match target.kind:
            case "universal":
                steps = await read_steps(request.body, request.options, request.settings, self._registry)
                self._set_first_step(request, steps[0], is_only_step=len(steps) == 1)
                if not request.plain:
                    request.steps = steps
            case "native":
                provider = self._registry.find(target.provider, request.settings)
                request.dialect = provider.dialect_of(target.endpoint, request.query)
                fields = _body_fields(request) if request.dialect != "raw" else _raw_body_fields(request)
                self._set_body_fields(request, fields)
                request.model = provider.model_in(target.endpoint) or request.model  # the path overrides the body
                request.stream = request.stream or provider.streams_at(target.endpoint, request.query)
            case _:
                request.plain = True
                self._set_body_fields(request, _body_fields(request))
                if target.dialect == "gemini":
                    self._set_gemini(request, target)
                if not request.model:
                    raise InvalidRequest(
                        "model is missing or not a string", param="model", hint="GET /v1/models lists the models"
                    )
                request.provider, request.model = resolve(
                    request.model, request.settings, named=target.kind == "compat"
                )
                if target.endpoint == COUNT_TOKENS:
                    self._check_can_count_tokens(request)

    def _set_gemini(self, request: Call, target: Target) -> None:
        """Take model and stream from the path. Drop the query, because it may have a gateway key."""
        if target.stream and "alt=sse" not in request.query.split("&"):
            raise InvalidRequest(
                "streamGenerateContent needs alt=sse: a stream is sent as events, not as a JSON list",
                param="alt",
                hint="add ?alt=sse to the URL",
            )
        request.model, request.stream, request.query = target.model, target.stream, ""

    def _check_can_count_tokens(self, request: Call) -> None:
        """Raise InvalidRequest unless the provider has Anthropic's protocol, the only one with count_tokens."""
        if request.provider not in VIRTUAL:
            provider = self._registry.find(request.provider, request.settings)
            if provider.speaks("anthropic", request.model):
                return
        raise InvalidRequest(
            f"count_tokens is not available for {request.provider}/{request.model}: the provider has no such endpoint"[
                :300
            ],
            param="model",
            hint="use a model of Anthropic or of the engine, or read `usage` in a reply",
        )

    def _set_first_step(self, request: Call, first: Step, *, is_only_step: bool) -> None:
        """Set the destination to the first step.

        A single compat step becomes a compat request, so that it can name a dynamic route or a pool.
        """
        assert first.endpoint is not None and first.dialect is not None and first.body is not None
        self._set_body_fields(request, first.seen or peek(first.body))
        if is_only_step and first.plain:
            request.plain, request.body, request.headers = True, first.body, first.headers or {}
            request.surveyed = first.surveyed
        else:
            request.seen = None  # these are the step's, not those of request.body
        request.provider, request.model, request.endpoint = first.provider, first.model, first.endpoint
        request.dialect, request.stream = first.dialect, first.stream is True
        if first.options is not None:
            request.options = first.options

    def _set_body_fields(self, request: Call, fields: Peek) -> None:
        request.seen = fields
        request.model = fields.model if isinstance(fields.model, str) else ""
        request.stream = fields.stream is True
        request.max_output, request.answers = fields.max_output, fields.answers


def _with_query_key(inbound: Request) -> dict[str, str]:
    """Return the headers with the key that Gemini's clients may send as the query parameter `key`."""
    key = dict(parse_qsl(inbound.query)).get("key")
    return {**inbound.headers, "x-goog-api-key": key} if key else inbound.headers


def _without_scheme(credential: str) -> str:
    """Return the credential without "Bearer ", in any case of letters."""
    return (credential[7:] if credential[:7].lower() == "bearer " else credential).strip()


def _body_fields(request: Call) -> Peek:
    if request.surveyed is None:
        return peek(request.body)
    if request.surveyed.seen is None:
        raise InvalidRequest(request.surveyed.error)
    return request.surveyed.seen


def _raw_body_fields(request: Call) -> Peek:
    try:
        return _body_fields(request) if request.body[:1] == b"{" else Peek()
    except InvalidRequest:
        return Peek()  # a provider's own endpoint may take any body
