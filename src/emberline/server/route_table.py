"""RouteTable: maps the paths of a server to handlers, checks access, and answers exactly once.

An error is written in the caller's API protocol. Once a reply has started, the connection is closed instead, so that
the client sees that the reply is incomplete."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from emberline.core.errors import EmberlineError, MethodNotAllowed, NotFound
from emberline.net.request_response_cycle import ReplyInterrupted
from emberline.server.access import AccessPolicy
from emberline.server.exchange import ClientDisconnected, Exchange
from emberline.server.media_type import require_json
from emberline.server.metrics import ReplyCounter
from emberline.server.pages import StaticPage
from emberline.wire.errors import anthropic_error, openai_error

log = logging.getLogger("emberline.server")

MODEL_PATH_PREFIX = "/v1/models/"

Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HTTPRoute:
    handler: Handler
    method: str = "POST"  # "": the handler checks the method itself
    required_key: str = "key"  # "key": an API key; "operator": an API key or the cluster key; "cluster"; "nothing"


@dataclass(slots=True)
class RouteTable:
    routes: dict[str, HTTPRoute]
    model_route: HTTPRoute  # of paths below MODEL_PATH_PREFIX
    pages: Mapping[str, StaticPage]
    access_policy: AccessPolicy
    not_found_hint: str  # of the error for an unknown path
    reply_counter: ReplyCounter = field(default_factory=ReplyCounter)
    prefix_routes: dict[str, HTTPRoute] = field(default_factory=dict)  # by the start of the path

    async def handle(self, x: Exchange) -> None:
        """Handle one exchange; raise the connection abort of `net` if a started reply failed."""
        is_cut_off = False
        try:
            await self._dispatch(x)
        except ClientDisconnected:
            x.log_fields["client"] = "gone"
        except Exception as e:
            is_cut_off = x.status is not None
            if not isinstance(e, EmberlineError | TimeoutError):
                log.exception("Request failed: method=%s path=%s", x.method, x.path)
            elif is_cut_off:
                log.warning("Reply aborted: path=%s error=%s", x.path, e)
            if not is_cut_off:
                await reply_error(x, e)
        known = x.path if x.path in self.routes else "other"
        self.reply_counter.count(known, x.status or (499 if "client" in x.log_fields else 500))
        if is_cut_off:
            raise ReplyInterrupted

    async def _dispatch(self, x: Exchange) -> None:
        if x.method in ("GET", "HEAD") and (page := self.pages.get(x.path)) is not None:
            await x.reply(200, page.body, page.content_type, {"cache-control": "no-cache"})
            return
        route = self.model_route if x.path.startswith(MODEL_PATH_PREFIX) else self.routes.get(x.path)
        if route is None:
            route = next(
                (candidate for prefix, candidate in self.prefix_routes.items() if x.path.startswith(prefix)), None
            )
        if route is None:
            raise NotFound(f"the path {x.path[:200]!r} does not exist", hint=self.not_found_hint)
        if route.method and x.method != route.method and not (x.method == "HEAD" and route.method == "GET"):
            raise MethodNotAllowed(f"{x.path} accepts {route.method}, not {x.method[:20]}", allowed=route.method)
        self.access_policy.check(x, route.required_key)
        if route.method == "POST":
            require_json(x.header("content-type"))
        await route.handler(x)


async def reply_error(x: Exchange, error: Exception) -> None:
    """Reply with the error, in the API protocol of the request."""
    reply = (anthropic_error if x.protocol_path.startswith("/v1/messages") else openai_error)(error)
    allow = {"allow": error.allowed} if isinstance(error, MethodNotAllowed) else {}
    await x.reply_json(reply.body, reply.status, {**reply.headers, **allow})
