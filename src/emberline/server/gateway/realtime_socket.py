"""RealtimeSocket: a client's WebSocket tied to a provider's own. Messages pass both ways as they are, no faster than
they are read; who closes one closes the other, with the same code."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, TypeAlias
from urllib.parse import parse_qs

from emberline.core.errors import EmberlineError, InvalidRequest
from emberline.core.offload import offload
from emberline.gateway.errors import Broken, TimedOut
from emberline.gateway.gateway import Gateway, Request
from emberline.gateway.paths import Target
from emberline.gateway.realtime.realtime import PROTOCOLS, Joined, named_model
from emberline.gateway.realtime.usage import realtime_usage
from emberline.gateway.settings import Timeouts
from emberline.server.exchange import Receive, Send

End: TypeAlias = tuple[int, str]  # the code and the reason of a socket's

WELL, AWAY, NO_CODE, BROKE, REFUSED, BAD_GATEWAY = 1000, 1001, 1005, 1006, 1008, 1014
WELL_MEANT = (WELL, AWAY, NO_CODE)
LONGEST_REASON = 123  # bytes
GOODBYE = 1.0  # seconds for the client to take it


class RealtimeSocket:
    def __init__(self, gateway: Gateway, target: Target, receive: Receive, send: Send) -> None:
        self._gateway = gateway
        self._target = target
        self._receive, self._send = receive, send
        self._now = asyncio.get_running_loop().time
        self._heard = self._now()  # when anybody said something

    async def run(self, path: str, query: str, headers: dict[str, str], offered: list[str], chosen: str | None) -> None:
        """From before it is accepted to its end. `offered`: subprotocols, of which `chosen` is taken if the provider
        takes none."""
        asked = {**headers, PROTOCOLS: ", ".join(offered)} if offered else headers
        self._model = _model(query)
        reply = await self._gateway.join(self._target, Request("GET", path, query, asked, b""), self._model)
        try:
            names = [(name.encode(), value.encode("latin-1")) for name, value in reply.headers.items()]
            if isinstance(reply, Joined):
                subprotocol = reply.channel.subprotocol or chosen
                await self._send({"type": "websocket.accept", "subprotocol": subprotocol, "headers": names})
                await self._tied(reply)
            else:
                assert isinstance(reply.body, bytes)
                await self._send({"type": "websocket.http.response.start", "status": reply.status, "headers": names})
                await self._send({"type": "websocket.http.response.body", "body": reply.body})
        finally:
            await reply.close()

    async def _tied(self, reply: Joined) -> None:
        out, back = asyncio.create_task(self._out(reply)), asyncio.create_task(self._back(reply))
        try:
            if late := await self._until_one_ends((out, back), reply.timeouts):
                reply.ended, reply.error = "cut", TimedOut.code
                await self._close(reply, (AWAY, late))
            elif back.done():
                code, reason = back.result()
                reply.ended, reply.error = ("complete", "") if code in WELL_MEANT else ("cut", Broken.code)
                await self._close(reply, (BAD_GATEWAY, "the provider hung up") if code == BROKE else (code, reason))
            else:
                reply.ended = "left" if out.result()[0] == BROKE else "complete"
                await self._close(reply, out.result())
        except EmberlineError as e:
            reply.ended, reply.error = "cut", e.code
            await self._close(reply, (REFUSED, e.message))
        finally:
            for task in (out, back):
                task.cancel()
            await asyncio.gather(out, back, return_exceptions=True)

    async def _until_one_ends(self, sides: tuple[asyncio.Task[End], ...], timeouts: Timeouts) -> str:
        """Or until it was long enough: why."""
        until = self._now() + timeouts.session
        while (left := min(until, self._heard + timeouts.idle) - self._now()) > 0:
            done, _ = await asyncio.wait(sides, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return ""
        return f"open for {timeouts.session:.3g} s" if self._now() >= until else f"idle for {timeouts.idle:.3g} s"

    async def _out(self, reply: Joined) -> End:
        """Until the client closes."""
        first = True
        while (message := await self._receive())["type"] == "websocket.receive":
            self._heard = self._now()
            said: str | bytes = message["bytes"] if message.get("text") is None else message["text"]
            if first and self._model and await _named_model(said) not in (None, self._model):
                return REFUSED, "the first message names another model than the URL"
            first = False
            await reply.channel.send(said)
        return message.get("code") or BROKE, message.get("reason") or ""

    async def _back(self, reply: Joined) -> End:
        """Until the provider closes. LimitExceeded: it is enough."""
        while (message := await reply.channel.receive()) is not None:
            self._heard = self._now()
            await self._say({"type": "websocket.send", "text" if isinstance(message, str) else "bytes": message})
            if (usage := await offload.run_by_size(len(message), realtime_usage, message)) is not None:
                await reply.count(usage)
        return reply.channel.closed

    async def _close(self, reply: Joined, end: End) -> None:
        """Both sides, as far as they are open."""
        code, reason = end[0], end[1].encode()[:LONGEST_REASON].decode(errors="ignore")
        code = {NO_CODE: WELL, BROKE: AWAY}.get(code, code)
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE):  # it may not read
                await self._say({"type": "websocket.close", "code": code, "reason": reason})
        await reply.channel.close(code, reason)

    async def _say(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # it has left, which `_out` hears of
            await self._send(message)


async def _named_model(first: str | bytes) -> str | None:
    return await offload.run_by_size(len(first), named_model, first)


def _model(query: str) -> str:
    """The one that is looked at must be the one that the provider reads."""
    named = parse_qs(query, keep_blank_values=True).get("model", [""])
    if len(named) > 1:
        raise InvalidRequest("the URL names several models", param="model")
    return named[0]
