"""ProviderWebSocket: a WebSocket to a provider.

Its buffers are bounded, so that a slow reader slows down its sender.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from emberline.gateway.core.errors import UpstreamBroken, UpstreamTimeout, UpstreamUnreachable
from emberline.gateway.error_replies import read_provider_error
from emberline.gateway.upstream.client import UpstreamClient
from emberline.gateway.upstream.provider_request import ProviderRequest

CLOSE_TIMEOUT_S = 1.0  # for the provider to close its side
DEFAULT_PORTS = {"ws": 80, "wss": 443}


class _ConnectWithoutRedirects(connect):
    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc  # a redirect would send the provider's key to another host


class ProviderWebSocket:
    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self.subprotocol: str | None = connection.subprotocol

    async def send(self, message: str | bytes) -> None:
        """Send a message. If the provider does not read, wait until it does.

        A message after the end of the session is dropped.
        """
        try:
            await self._connection.send(message)
        except ConnectionClosed:
            return

    async def receive(self) -> str | bytes | None:
        """Return the next message, or None when the WebSocket is closed."""
        try:
            return await self._connection.recv()
        except ConnectionClosed:
            return None

    @property
    def close_code_and_reason(self) -> tuple[int, str]:
        """Return the close code and reason of the side that closed first.

        The code is 1006 if the connection broke.
        """
        close_frame = self._connection.protocol.close_rcvd or self._connection.protocol.close_sent
        return (1006, "") if close_frame is None else (close_frame.code, close_frame.reason)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        await self._connection.close(code, reason)


async def open_websocket(
    provider: str,
    request: ProviderRequest,
    protocols: Sequence[str],
    upstream: UpstreamClient,
    *,
    timeout_s: float,
    max_message_bytes: int,
) -> ProviderWebSocket:
    """Open a WebSocket to a provider without following redirects. Raise UpstreamFailed if that fails."""
    url = "ws" + request.url.removeprefix("http")
    parts = urlsplit(url)
    headers = {name: value for name, value in request.headers.items() if name not in ("origin", "user-agent")}
    try:
        async with asyncio.timeout(timeout_s):
            port = parts.port or DEFAULT_PORTS[parts.scheme]
            checked = await upstream.connect_to_public(parts.hostname or "", port) if request.public_only else None
            connection = await _ConnectWithoutRedirects(
                url,
                additional_headers=headers,
                user_agent_header=request.headers.get("user-agent"),
                subprotocols=cast("Sequence[Subprotocol]", protocols) or None,
                compression=None,
                proxy=None,
                open_timeout=None,
                close_timeout=CLOSE_TIMEOUT_S,
                max_size=max_message_bytes,
                sock=checked,
            )
    except TimeoutError:
        raise UpstreamTimeout(
            f"the WebSocket handshake with provider {provider!r} took longer than {timeout_s:.3g} s", provider=provider
        ) from None
    except InvalidStatus as e:
        reply = e.response
        if reply.status_code < 400:
            raise UpstreamBroken(
                f"provider {provider!r} replied with status {reply.status_code} instead of opening a WebSocket",
                provider=provider,
            ) from None
        raise read_provider_error(provider, reply.status_code, reply.headers, bytes(reply.body or b""), "raw") from None
    except InvalidHandshake as e:
        raise UpstreamBroken(
            f"the WebSocket handshake with provider {provider!r} failed: {e}", provider=provider
        ) from None
    except (OSError, InvalidURI) as e:
        raise UpstreamUnreachable(f"provider {provider!r} cannot be reached: {e}", provider=provider) from None
    return ProviderWebSocket(connection)
