"""Site: the paths of a server. Whoever asks is admitted and answered exactly once. What goes wrong is told in the
protocol that was spoken or, once a reply has begun, breaks the connection: nobody takes it for whole."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from emberline.api.errors import anthropic_error, openai_error
from emberline.core.errors import EmberlineError, MethodNotAllowed, NotFound
from emberline.net.turn import CutOff
from emberline.server.exchange import ClientGone, Exchange
from emberline.server.keys import Access
from emberline.server.mediatype import require_json
from emberline.server.metrics import Replies
from emberline.server.pages import Page

log = logging.getLogger("emberline.server")

MODELS = "/v1/models/"  # below it, each by its name

Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    handler: Handler
    method: str = "POST"  # "": its handler refuses those that it does not take
    needs: str = "key"  # of clients; "operator": that, or the cluster's; "cluster": its own alone; or "nothing"


@dataclass(slots=True)
class Site:
    routes: dict[str, Route]
    model: Route  # of one
    pages: Mapping[str, Page]
    access: Access
    hint: str  # for who asks for what is not here
    replies: Replies = field(default_factory=Replies)
    below: dict[str, Route] = field(default_factory=dict)  # of all paths that begin so

    async def answer(self, x: Exchange) -> None:
        cut = False
        try:
            await self._found(x)
        except ClientGone:
            x.note["client"] = "gone"
        except Exception as e:
            cut = x.status is not None
            if not isinstance(e, EmberlineError | TimeoutError):
                log.exception("%s %s", x.method, x.path)
            elif cut:
                log.warning("%s cut off: %s", x.path, e)
            if not cut:
                await refuse(x, e)
        known = x.path if x.path in self.routes else "other"
        self.replies.replied(known, x.status or (499 if "client" in x.note else 500))
        if cut:
            raise CutOff

    async def _found(self, x: Exchange) -> None:
        if x.method in ("GET", "HEAD") and (page := self.pages.get(x.path)) is not None:
            await x.reply(200, page.body, page.kind, {"cache-control": "no-cache"})
            return
        route = self.model if x.path.startswith(MODELS) else self.routes.get(x.path)
        if route is None:
            route = next((each for prefix, each in self.below.items() if x.path.startswith(prefix)), None)
        if route is None:
            raise NotFound(f"there is nothing at {x.path[:200]!r}", hint=self.hint)
        if route.method and x.method != route.method and not (x.method == "HEAD" and route.method == "GET"):
            raise MethodNotAllowed(f"{x.path} takes {route.method}, not {x.method[:20]}", allowed=route.method)
        self.access.check(x, route.needs)
        if route.method == "POST":
            require_json(x.header("content-type"))
        await route.handler(x)


async def refuse(x: Exchange, error: Exception) -> None:
    """Answer with the error, in the protocol that was spoken."""
    reply = (anthropic_error if x.speaks.startswith("/v1/messages") else openai_error)(error)
    allow = {"allow": error.allowed} if isinstance(error, MethodNotAllowed) else {}
    await x.json(reply.body, reply.status, {**reply.headers, **allow})
