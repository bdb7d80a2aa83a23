"""Channel: a WebSocket to a provider. What has come and was not taken is bounded, and so is what waits to be sent: who
reads slowly is sent slowly."""

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

GOODBYE = 1.0  # seconds for the provider to close, too
PORTS = {"ws": 80, "wss": 443}


class _Connect(connect):
    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc  # a key goes nowhere else


class Channel:
    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self.subprotocol: str | None = connection.subprotocol

    async def send(self, message: str | bytes) -> None:
        """Waits while the provider does not read. What comes after the end is lost, and `receive` tells of it."""
        try:
            await self._connection.send(message)
        except ConnectionClosed:
            return

    async def receive(self) -> str | bytes | None:
        """None: it is closed."""
        try:
            return await self._connection.recv()
        except ConnectionClosed:
            return None

    @property
    def closed(self) -> tuple[int, str]:
        """The code and the reason, of who said so first; 1006: it broke."""
        close_frame = self._connection.protocol.close_rcvd or self._connection.protocol.close_sent
        return (1006, "") if close_frame is None else (close_frame.code, close_frame.reason)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        await self._connection.close(code, reason)


async def dial(
    provider: str, request: Outgoing, protocols: Sequence[str], upstream: Upstream, *, seconds: float, largest: int
) -> Channel:
    """`largest`: bytes of a message. A key is not carried to where a provider redirects."""
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
        raise TimedOut(f"no socket opened within {seconds:.3g} s", provider=provider) from None
    except InvalidStatus as e:
        reply = e.response
        if reply.status_code < 400:
            raise Broken(f"it answered {reply.status_code}, and opened no socket", provider=provider) from None
        raise refused(provider, reply.status_code, reply.headers, bytes(reply.body or b""), "raw") from None
    except InvalidHandshake as e:
        raise Broken(f"it did not open a socket: {e}", provider=provider) from None
    except (OSError, InvalidURI) as e:
        raise Unreached(f"it cannot be reached: {e}", provider=provider) from None
    return Channel(connection)
