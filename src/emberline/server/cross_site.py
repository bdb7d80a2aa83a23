"""CrossSiteGuard: protects an ASGI application against requests from web pages of other sites.

Any web page can make the browser send requests to a server on the user's own machine. The guard checks two headers. The
Origin header names the site of the page. The Host header has the name that the browser resolved to find the server; an
attacker's domain may resolve to 127.0.0.1 (DNS rebinding)."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from emberline.core.errors import EmberlineError, HostNotAllowed, InvalidRequest, OriginNotAllowed
from emberline.net.server_state import App
from emberline.server.exchange import Exchange, Receive, Scope, Send
from emberline.server.rejections import RejectionLog
from emberline.server.route_table import reply_error
from emberline.wire.errors import render_openai_error
from emberline.wire.sse import dumps

log = logging.getLogger("emberline.server")

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # they change nothing, and pages of other sites cannot read the replies
CORS_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE"
PREFLIGHT_MAX_AGE_S = b"600"
ANY_ORIGIN = "*"
MAX_KNOWN_HOSTS = 256

KeyCheck = Callable[[Scope], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class CrossSitePolicy:
    origins: frozenset[str]  # sites whose web pages may call, such as https://chat.example.com, or "*"
    hosts: frozenset[str]  # host names allowed besides localhost and IP addresses
    checks_host: bool

    @staticmethod
    def build(
        origins: Iterable[str], hosts: Iterable[str], *, is_loopback: bool, is_authenticated: bool
    ) -> CrossSitePolicy:
        """Return the policy for a listening socket. Raises InvalidRequest for a malformed origin.

        On a loopback address, the Host header is checked if clients need no key: a page that uses DNS rebinding has no
        key. On other addresses, it is checked if the operator has listed host names."""
        names = frozenset(name.lower() for name in hosts)
        allowed = frozenset(map(_normalize_origin, origins))
        return CrossSitePolicy(allowed, names, not is_authenticated if is_loopback else bool(names))

    def allows_host(self, header: str) -> bool:
        name = _host_without_port(header)
        return is_localhost_or_address(name) or name in self.hosts

    def allows_origin(self, origin: str) -> bool:
        return ANY_ORIGIN in self.origins or origin in self.origins


class CrossSiteGuard:
    def __init__(self, app: App, policy: CrossSitePolicy, has_known_key: KeyCheck | None = None) -> None:
        """`has_known_key` returns whether a request has a valid key, which allows any Host header."""
        self._app = app
        self._policy = policy
        self._has_known_key = has_known_key
        self._rejections = RejectionLog(log)
        self._known_hosts: set[bytes] = set()  # Host headers that were allowed before: parsing one takes 10 us

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
            listed = self._policy.allows_origin(origin)
            if scope["type"] == "http" and scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                if not listed:
                    raise _origin_error(origin)
                await _reply_preflight(headers, send)
                return
            if not listed and not _has_safe_method(scope) and not _is_same_site(origin, headers):
                raise _origin_error(origin)
        except EmberlineError as error:
            await _reply_error(scope, receive, send, error)
            self._rejections.record(
                Exchange({"method": "GET", **scope}, receive, send), error.status, error.code, str(error)
            )
            return
        await self._app(scope, receive, _with_cors_headers(origin if listed else None, send))

    async def _check_host(self, scope: Scope, header: bytes) -> None:
        host = header.decode("latin-1")
        if self._policy.allows_host(host):
            if len(self._known_hosts) < MAX_KNOWN_HOSTS:
                self._known_hosts.add(header)
            return
        if self._has_known_key is None or not await self._has_known_key(scope):
            raise HostNotAllowed(
                f"the Host header is {host[:100]!r}, which is not an allowed name of this server",
                hint="call 127.0.0.1 or localhost, or start the server with "
                f"--allowed-hosts {_host_without_port(host)[:100]}",
            )


def is_localhost_or_address(name: str) -> bool:
    """Return whether the name is localhost or an IP address.

    DNS rebinding cannot use these, because no other site owns them."""
    return name == "localhost" or name.endswith(".localhost") or _is_ip_address(name)


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_without_port(header: str) -> str:
    """Return the host name in a Host header, without the port and in lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower().rstrip(".")


def _normalize_origin(text: str) -> str:
    """Return the origin in the form that browsers send. Raises InvalidRequest if the text is not an origin."""
    origin = text.strip().lower().rstrip("/")
    if origin not in (ANY_ORIGIN, "null") and ("://" not in origin or "/" in origin.partition("://")[2]):
        raise InvalidRequest(
            f"{text[:100]!r} is not a web origin (scheme and host)",
            param="cors_origins",
            hint="use SCHEME://HOST without a path, such as https://chat.example.com, or *",
        )
    return origin


def _has_safe_method(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] in SAFE_METHODS


def _is_same_site(origin: str, headers: dict[bytes, bytes]) -> bool:
    """Return whether the web page that sent the request comes from this server.

    The browser states this in the header Sec-Fetch-Site, which a page cannot change. For older browsers, which do not
    send it, Origin and Host are compared."""
    if headers.get(b"sec-fetch-site") == b"same-origin":
        return True
    return origin.partition("://")[2].lower() == headers.get(b"host", b"").decode("latin-1").lower()


def _origin_error(origin: str) -> OriginNotAllowed:
    return OriginNotAllowed(
        f"web pages of {origin[:100]!r} may not call this server",
        hint=f"start the server with --cors-origins {origin[:100]} to allow them",
    )


async def _reply_preflight(headers: dict[bytes, bytes], send: Send) -> None:
    pairs = [
        (b"access-control-allow-origin", headers[b"origin"]),
        (b"access-control-allow-methods", CORS_METHODS),
        (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"")),
        (b"access-control-max-age", PREFLIGHT_MAX_AGE_S),
        (b"vary", b"origin"),
    ]
    if b"access-control-request-private-network" in headers:
        pairs.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": pairs})
    await send({"type": "http.response.body", "body": b""})


def _with_cors_headers(origin: str | None, send: Send) -> Send:
    """Return a `send` function that adds CORS headers, so that pages of `origin` can read the reply."""
    added = [(b"vary", b"origin")]
    if origin is not None:
        added += [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", b"*"),
        ]

    async def send_with_headers(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            kept = [pair for pair in message.get("headers", ()) if not pair[0].startswith(b"access-control-")]
            message = {**message, "headers": [*kept, *added]}
        await send(message)

    return send_with_headers


async def _reply_error(scope: Scope, receive: Receive, send: Send, error: EmberlineError) -> None:
    if scope["type"] == "http":
        await reply_error(Exchange(scope, receive, send), error)
        return
    await receive()  # websocket.connect
    reply = render_openai_error(error)
    headers = [(b"content-type", b"application/json")]
    await send({"type": "websocket.http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": dumps(reply.body)})
