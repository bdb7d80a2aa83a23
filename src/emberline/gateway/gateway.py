"""Gateway: a request to a call, the call through the layers, and a reply, whatever happens."""

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

OURS = ("cf-aig-authorization", "x-auth-token")  # carry nothing but our keys
MOST_PATHS, LONGEST_PATH = 1000, 200  # remembered
TOKENS = (*OURS, *CREDENTIALS)  # may carry one


class Request(msgspec.Struct, frozen=True):
    method: str
    path: str
    query: str
    headers: dict[str, str]  # names in lower case
    body: bytes


class Book(Protocol):
    """Who knows every gateway's settings."""

    async def settings(self, account: str, gateway: str) -> Settings:
        """GatewayNotFound, if there is no such gateway."""
        ...


class Doorkeeper(Protocol):
    """Who knows every key."""

    async def identify(self, token: str) -> Identity | None:
        """None: it is not one of ours."""
        ...

    async def holder(self, id: str) -> Identity | None:
        """Of the key with this id. None: it holds no longer."""
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
        """`sockets` opens those of providers. `clock` is monotonic, `wall` tells seconds since 1970."""
        self._handler = handler
        self._sockets = sockets
        self._registry = registry
        self._book = book
        self._doorkeeper = doorkeeper
        self._clock = clock
        self._wall = wall
        self._ids = Ids()
        self._targets: dict[str, Target] = {}  # of paths that were asked for before

    async def answer(self, request: Request, key_id: str | None = None) -> Reply:
        """`key_id`: of whoever asked for it before, where no key comes with the request; "": nobody whom we know."""
        dialect: Dialect = "raw"
        try:
            target = self._targets.get(request.path) or self._target(request.path)
            dialect = target.dialect
            call = await self.opened(target, request)
            if key_id:
                call.identity = await self._holder(key_id)
            dialect = call.dialect
            reply = await self._handler(call)
            reply.patience, reply.dialect = call.deadline - self._clock.now(), dialect
            return reply
        except Exception as e:
            if not isinstance(e, EmberlineError):
                log.exception("%s %s", request.method, request.path)
            return error_reply(dialect, e)

    async def join(self, target: Target, request: Request, model: str) -> Reply:
        """A session on a provider's socket, or an error."""
        try:
            call = await self.opened(target, request)
            call.model, call.stream = model, True
            call.deadline = call.began + call.settings.timeouts.session
            return await self._sockets(call)
        except Exception as e:
            if not isinstance(e, EmberlineError):
                log.exception("a socket at %s", request.path)
            return error_reply("raw", e)

    def _target(self, path: str) -> Target:
        target = target_of(path)
        if len(path) < LONGEST_PATH:
            if len(self._targets) >= MOST_PATHS:
                self._targets.clear()
            self._targets[path] = target
        return target

    async def opened(self, target: Target, request: Request) -> Call:
        began = self._clock.now()
        if request.method != "POST" and target.kind != "native":
            raise MethodNotAllowed(f"{request.path[:200]} takes POST, not {request.method[:20]}", allowed="POST")
        asked = Options.read(request.headers)
        gateway = target.gateway or asked.gateway_id or DEFAULT
        settings = await self._book.settings(target.account, gateway)
        given = _with_query_key(request) if target.dialect == "gemini" else request.headers
        identity, headers = await self._entered(target, given)
        call = Call(
            id=self._ids.next(round(self._wall.now() * 1e3)),
            account=target.account,
            gateway=gateway,
            provider=target.provider,
            endpoint=target.endpoint,
            dialect=target.dialect,
            method=request.method,
            headers=headers,
            query=request.query,
            body=request.body,
            model="",
            stream=False,
            max_output=None,
            options=asked,
            identity=identity,
            settings=settings,
            began=began,
            deadline=began + settings.timeouts.total,
            trace={name: headers[name] for name in TRACES if name in headers},
        )
        if len(call.body) >= LARGE and target.kind != "universal":
            call.surveyed = await offload.run(len(call.body), survey, call.body)
        await self._addressed(call, target)
        if len(call.body) >= LARGE and call.surveyed is None:  # the body is that of a step
            call.surveyed = await offload.run(len(call.body), survey, call.body)
        return call

    async def entered(self, target: Target, headers: dict[str, str]) -> tuple[Identity, Settings]:
        """Who asks of which gateway, where nothing is sent anywhere."""
        gateway = target.gateway or Options.read(headers).gateway_id or DEFAULT
        identity, _ = await self._entered(target, headers)
        settings = await self._book.settings(target.account, gateway)
        if settings.authentication and identity.kind == "anonymous":
            raise Unauthorized("this gateway needs a key", hint="send it as the API key")
        return identity, settings

    async def who(self, headers: dict[str, str]) -> Identity:
        return (await self._entered(Target("plain"), headers))[0]

    async def _holder(self, key_id: str) -> Identity:
        """What a key may do is what it may do now."""
        if (found := await self._doorkeeper.holder(key_id)) is None:
            raise Unauthorized("the key that this was asked for with holds no longer", hint="ask again with another")
        return found

    async def _entered(self, target: Target, headers: dict[str, str]) -> tuple[Identity, dict[str, str]]:
        """Who it is, and the headers without what told us so: our keys are not shown to providers, not even those that
        hold no longer. Where a provider is named the usual headers carry its key, unless it is one of ours."""
        identity, told = None, [*OURS]
        for name in TOKENS:
            if name in headers and (token := _bare(headers[name])):
                if (found := await self._doorkeeper.identify(token)) is not None:
                    identity = identity or found
                    told.append(name)
                elif name in OURS or is_ours(token):
                    raise Unauthorized("the gateway's key is not known, or no longer", hint=f"see {name}")
        kept = dict(headers)
        for name in (*told, *(CREDENTIALS if target.kind == "plain" else ())):
            kept.pop(name, None)
        return identity or ANONYMOUS, kept

    async def _addressed(self, call: Call, target: Target) -> None:
        """Where it goes: by its path, by its model, or by its steps."""
        match target.kind:
            case "universal":
                steps = await read_steps(call.body, call.options, call.settings, self._registry)
                self._stepped(call, steps[0], alone=len(steps) == 1)
                if not call.plain:
                    call.steps = steps
            case "native":
                provider = self._registry.find(target.provider, call.settings)
                call.dialect = provider.dialect_of(target.endpoint, call.query)
                self._peeked(call, _seen(call) if call.dialect != "raw" else _seen_raw(call))
                call.model = provider.model_in(target.endpoint) or call.model  # where both say it, the path decides
                call.stream = call.stream or provider.streams_at(target.endpoint, call.query)
            case _:
                call.plain = True
                self._peeked(call, _seen(call))
                if target.dialect == "gemini":
                    self._set_gemini(call, target)
                if not call.model:
                    raise InvalidRequest("model must be the name of one", param="model", hint="see /v1/models")
                call.provider, call.model = resolve(call.model, call.settings, named=target.kind == "compat")
                if target.endpoint == COUNT_TOKENS:
                    self._check_counts(call)

    def _set_gemini(self, call: Call, target: Target) -> None:
        """Take the model and the wish to stream from the path. The query is dropped: it may have a key of ours."""
        if target.stream and "alt=sse" not in call.query.split("&"):
            raise InvalidRequest("a stream is sent as events here, not as a list", param="alt", hint="add ?alt=sse")
        call.model, call.stream, call.query = target.model, target.stream, ""

    def _check_counts(self, call: Call) -> None:
        """Counting tokens is Anthropic's protocol: other providers have no such path."""
        if call.provider not in VIRTUAL:
            provider = self._registry.find(call.provider, call.settings)
            if provider.speaks("anthropic", call.model):
                return
        raise InvalidRequest(
            f"tokens of {call.provider}/{call.model} cannot be counted: the provider has no count_tokens"[:300],
            param="model",
            hint="ask for a model of Anthropic or of the engine; usage in a reply tells what it took",
        )

    def _stepped(self, call: Call, first: Step, *, alone: bool) -> None:
        """Address a call to its first step. A compat step that is alone becomes a compat call, so that it can name a
        dynamic route or a pool."""
        assert first.endpoint is not None and first.dialect is not None and first.body is not None
        self._peeked(call, first.seen or peek(first.body))
        if alone and first.plain:
            call.plain, call.body, call.headers, call.surveyed = True, first.body, first.headers or {}, first.surveyed
        else:
            call.seen = None  # it is not the body's
        call.provider, call.model, call.endpoint = first.provider, first.model, first.endpoint
        call.dialect, call.stream = first.dialect, first.stream is True
        if first.options is not None:
            call.options = first.options

    def _peeked(self, call: Call, seen: Peek) -> None:
        call.seen = seen
        call.model = seen.model if isinstance(seen.model, str) else ""
        call.stream = seen.stream is True
        call.max_output, call.answers = seen.max_output, seen.answers


def _with_query_key(request: Request) -> dict[str, str]:
    """Gemini's clients may send their key as the parameter `key`."""
    key = dict(parse_qsl(request.query)).get("key")
    return {**request.headers, "x-goog-api-key": key} if key else request.headers


def _bare(credential: str) -> str:
    """Without its scheme, whose case does not matter."""
    return (credential[7:] if credential[:7].lower() == "bearer " else credential).strip()


def _seen(call: Call) -> Peek:
    if call.surveyed is None:
        return peek(call.body)
    if call.surveyed.seen is None:
        raise InvalidRequest(call.surveyed.error)
    return call.surveyed.seen


def _seen_raw(call: Call) -> Peek:
    try:
        return _seen(call) if call.body[:1] == b"{" else Peek()
    except InvalidRequest:
        return Peek()  # it may be anything
