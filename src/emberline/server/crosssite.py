"""CrossSiteGuard: an ASGI application behind checks of what browsers tell about a request. Any web page can make its
visitor's browser call a server on the visitor's own machine: the Origin header names the page's site, and the Host
header the name under which the browser found the server, which the page's owner may have pointed at 127.0.0.1."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from emberline.api.errors import openai_error
from emberline.api.sse import dumps
from emberline.core.errors import EmberlineError, HostNotAllowed, InvalidRequest, OriginNotAllowed
from emberline.net.host import App
from emberline.server.exchange import Exchange, Receive, Scope, Send
from emberline.server.site import refuse

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # they change nothing, and other sites cannot read the replies
METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE"
PREFLIGHT_MAX_AGE_S = b"600"
ANY_ORIGIN = "*"
MAX_KNOWN_HOSTS = 256

Vouch = Callable[[Scope], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class CrossSitePolicy:
    origins: frozenset[str]  # of web pages that may call, such as https://chat.example.com, or "*"
    hosts: frozenset[str]  # names that the Host header may have besides those of this machine
    checks_host: bool

    @staticmethod
    def of(origins: Iterable[str], hosts: Iterable[str], *, loopback: bool, authenticated: bool) -> CrossSitePolicy:
        """`loopback`: where the listener is. A page that got there under a name of its own has no key, so that its Host
        matters where none is needed; elsewhere the operator's list of names is held to, if there is one."""
        names = frozenset(name.lower() for name in hosts)
        listed = frozenset(map(_origin, origins))
        return CrossSitePolicy(listed, names, not authenticated if loopback else bool(names))

    def knows_host(self, header: str) -> bool:
        name = _host_name(header)
        return is_own_name(name) or name in self.hosts

    def lists(self, origin: str) -> bool:
        return ANY_ORIGIN in self.origins or origin in self.origins


class CrossSiteGuard:
    def __init__(self, app: App, policy: CrossSitePolicy, vouch: Vouch | None = None) -> None:
        """`vouch` tells whether a request carries a key that is known: then its Host does not matter."""
        self._app = app
        self._policy = policy
        self._vouch = vouch
        self._known_hosts: set[bytes] = set()  # Host headers that were found to be known: to parse one takes 10 us

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        try:
            host = headers.get(b"host", b"")
            if self._policy.checks_host and host and host not in self._known_hosts:
                await self._check_host(scope, host)
            if b"origin" not in headers:
                await self._app(scope, receive, send)
                return
            origin = headers[b"origin"].decode("latin-1")
            listed = self._policy.lists(origin)
            if scope["type"] == "http" and scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                if not listed:
                    raise _foreign(origin)
                await _preflight(headers, send)
                return
            if not listed and not _is_safe(scope) and not _is_same_site(origin, headers):
                raise _foreign(origin)
        except EmberlineError as error:
            await _refuse(scope, receive, send, error)
            return
        await self._app(scope, receive, _readable_by(origin if listed else None, send))

    async def _check_host(self, scope: Scope, header: bytes) -> None:
        host = header.decode("latin-1")
        if self._policy.knows_host(host):
            if len(self._known_hosts) < MAX_KNOWN_HOSTS:
                self._known_hosts.add(header)
            return
        if self._vouch is None or not await self._vouch(scope):
            raise HostNotAllowed(
                f"the Host header is {host[:100]!r}, which is not a name of this server",
                hint=f"call it as 127.0.0.1 or localhost, or start it with --allowed-hosts {_host_name(host)[:100]}",
            )


def is_own_name(name: str) -> bool:
    """Whether no other site can have pointed this name here: localhost, or an address, which needs no name service."""
    return name == "localhost" or name.endswith(".localhost") or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_name(header: str) -> str:
    """Without the port, in lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower().rstrip(".")


def _origin(text: str) -> str:
    """As browsers write it. InvalidRequest for what is no origin."""
    given = text.strip().lower().rstrip("/")
    if given not in (ANY_ORIGIN, "null") and ("://" not in given or "/" in given.partition("://")[2]):
        raise InvalidRequest(
            f"{text[:100]!r} is not an origin", param="cors_origins", hint="such as https://chat.example.com, or *"
        )
    return given


def _is_safe(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] in SAFE_METHODS


def _is_same_site(origin: str, headers: dict[bytes, bytes]) -> bool:
    """Browsers tell it themselves, which a page cannot change; older ones only by the two names."""
    if headers.get(b"sec-fetch-site") == b"same-origin":
        return True
    return origin.partition("://")[2].lower() == headers.get(b"host", b"").decode("latin-1").lower()


def _foreign(origin: str) -> OriginNotAllowed:
    return OriginNotAllowed(
        f"web pages of {origin[:100]!r} may not call this server",
        hint=f"start it with --cors-origins {origin[:100]} if they should",
    )


async def _preflight(headers: dict[bytes, bytes], send: Send) -> None:
    pairs = [
        (b"access-control-allow-origin", headers[b"origin"]),
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"")),
        (b"access-control-max-age", PREFLIGHT_MAX_AGE_S),
        (b"vary", b"origin"),
    ]
    if b"access-control-request-private-network" in headers:
        pairs.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": pairs})
    await send({"type": "http.response.body", "body": b""})


def _readable_by(origin: str | None, send: Send) -> Send:
    """Pages of `origin` may read the reply, and no others, whatever a provider wrote into it."""
    ours = [(b"vary", b"origin")]
    if origin is not None:
        ours += [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", b"*"),
        ]

    async def sent(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            kept = [pair for pair in message.get("headers", ()) if not pair[0].startswith(b"access-control-")]
            message = {**message, "headers": [*kept, *ours]}
        await send(message)

    return sent


async def _refuse(scope: Scope, receive: Receive, send: Send, error: EmberlineError) -> None:
    if scope["type"] == "http":
        await refuse(Exchange(scope, receive, send), error)
        return
    await receive()  # websocket.connect
    reply = openai_error(error)
    headers = [(b"content-type", b"application/json")]
    await send({"type": "websocket.http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": dumps(reply.body)})
