"""Relay: a client's request to a worker, and the reply back, byte for byte. Until the first byte of a reply has gone
out another worker can be tried; after it a failure is told in the stream's own protocol (to go on elsewhere from the
tokens already sent takes the handoff, which is not built yet). Every request is answered exactly once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from emberline.api import sse
from emberline.api.errors import anthropic_error, openai_error
from emberline.core.errors import DeadlineExceeded, EmberlineError, EngineUnavailable, Overloaded, WorkerLost
from emberline.router.ask import Ask
from emberline.router.events import Events
from emberline.router.policy import Decision
from emberline.router.upstream import Broken, Reply, Unreached, Upstream
from emberline.router.usage import Usage
from emberline.server.dispatch import Attempt, Dispatch
from emberline.server.exchange import Exchange

log = logging.getLogger("emberline.router")

WHOLE = 1 << 20  # bytes of a plain reply that are taken in before any is passed on
LAST_WORDS = 5.0  # seconds to tell a client that its stream broke
CRASHES = 2  # workers that may break under one request: it may be what breaks them
HOP = frozenset({"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te",
                 "trailer", "transfer-encoding", "upgrade", "host", "content-length", "accept-encoding"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setback:
    """Why another worker is tried; `status` and what follows is what this one said, if it said anything."""

    reason: str
    crash: bool = False
    status: int = 0
    headers: Mapping[str, str] | None = None
    body: bytes = b""


class Relay:
    def __init__(self, dispatch: Dispatch, upstream: Upstream, *, attempts: int, timeout: float) -> None:
        self._dispatch = dispatch
        self._upstream = upstream
        self._attempts = attempts
        self._timeout = timeout

    async def run(self, x: Exchange, ask: Ask, body: bytes) -> None:
        given = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in x.headers.items())
        headers = {name: value for name, value in given if name not in HOP}
        deadline = asyncio.get_running_loop().time() + self._timeout
        tried: set[str] = set()
        setback: Setback | None = None
        crashes = 0
        while len(tried) < self._attempts and crashes < CRASHES:
            try:
                decision = self._dispatch.choose(ask, tried)
            except EmberlineError as e:
                if setback is None:
                    self._dispatch.metrics.refused += isinstance(e, Overloaded)
                    raise
                break
            if setback is not None:
                self._dispatch.metrics.retries[setback.reason] += 1
            tried.add(decision.worker.id)
            x.note["worker"] = decision.worker.name
            setback = await self._attempt(x, ask, decision, headers, body, deadline)
            if setback is None:
                return
            log.info("%s at %s: %s", x.path, decision.worker.name, setback.reason)
            crashes += setback.crash
        assert setback is not None
        await self._give_up(x, setback, len(tried))

    async def _give_up(self, x: Exchange, setback: Setback, tried: int) -> None:
        if setback.status:
            await x.reply(setback.status, setback.body, *_head(setback.headers or {}))
            return
        hint = "retry in a few seconds"
        raise EngineUnavailable(f"{tried} workers could not answer, the last because of: {setback.reason}", hint=hint)

    async def _attempt(
        self, x: Exchange, ask: Ask, decision: Decision, headers: Mapping[str, str], body: bytes, deadline: float
    ) -> Setback | None:
        with self._dispatch.opened(ask, decision) as attempt:
            try:
                url = self._dispatch.url(decision.worker) + x.path + (f"?{x.query}" if x.query else "")
                async with (
                    attempt.until(deadline),
                    self._upstream.request(x.method, url, headers, body) as reply,
                ):
                    return await self._answer(x, reply, attempt)
            except TimeoutError:
                if attempt.lost is None:  # slow is not broken, and may be its client's doing
                    await self._broke(x, attempt, DeadlineExceeded(f"no end within {self._timeout:.0f} s"))
                    return None
                attempt.outcome = "failed"
                return await self._failed(x, attempt, attempt.lost.value)
            except Unreached as e:
                log.debug("%s: %s", decision.worker.name, e)
                attempt.outcome = "failed"
                return Setback("unreached")
            except Broken as e:
                log.debug("%s: %s", decision.worker.name, e)
                attempt.outcome = "failed"
                return await self._failed(x, attempt, "broken")

    async def _failed(self, x: Exchange, attempt: Attempt, reason: str) -> Setback | None:
        if x.status is None:
            return Setback(reason, crash=True)
        name = attempt.decision.worker.name
        await self._broke(x, attempt, WorkerLost(f"worker {name} was lost ({reason}) before the reply ended"))
        return None

    async def _broke(self, x: Exchange, attempt: Attempt, error: EmberlineError) -> None:
        """Between two events of a stream the error can be one more; all else is cut off, so that nobody takes it for
        whole. It is raised to be told by who called, or logged if it is too late for that."""
        if x.status is None or attempt.events is None or attempt.events.torn:
            raise error
        ended = attempt.events.ended
        self._dispatch.metrics.broken += not ended
        log.warning("%s: %s", x.path, error)
        async with asyncio.timeout(LAST_WORDS):  # its client may have stopped reading
            await x.send_events([] if ended else _last_words(x.path, error, attempt.events.count), last=True)

    async def _answer(self, x: Exchange, reply: Reply, attempt: Attempt) -> Setback | None:
        if reply.status in (429, 500, 502, 503):
            # A 500 may be the request's own doing: it must not take workers from others.
            attempt.outcome = "failed" if reply.status in (502, 503) else "refused"
            said = await reply.whole()
            return Setback(f"status {reply.status}", reply.status == 500, reply.status, dict(reply.headers), said)
        length = reply.headers.get("content-length", "")
        if length.isdigit() and int(length) <= WHOLE:
            await self._whole(x, reply, attempt)
        elif reply.headers.get("content-type", "").startswith("text/event-stream"):
            await self._stream(x, reply, attempt)
        else:
            await self._pieces(x, reply, attempt)
        attempt.outcome = "answered"
        return None

    async def _whole(self, x: Exchange, reply: Reply, attempt: Attempt) -> None:
        body = await reply.whole()
        self._dispatch.came(attempt, 0)
        attempt.usage = Usage.read(body[-2048:])
        await x.reply(reply.status, body, *_head(reply.headers, attempt))

    async def _pieces(self, x: Exchange, reply: Reply, attempt: Attempt) -> None:
        while data := await reply.read():
            if x.status is None:
                await x.start(reply.status, *_head(reply.headers, attempt, whole=False))
            self._dispatch.came(attempt, 0)
            await x.send_events([data])
        if x.status is None:
            await x.start(reply.status, *_head(reply.headers, attempt, whole=False))
        await x.send_events([], last=True)

    async def _stream(self, x: Exchange, reply: Reply, attempt: Attempt) -> None:
        events, first, last, counted = Events(), b"", b"", 0
        attempt.events = events
        while data := await reply.read():
            if not (last := events.push(data)):
                continue
            if x.status is None:
                first = last
                await x.start(reply.status, *_head(reply.headers, attempt, whole=False))
            self._dispatch.came(attempt, events.count - counted)
            counted = events.count
            await x.send_events([last])
        if x.status is None:
            await x.start(reply.status, *_head(reply.headers, attempt, whole=False))
        attempt.usage = Usage.read(first[:2048], last[-2048:])
        await x.send_events([events.rest()], last=True)


def _head(
    headers: Mapping[str, str], attempt: Attempt | None = None, *, whole: bool = True
) -> tuple[str, dict[str, str]]:
    """The reply's own, but for what belongs to one connection."""
    kept = {name.lower(): value for name, value in headers.items() if name.lower() not in HOP}
    if not whole and "content-length" in headers:
        kept["content-length"] = headers["content-length"]
    if attempt is not None:
        kept["x-emberline-worker"] = attempt.decision.worker.name
    return kept.pop("content-type", "application/octet-stream"), kept


def _last_words(path: str, error: EmberlineError, number: int) -> list[bytes]:
    """The protocol's error event, and its ending."""
    if path == "/v1/messages":
        return [sse.event("error", anthropic_error(error).body)]
    if path == "/v1/responses":
        told = {"type": "error", "code": error.code, "message": str(error), "param": None, "sequence_number": number}
        return [sse.event("error", told)]
    return [sse.data(openai_error(error).body), sse.DONE]
