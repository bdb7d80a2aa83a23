"""A WebSocket to a provider, with bounded buffers: a slow reader slows down its sender."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from emberline.gateway.errors import Broken, TimedOut, Unreached
from emberline.gateway.refusal import refused
from emberline.gateway.upstream.outgoing import Outgoing
from emberline.gateway.upstream.upstream import Upstream

GOODBYE = 1.0  # for the provider to close its side
PORTS = {"ws": 80, "wss": 443}


class _Connect(connect):
    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc  # a redirect would send the provider's key to another host


class Channel:
    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self.subprotocol: str | None = connection.subprotocol

    async def send(self, message: str | bytes) -> None:
        """Send a message, waiting while the provider does not read; after the end it is dropped silently."""
        try:
            await self._connection.send(message)
        except ConnectionClosed:
            return

    async def receive(self) -> str | bytes | None:
        """Return the next message, None when the WebSocket is closed."""
        try:
            return await self._connection.recv()
        except ConnectionClosed:
            return None

    @property
    def closed(self) -> tuple[int, str]:
        """The close code and reason of the side that closed first; 1006 if the connection broke."""
        close_frame = self._connection.protocol.close_rcvd or self._connection.protocol.close_sent
        return (1006, "") if close_frame is None else (close_frame.code, close_frame.reason)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        await self._connection.close(code, reason)


async def dial(
    provider: str, request: Outgoing, protocols: Sequence[str], upstream: Upstream, *, seconds: float, largest: int
) -> Channel:
    """Open a WebSocket to the provider; redirects are not followed. Raises UpstreamFailed."""
    url = "ws" + request.url.removeprefix("http")
    parts = urlsplit(url)
    headers = {name: value for name, value in request.headers.items() if name not in ("origin", "user-agent")}
    try:
        async with asyncio.timeout(seconds):
            port = parts.port or PORTS[parts.scheme]
            checked = await upstream.dial(parts.hostname or "", port) if request.public else None
            connection = await _Connect(
                url,
                additional_headers=headers,
                user_agent_header=request.headers.get("user-agent"),
                subprotocols=cast("Sequence[Subprotocol]", protocols) or None,
                compression=None,
                proxy=None,
                open_timeout=None,
                close_timeout=GOODBYE,
                max_size=largest,
                sock=checked,
            )
    except TimeoutError:
        raise TimedOut(f"the WebSocket handshake took longer than {seconds:.3g} s", provider=provider) from None
    except InvalidStatus as e:
        reply = e.response
        if reply.status_code < 400:
            raise Broken(
                f"the provider answered {reply.status_code} instead of opening a WebSocket", provider=provider
            ) from None
        raise refused(provider, reply.status_code, reply.headers, bytes(reply.body or b""), "raw") from None
    except InvalidHandshake as e:
        raise Broken(f"the WebSocket handshake failed: {e}", provider=provider) from None
    except (OSError, InvalidURI) as e:
        raise Unreached(f"the provider cannot be reached: {e}", provider=provider) from None
    return Channel(connection)
