"""ClusterCalls: what a router asks of a worker besides what clients ask. A reply that began elsewhere goes on here, or
the prompt of one that goes on elsewhere is computed here."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec

from emberline.api.errors import openai_error
from emberline.api.sse import dumps
from emberline.core.errors import BodyTooLarge, EmberlineError, EngineFailed, InvalidRequest
from emberline.core.events import Output
from emberline.core.handoff import Handoff
from emberline.core.offload import offload
from emberline.core.request import FinishReason
from emberline.core.weight import check_weight
from emberline.net.notjson import NOT_JSON
from emberline.server.exchange import Exchange
from emberline.server.worker.calls import Calls
from emberline.server.worker.journey import CHAIN, Journey, tenant_by_router
from emberline.server.worker.protocol import PROTOCOLS

log = logging.getLogger("emberline.server")

ENVELOPE = 8 << 20  # bytes, besides the client's own


class Envelope(msgspec.Struct):
    """A client's request, and where its reply stands."""

    path: str
    body: msgspec.Raw
    seed: int | None = None
    id: str | None = None  # of the reply, as the client was told it
    created: int | None = None
    handoff: dict[str, Any] = {}
    timeout: float | None = None  # seconds that are left

    def journey(self) -> Journey:
        given: dict[str, Any] = {"seed": self.seed, "tracked": True, "handoff": Handoff.parsed(self.handoff)}
        if self.id is not None:
            given["id"] = self.id.removeprefix(PROTOCOLS[self.path].prefix)
        if self.created is not None:
            given["created"] = self.created
        if self.timeout is not None:
            given["timeout"] = self.timeout
        return Journey(**given)


class ClusterCalls:
    def __init__(self, calls: Calls, max_body: int, keyed: bool = False) -> None:
        """`keyed`: clients need an API key here."""
        self._calls = calls
        self._keyed = keyed
        self._max_body = max_body

    async def resume(self, x: Exchange) -> None:
        envelope, body = await self._open(x)
        tenant = tenant_by_router(x, self._keyed)
        journey = replace(envelope.journey(), chained=x.header(CHAIN) == "1", span=x.span, tenant=tenant)
        await self._calls.answer(x, envelope.path, body, journey)

    async def prefill(self, x: Exchange) -> None:
        """Lines as it happens: a ticket, if there is anything to be had; then that it is done, or what came between."""
        envelope, body = await self._open(x)
        journey = replace(envelope.journey(), span=x.span, tenant=tenant_by_router(x, self._keyed))
        call, model = await self._calls.read(envelope.path, body, journey)
        await x.while_connected(_tell(x, model.generator.prefill(call, journey)))

    async def _open(self, x: Exchange) -> tuple[Envelope, bytes]:
        """The envelope, and the client's body in it."""
        data = await x.body(self._max_body + ENVELOPE)
        envelope, body = await offload.run_by_size(len(data), open_envelope, data)
        if envelope.path not in PROTOCOLS:
            raise InvalidRequest(f"nothing is generated at {envelope.path[:200]!r}", param="path")
        x.speaks = envelope.path  # what is wrong with the call is told as its client would have been told
        if len(body) > self._max_body:
            raise BodyTooLarge(f"the body has more than {self._max_body} bytes")
        return envelope, body


def open_envelope(data: bytes) -> tuple[Envelope, bytes]:
    """A large one is opened in another process."""
    try:
        envelope = msgspec.json.decode(data, type=Envelope)
    except NOT_JSON as e:
        raise InvalidRequest(str(e)) from e
    check_weight(envelope.handoff, what="the handoff")
    body, envelope.body = bytes(envelope.body), msgspec.Raw(b"")
    return envelope, body


async def _tell(x: Exchange, outputs: AsyncGenerator[Output, None]) -> None:
    """Until something was told an error has a status of its own."""
    async with aclosing(outputs):
        try:
            ended = False
            async for output in outputs:
                lines = []
                if output.ticket is not None and x.status is None:
                    lines.append(_line("ticket", output.ticket))
                if output.finish is not None:
                    lines.append(_line("done", _done(output)))
                    ended = True
                if lines:
                    await _send(x, lines, last=ended)
        except Exception as e:
            if x.status is None:
                raise
            if not isinstance(e, EmberlineError):
                log.exception("a prefill broke")
            reply = openai_error(e)
            x.note["error"] = reply.body["error"]["code"]
            told = {"code": reply.body["error"]["code"], "message": reply.body["error"]["message"]}
            await _send(x, [_line("error", told | {"status": reply.status})], last=True)


def _done(output: Output) -> dict[str, Any]:
    if output.finish is not FinishReason.HANDOFF:
        raise EngineFailed("the prompt was not computed to its end")
    seconds = output.timing.prefill if output.timing else None
    return {"token": output.tokens[0], "cached": output.cached_tokens, "seconds": seconds or 0.0}


async def _send(x: Exchange, lines: list[bytes], *, last: bool) -> None:
    if x.status is None:
        await x.start(200, "application/x-ndjson", {"cache-control": "no-cache"})
    await x.send(b"".join(lines), last=last)


def _line(name: str, value: Any) -> bytes:
    return dumps({name: value}) + b"\n"
