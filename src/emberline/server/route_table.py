"""RouteTable: passes each request to the handler of its path, after a check of the request's key.

If a handler fails, the client gets an error reply in the format of its API protocol. If the handler had already started
a reply, the connection is closed, so that the client sees that the reply is incomplete."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from emberline.core.errors import EmberlineError, MethodNotAllowed, NotFound, Unauthorized
from emberline.net.request_response_cycle import ReplyInterrupted
from emberline.server.access import AccessPolicy, has_key
from emberline.server.exchange import ClientDisconnected, Exchange
from emberline.server.media_type import require_json
from emberline.server.metrics import ReplyCounter
from emberline.server.pages import StaticPage
from emberline.server.rejections import RejectionLog, WrongKeyDelay
from emberline.wire.errors import ErrorReply, render_anthropic_error, render_ollama_error, render_openai_error

log = logging.getLogger("emberline.server")

MODEL_PATH_PREFIX = "/v1/models/"

Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HTTPRoute:
    handler: Handler
    method: str = "POST"  # "": the handler checks the method itself
    required_key: str = "key"  # of AccessPolicy.check
    requires_json: bool = True  # else the content-type matters only in requests from web pages


@dataclass(slots=True)
class RouteTable:
    routes: dict[str, HTTPRoute]
    model_route: HTTPRoute  # of paths below MODEL_PATH_PREFIX
    pages: Mapping[str, StaticPage]
    access_policy: AccessPolicy
    not_found_hint: str  # of the error for an unknown path
    reply_counter: ReplyCounter = field(default_factory=ReplyCounter)
    prefix_routes: dict[str, HTTPRoute] = field(default_factory=dict)  # by the start of the path
    rejections: RejectionLog = field(default_factory=lambda: RejectionLog(log))
    wrong_keys: WrongKeyDelay = field(default_factory=WrongKeyDelay)

    async def handle(self, exchange: Exchange) -> None:
        """Reply to one request. Raises ReplyInterrupted, which closes the connection, if a started reply failed."""
        is_cut_off = False
        try:
            await self._dispatch(exchange)
        except ClientDisconnected:
            exchange.log_fields["client"] = "gone"
        except Exception as e:
            is_cut_off = exchange.status is not None
            if not isinstance(e, EmberlineError | TimeoutError):
                log.exception("Request failed: method=%s path=%s", exchange.method, exchange.path)
            elif is_cut_off:
                log.warning("Reply aborted: path=%s error=%s", exchange.path, e)
            if not is_cut_off:
                if isinstance(e, Unauthorized) and has_key(exchange):
                    await self.wrong_keys.wait()
                await reply_error(exchange, e)
            if isinstance(e, EmberlineError):
                self.rejections.record(exchange, e.status, e.code, str(e))
        known = exchange.path if exchange.path in self.routes else "other"
        self.reply_counter.count(known, exchange.status or (499 if "client" in exchange.log_fields else 500))
        if is_cut_off:
            raise ReplyInterrupted

    async def _dispatch(self, exchange: Exchange) -> None:
        if exchange.method in ("GET", "HEAD") and (page := self.pages.get(exchange.path)) is not None:
            await exchange.reply(200, page.body, page.content_type, {"cache-control": "no-cache"})
            return
        route = self.model_route if exchange.path.startswith(MODEL_PATH_PREFIX) else self.routes.get(exchange.path)
        if route is None:
            route = next(
                (candidate for prefix, candidate in self.prefix_routes.items() if exchange.path.startswith(prefix)),
                None,
            )
        if route is None:
            raise NotFound(f"the path {exchange.path[:200]!r} does not exist", hint=self.not_found_hint)
        if (
            route.method
            and exchange.method != route.method
            and not (exchange.method == "HEAD" and route.method == "GET")
        ):
            raise MethodNotAllowed(
                f"{exchange.path} accepts {route.method}, not {exchange.method[:20]}", allowed=route.method
            )
        self.access_policy.check(exchange, route.required_key)
        if route.method == "POST" and (route.requires_json or exchange.header("origin")):
            require_json(exchange.header("content-type"))
        await route.handler(exchange)


async def reply_error(exchange: Exchange, error: Exception) -> None:
    """Send an error reply in the format of the request's API protocol."""
    reply = select_error_renderer(exchange.protocol_path)(error)
    allow = {"allow": error.allowed} if isinstance(error, MethodNotAllowed) else {}
    await exchange.reply_json(reply.body, reply.status, {**reply.headers, **allow})


def select_error_renderer(path: str) -> Callable[[Exception], ErrorReply]:
    if path.startswith("/v1/messages"):
        return render_anthropic_error
    return render_ollama_error if path.startswith("/api/") else render_openai_error
