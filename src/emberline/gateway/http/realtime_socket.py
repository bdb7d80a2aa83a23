"""RealtimeSocket: connects a client's WebSocket with a provider's WebSocket.

Messages are forwarded unchanged in both directions, as fast as the receiver reads. When one side closes, the other side
is closed with the same code.
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

    async def run(
        self, path: str, query: str, headers: dict[str, str], offered_protocols: list[str], default_protocol: str | None
    ) -> None:
        """Open the session, accept the client's WebSocket and forward messages until one side closes.

        `offered_protocols`: the subprotocols that the client offers. `default_protocol` is used if the provider accepts
        none of the offered subprotocols.
        """
        sent = {**headers, SUBPROTOCOL_HEADER: ", ".join(offered_protocols)} if offered_protocols else headers
        self._model = _model_in_query(query)
        reply = await self._gateway.open_realtime_session(
            self._target, InboundRequest("GET", path, query, sent, b""), self._model
        )
        try:
            names = [(name.encode(), value.encode("latin-1")) for name, value in reply.headers.items()]
            if isinstance(reply, RealtimeReply):
                subprotocol = reply.websocket.subprotocol or default_protocol
                await self._send({"type": "websocket.accept", "subprotocol": subprotocol, "headers": names})
                await self._forward_messages(reply)
            else:
                assert isinstance(reply.body, bytes)
                await self._send({"type": "websocket.http.response.start", "status": reply.status, "headers": names})
                await self._send({"type": "websocket.http.response.body", "body": reply.body})
        finally:
            await reply.close()

    async def _forward_messages(self, reply: RealtimeReply) -> None:
        to_provider = asyncio.create_task(self._forward_to_provider(reply))
        to_client = asyncio.create_task(self._forward_to_client(reply))
        try:
            if timeout := await self._wait_for_end((to_provider, to_client), reply.timeouts):
                reply.ended, reply.error = "cut", UpstreamTimeout.code
                await self._close_both_sides(reply, (GOING_AWAY, timeout))
            elif to_client.done():
                code, reason = to_client.result()
                reply.ended, reply.error = (
                    ("complete", "") if code in CLEAN_CLOSE_CODES else ("cut", UpstreamBroken.code)
                )
                end = (
                    (BAD_GATEWAY, "the provider closed the connection") if code == ABNORMAL_CLOSURE else (code, reason)
                )
                await self._close_both_sides(reply, end)
            else:
                reply.ended = "left" if to_provider.result()[0] == ABNORMAL_CLOSURE else "complete"
                await self._close_both_sides(reply, to_provider.result())
        except EmberlineError as e:
            reply.ended, reply.error = "cut", e.code
            await self._close_both_sides(reply, (POLICY_VIOLATION, e.message))
        finally:
            for task in (to_provider, to_client):
                task.cancel()
            await asyncio.gather(to_provider, to_client, return_exceptions=True)

    async def _wait_for_end(
        self, forwarding_tasks: tuple[asyncio.Task[CloseReason], ...], timeouts: TimeoutSettings
    ) -> str:
        """Wait until forwarding ends in one direction or a timeout passes.

        Return a text that names the timeout, or "" if no timeout passed.
        """
        until = self._now() + timeouts.session
        while (left := min(until, self._last_message + timeouts.idle) - self._now()) > 0:
            done, _ = await asyncio.wait(forwarding_tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return ""
        if self._now() >= until:
            return f"session timeout: open for {timeouts.session:.3g} s"
        return f"idle timeout: no message for {timeouts.idle:.3g} s"

    async def _forward_to_provider(self, reply: RealtimeReply) -> CloseReason:
        """Forward messages to the provider until the client closes. Return the close code and reason."""
        is_first = True
        while (event := await self._receive())["type"] == "websocket.receive":
            self._last_message = self._now()
            message: str | bytes = event["bytes"] if event.get("text") is None else event["text"]
            if is_first and self._model and await _model_in_setup(message) not in (None, self._model):
                return POLICY_VIOLATION, "the first message names another model than the URL"
            is_first = False
            await reply.websocket.send(message)
        return event.get("code") or ABNORMAL_CLOSURE, event.get("reason") or ""

    async def _forward_to_client(self, reply: RealtimeReply) -> CloseReason:
        """Forward messages to the client until the provider closes. Return the close code and reason.

        Raise LimitExceeded if the session exceeds a limit.
        """
        while (message := await reply.websocket.receive()) is not None:
            self._last_message = self._now()
            await self._send_to_client(
                {"type": "websocket.send", "text" if isinstance(message, str) else "bytes": message}
            )
            if (usage := await offload.run_inline_if_small(len(message), parse_realtime_usage, message)) is not None:
                await reply.add_usage(usage)
        return reply.websocket.close_code_and_reason

    async def _close_both_sides(self, reply: RealtimeReply, close_reason: CloseReason) -> None:
        """Close the client's and the provider's WebSocket unless they are closed already."""
        code, reason = close_reason[0], close_reason[1].encode()[:MAX_REASON_BYTES].decode(errors="ignore")
        code = {NO_STATUS: NORMAL_CLOSURE, ABNORMAL_CLOSURE: GOING_AWAY}.get(code, code)
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):  # the client may have stopped reading
                await self._send_to_client({"type": "websocket.close", "code": code, "reason": reason})
        await reply.websocket.close(code, reason)

    async def _send_to_client(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # disconnected: _client_to_provider notices it, too
            await self._send(message)


async def _model_in_setup(first_message: str | bytes) -> str | None:
    return await offload.run_inline_if_small(len(first_message), model_from_setup, first_message)


def _model_in_query(query: str) -> str:
    """Return the model in the URL's query.

    Raise InvalidRequest if the query names several models, because the provider may use a different one than the
    gateway.
    """
    models = parse_qs(query, keep_blank_values=True).get("model", [""])
    if len(models) > 1:
        raise InvalidRequest(
            f"the URL must have one query parameter model, not {len(models)}", param="model", hint="give one model"
        )
    return models[0]
