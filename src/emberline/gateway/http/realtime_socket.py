"""RealtimeSocket: connects a client's WebSocket with a provider's.

Messages are passed in both directions unchanged, as fast as the receiver reads them. When one side closes, the other is
closed with the same code.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, TypeAlias
from urllib.parse import parse_qs

from emberline.core.errors import EmberlineError, InvalidRequest
from emberline.core.offload import offload
from emberline.gateway.core.errors import UpstreamBroken, UpstreamTimeout
from emberline.gateway.core.paths import RequestTarget
from emberline.gateway.core.settings import TimeoutSettings
from emberline.gateway.gateway import Gateway, InboundRequest
from emberline.gateway.realtime.handler import SUBPROTOCOL_HEADER, RealtimeReply, model_from_setup
from emberline.gateway.realtime.usage import parse_realtime_usage
from emberline.server.exchange import Receive, Send

CloseReason: TypeAlias = tuple[int, str]  # close code and reason of a WebSocket

NORMAL_CLOSURE, GOING_AWAY, NO_STATUS, ABNORMAL_CLOSURE, POLICY_VIOLATION, BAD_GATEWAY = (
    1000,
    1001,
    1005,
    1006,
    1008,
    1014,
)
CLEAN_CLOSE_CODES = (NORMAL_CLOSURE, GOING_AWAY, NO_STATUS)
MAX_REASON_BYTES = 123
CLOSE_TIMEOUT_S = 1.0  # for sending the close frame to the client


class RealtimeSocket:
    def __init__(self, gateway: Gateway, target: RequestTarget, receive: Receive, send: Send) -> None:
        self._gateway = gateway
        self._target = target
        self._receive, self._send = receive, send
        self._now = asyncio.get_running_loop().time
        self._last_message = self._now()  # time of the last message in either direction

    async def run(self, path: str, query: str, headers: dict[str, str], offered: list[str], chosen: str | None) -> None:
        """Open the session, accept the client's socket and pass messages until one side closes.

        `offered`: the client's subprotocols. `chosen` is accepted if the provider accepts none.
        """
        sent = {**headers, SUBPROTOCOL_HEADER: ", ".join(offered)} if offered else headers
        self._model = _model_of(query)
        reply = await self._gateway.open_session(
            self._target, InboundRequest("GET", path, query, sent, b""), self._model
        )
        try:
            names = [(name.encode(), value.encode("latin-1")) for name, value in reply.headers.items()]
            if isinstance(reply, RealtimeReply):
                subprotocol = reply.websocket.subprotocol or chosen
                await self._send({"type": "websocket.accept", "subprotocol": subprotocol, "headers": names})
                await self._pass_messages(reply)
            else:
                assert isinstance(reply.body, bytes)
                await self._send({"type": "websocket.http.response.start", "status": reply.status, "headers": names})
                await self._send({"type": "websocket.http.response.body", "body": reply.body})
        finally:
            await reply.close()

    async def _pass_messages(self, reply: RealtimeReply) -> None:
        to_provider = asyncio.create_task(self._client_to_provider(reply))
        to_client = asyncio.create_task(self._provider_to_client(reply))
        try:
            if timeout := await self._wait_for_end((to_provider, to_client), reply.timeouts):
                reply.ended, reply.error = "cut", UpstreamTimeout.code
                await self._close(reply, (GOING_AWAY, timeout))
            elif to_client.done():
                code, reason = to_client.result()
                reply.ended, reply.error = (
                    ("complete", "") if code in CLEAN_CLOSE_CODES else ("cut", UpstreamBroken.code)
                )
                end = (
                    (BAD_GATEWAY, "the provider closed the connection") if code == ABNORMAL_CLOSURE else (code, reason)
                )
                await self._close(reply, end)
            else:
                reply.ended = "left" if to_provider.result()[0] == ABNORMAL_CLOSURE else "complete"
                await self._close(reply, to_provider.result())
        except EmberlineError as e:
            reply.ended, reply.error = "cut", e.code
            await self._close(reply, (POLICY_VIOLATION, e.message))
        finally:
            for task in (to_provider, to_client):
                task.cancel()
            await asyncio.gather(to_provider, to_client, return_exceptions=True)

    async def _wait_for_end(self, directions: tuple[asyncio.Task[CloseReason], ...], timeouts: TimeoutSettings) -> str:
        """Wait until one direction ends. Return "", or which timeout passed first."""
        until = self._now() + timeouts.session
        while (left := min(until, self._last_message + timeouts.idle) - self._now()) > 0:
            done, _ = await asyncio.wait(directions, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return ""
        if self._now() >= until:
            return f"session timeout: open for {timeouts.session:.3g} s"
        return f"idle timeout: no message for {timeouts.idle:.3g} s"

    async def _client_to_provider(self, reply: RealtimeReply) -> CloseReason:
        """Pass messages on until the client closes. Return the close code and reason."""
        is_first = True
        while (event := await self._receive())["type"] == "websocket.receive":
            self._last_message = self._now()
            message: str | bytes = event["bytes"] if event.get("text") is None else event["text"]
            if is_first and self._model and await _named_model(message) not in (None, self._model):
                return POLICY_VIOLATION, "the first message names another model than the URL"
            is_first = False
            await reply.websocket.send(message)
        return event.get("code") or ABNORMAL_CLOSURE, event.get("reason") or ""

    async def _provider_to_client(self, reply: RealtimeReply) -> CloseReason:
        """Pass messages on until the provider closes. Raise LimitExceeded if the session exceeds a limit."""
        while (message := await reply.websocket.receive()) is not None:
            self._last_message = self._now()
            await self._send_to_client(
                {"type": "websocket.send", "text" if isinstance(message, str) else "bytes": message}
            )
            if (usage := await offload.run_by_size(len(message), parse_realtime_usage, message)) is not None:
                await reply.add_usage(usage)
        return reply.websocket.close_code_and_reason

    async def _close(self, reply: RealtimeReply, end: CloseReason) -> None:
        """Close both sides if they are open."""
        code, reason = end[0], end[1].encode()[:MAX_REASON_BYTES].decode(errors="ignore")
        code = {NO_STATUS: NORMAL_CLOSURE, ABNORMAL_CLOSURE: GOING_AWAY}.get(code, code)
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):  # the client may have stopped reading
                await self._send_to_client({"type": "websocket.close", "code": code, "reason": reason})
        await reply.websocket.close(code, reason)

    async def _send_to_client(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # disconnected: _client_to_provider notices it, too
            await self._send(message)


async def _named_model(first: str | bytes) -> str | None:
    return await offload.run_by_size(len(first), model_from_setup, first)


def _model_of(query: str) -> str:
    """Return the model in the URL. Raise InvalidRequest for several: the provider may read another one."""
    models = parse_qs(query, keep_blank_values=True).get("model", [""])
    if len(models) > 1:
        raise InvalidRequest(f"the URL has {len(models)} model parameters", param="model", hint="give one model")
    return models[0]
