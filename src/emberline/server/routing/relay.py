"""Relay: a client's request to workers, and the reply back. A worker that fails before the first byte is replaced by
another; one that fails after it too, if its stream is tracked: the next goes on after what the client has. What cannot
go on ends with an error in the stream's own protocol. Every request is answered exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import Mapping
from dataclasses import replace

from emberline.api import sse
from emberline.api.errors import anthropic_error, openai_error
from emberline.core.clock import WallClock
from emberline.core.config import RouterConfig
from emberline.core.errors import (
    DeadlineExceeded,
    EmberlineError,
    EngineUnavailable,
    Overloaded,
    ShuttingDown,
    WorkerLost,
    WorkersBroke,
)
from emberline.router.ask import Ask
from emberline.router.call import Call
from emberline.router.dialect import CHAIN, PRIVATE, TENANT, Garbled
from emberline.router.native import RESUME
from emberline.router.policy import AGAIN, Decision, Why
from emberline.router.suspects import Suspects
from emberline.router.track import read_link
from emberline.router.upstream import Broken, Reply, Unreached, Upstream
from emberline.router.usage import Usage
from emberline.server.exchange import Exchange
from emberline.server.keys import tenant_of
from emberline.server.routing.dispatch import Dispatch
from emberline.server.routing.leg import Leg
from emberline.server.routing.prefill import Prefill
from emberline.server.routing.trip import Setback, Trip

log = logging.getLogger("emberline.router")

WHOLE = 1 << 20  # bytes of a plain reply that are taken in before any is passed on
EXTENSION_S = 1.0  # seconds until the deadline of the next token is put off again: timers take time, too
PAUSE = 0.1  # seconds until workers are looked for again, at first
MOST_WAITING = 1024  # for workers, at once
HANDOVER_S = 2.0  # seconds for a worker that drains to offer blocks that it has
LAST_WORDS = 5.0  # seconds to tell a client that its stream broke
HOP = frozenset({"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te",
                 "trailer", "transfer-encoding", "upgrade", "host", "content-length", "accept-encoding",
                 "expect", CHAIN})  # fmt: skip
GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})


class Relay:
    def __init__(self, dispatch: Dispatch, upstream: Upstream, config: RouterConfig) -> None:
        self._dispatch = dispatch
        self._upstream = upstream
        self._config = config
        self._metrics = dispatch.metrics
        self._suspects = Suspects()
        self._waiting = 0

    async def run(self, x: Exchange, ask: Ask, body: bytes) -> None:
        trip = self._trip(x, self._dispatch.named(ask), body)
        try:
            async with asyncio.timeout(None) as trip.limit:
                self._extend(trip, anew=True)
                await self._travel(trip)
        except TimeoutError:  # slow is not broken, and may be its client's doing
            await self._broke(trip, self._exceeded(trip))
        except asyncio.CancelledError:
            if trip.started and not x.has_left:  # the router stops
                error = ShuttingDown()
                x.outcome = error.status
                with contextlib.suppress(EmberlineError):
                    await self._broke(trip, error)
            raise
        finally:
            await trip.close()
            trip.end_trace()

    def _trip(self, x: Exchange, ask: Ask, body: bytes) -> Trip:
        given = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in x.headers.items())
        headers = {name: value for name, value in given if name not in HOP and not name.startswith(PRIVATE)}
        if self._config.kv_events:
            headers[CHAIN] = "1"
        if tenant := tenant_of(x):
            headers[TENANT] = f"{'checked' if self._config.api_keys else 'presented'} {tenant}"
        call = Call(x.method, x.path + (f"?{x.query}" if x.query else ""), headers, body)
        config, deadline = self._config, self._now() + self._config.request_timeout
        ours = (secrets.randbits(64), int(WallClock.now()), config.cluster_key)
        accused = self._suspects.knows(ask.digest, self._now())
        tries, generates = (config.attempts, config.migrations), x.path in GENERATING
        return Trip(x, ask, call, *ours, deadline, *tries, generates, accused, config.foreign_key)

    def _extend(self, trip: Trip, *, anew: bool = False) -> None:
        """The next part of the reply has `token_timeout` from now, within the deadline of the whole."""
        now = self._now()
        if trip.limit is None or (now < trip.extended + EXTENSION_S and not anew):
            return
        trip.extended, config = now, self._config
        until = min(trip.deadline, now + config.token_timeout if trip.shows_tokens else math.inf)
        trip.limit.reschedule(None if math.isinf(until) else until)

    def _exceeded(self, trip: Trip) -> DeadlineExceeded:
        config = self._config
        if self._now() < trip.deadline:
            return DeadlineExceeded(f"no token within {config.token_timeout:.0f} s", hint="raise --token-timeout")
        return DeadlineExceeded(f"no end within {config.request_timeout:.0f} s", hint="raise --request-timeout")

    async def _travel(self, trip: Trip) -> None:
        while (decision := self._next(trip) or await self._wait(trip)) is not None:
            trip.x.note["worker"] = decision.worker.name
            setback = await self._attempt(trip, decision)
            if setback is None:
                return
            log.info("%s at %s: %s", trip.x.path, decision.worker.name, setback.reason)
            trip.fell_back(setback, decision, self._now())
        await self._give_up(trip)

    def _next(self, trip: Trip) -> Decision | None:
        """Who is tried next; None if there is nobody, or it was tried often enough."""
        try:
            if trip.goes_on:
                without = trip.tried
                if trip.author is not None:
                    without = without | self._dispatch.unable(trip.ask.model, trip.author)
                decision = self._dispatch.choose(trip.ask, without, urgent=trip.started, suspect=trip.suspect)
                trip.tries += 1
                if trip.setback is None:
                    return decision
                if not trip.started:
                    self._metrics.retries[trip.setback.reason] += 1
                return replace(decision, why=Why.AGAIN)
        except EmberlineError as e:
            if trip.setback is None and not isinstance(e, EngineUnavailable):
                self._metrics.refused += isinstance(e, Overloaded)
                raise
            trip.nobody, trip.since = e, trip.since or self._now()
        origin, trip.origin = trip.origin, None
        return self._dispatch.again(origin) if origin is not None else None

    async def _wait(self, trip: Trip) -> Decision | None:
        """Who has the beginning of a reply waits for somebody who can go on with it, be it one who was tried before; so
        does who found nobody, or only workers that were away, or broke."""
        self._waiting += 1
        try:
            while self._waiting <= MOST_WAITING and trip.may_wait(self._config.migration_wait, self._now()):
                await asyncio.sleep(PAUSE + (self._now() - trip.since) / 4)
                trip.waited()
                if (decision := self._next(trip)) is not None:
                    return decision
            return None
        finally:
            self._waiting -= 1

    async def _attempt(self, trip: Trip, decision: Decision) -> Setback | None:
        trip.legs += 1
        trip.watched = decision.worker.dialect == "native"
        self._extend(trip, anew=True)
        with self._dispatch.opened(trip.ask, decision) as leg:
            trip.trace(leg, "resume" if trip.started else "plain")
            leg.movable = trip.may_move
            try:
                begun = trip.started
                setback = await self._split(trip, leg)
                if setback is not None or trip.started != begun:
                    return setback
                url, call = self._dispatch.url(decision.worker), await trip.call(decision.worker, self._now())
                if call is None:
                    leg.outcome = "refused"
                    return Setback("unable")
                async with leg.asked(self._upstream, url, call) as reply:
                    return await self._answer(trip, reply, leg, resumed=call.target == RESUME)
            except (Unreached, Broken, Garbled, EngineUnavailable) as e:
                log.debug("%s: %s", decision.worker.name, e)
                if leg.lost in ("drained", "prefill"):  # it is well itself
                    leg.outcome = "moved" if leg.lost == "drained" else "refused"
                    return Setback(leg.lost)
                leg.outcome = "failed"
                if isinstance(e, Unreached | EngineUnavailable):
                    return Setback("unreached")
                return Setback(leg.lost or ("garbled" if isinstance(e, Garbled) else "broken"), crash=True)

    async def _split(self, trip: Trip, leg: Leg) -> Setback | None:
        """Has the prompt computed elsewhere if that is worth it, be it to answer or to go on, and waits for the first
        of its blocks. If the call is bad, it is answered here."""
        to = leg.decision.worker
        dialect = trip.speak(to)
        must = to.role == "decode" and not dialect.computes
        if not trip.generates or not (trip.may_split or must) or (trip.started and to.dialect != "native"):
            return None
        trip.may_split = False
        patience = self._config.ticket_timeout
        decision = None
        if trip.origin is not None:
            decision = self._dispatch.handover(trip.ask, trip.said_tokens, leg.decision, trip.origin.worker)
        if decision is not None:
            patience = HANDOVER_S
        else:
            decision = self._dispatch.split(trip.ask, leg.decision, must=must)
        if decision is None:
            return Setback("no prefill") if must else None
        await trip.close()
        missing = leg.decision.load.prefill
        to.relieved(leg.key)
        until = min(trip.deadline, self._now() + self._config.token_timeout)
        peer = self._dispatch.peer(decision.worker, trip.ask.model)
        made = await trip.written(dialect.prefill, peer, until - self._now())
        prefill = trip.prefill = Prefill(self._dispatch, self._upstream, trip.ask, decision, dialect, made, until)
        trip.trace(prefill.leg, "prefill")
        if must:
            prefill.needed_by(leg)
        refusal = await prefill.begun(decision.wait + patience)
        if refusal is not None and not trip.started:
            leg.outcome = "refused"
            await trip.x.reply(refusal.status, refusal.body, *_head(refusal.headers))
        elif prefill.ticket is None:
            to.owes(leg.key, missing)
        return None

    async def _answer(self, trip: Trip, reply: Reply, leg: Leg, *, resumed: bool) -> Setback | None:
        unable = resumed and reply.status in (401, 403, 404)  # it does not know how, or does not trust us
        if unable or reply.status in (429, 500, 502, 503) or (trip.started and reply.status != 200):
            # A 500 may be the request's own doing: it must not take workers from others.
            leg.outcome = "failed" if reply.status in (502, 503) else "refused"
            said = await reply.whole()
            if unable and trip.prefill is not None:
                trip.prefill.failed = "unable"
            reason = "unable" if unable and not trip.started else f"status {reply.status}"
            return Setback(reason, reply.status == 500, reply.status, dict(reply.headers), said)
        length = reply.headers.get("content-length", "")
        if length.isdigit() and int(length) <= WHOLE:
            await self._whole(trip, reply, leg)
        elif reply.headers.get("content-type", "").startswith("text/event-stream"):
            await self._stream(trip, reply, leg)
        else:
            await self._pieces(trip, reply, leg)
        leg.outcome = "answered"
        if trip.prefill is not None:
            trip.prefill.leave()
        return None

    async def _whole(self, trip: Trip, reply: Reply, leg: Leg) -> None:
        body = await reply.whole()
        if trip.started:
            raise Garbled("a stream does not go on with a whole reply")
        self._dispatch.came(leg, 0)
        leg.usage = Usage.read(body[-2048:])
        if CHAIN in reply.headers:
            self._dispatch.told(leg, read_link(reply.headers[CHAIN]))
        await trip.x.reply(reply.status, body, *_head(reply.headers, trip, leg))

    async def _pieces(self, trip: Trip, reply: Reply, leg: Leg) -> None:
        if trip.started:
            raise Garbled("a stream does not go on with something else")
        while data := await reply.read():
            self._extend(trip)
            if not trip.started:
                await self._begin(trip, reply, leg, sized=True)
            self._dispatch.came(leg, 0)
            await trip.x.send(data)
        if not trip.started:
            await self._begin(trip, reply, leg, sized=True)
        await trip.x.send(last=True)

    async def _stream(self, trip: Trip, reply: Reply, leg: Leg) -> None:
        x, track = trip.x, trip.track
        while data := await reply.read():
            before = track.count
            if not (out := track.push(data)):
                continue
            self._extend(trip)
            if leg.first is None:
                await self._first(trip, reply, leg)
            self._dispatch.came(leg, track.count - before)
            await x.send(out)
        if track.movable:
            raise Broken("it ended early")
        leg.usage = Usage.read(track.first[:2048], track.last[-2048:])
        if not trip.started:  # no event of its stream was whole
            await self._begin(trip, reply, leg)
        await x.send(track.rest(), last=True)

    async def _first(self, trip: Trip, reply: Reply, leg: Leg) -> None:
        """The first that a worker says."""
        if not trip.started:
            await self._begin(trip, reply, leg)
        if trip.moving:
            self._metrics.migrations[trip.moving, "went on"] += 1
        if trip.prefill is not None:
            trip.prefill.leave()
        if trip.track.link is not None:
            self._dispatch.told(leg, trip.track.link)
        trip.progressed(leg.decision.worker)
        leg.movable = trip.may_move and trip.track.movable

    async def _begin(self, trip: Trip, reply: Reply, leg: Leg, *, sized: bool = False) -> None:
        """`sized`: all bytes of the body are passed on as they are, so that the length stays what it was."""
        kind, headers = _head(reply.headers, trip, leg)
        if sized and "content-length" in reply.headers and "content-encoding" not in reply.headers:  # it comes unpacked
            headers["content-length"] = reply.headers["content-length"]
        await trip.x.start(reply.status, kind, headers)

    async def _give_up(self, trip: Trip) -> None:
        setback, x = trip.setback, trip.x
        if setback is None:
            assert trip.nobody is not None
            raise trip.nobody
        log.info("%s is given up after %d attempts: %s", x.path, trip.legs, setback.reason)
        if trip.suspect and trip.ask.digest:
            self._suspects.add(trip.ask.digest, self._now())
        if trip.started:
            if trip.moving and not trip.track.ended:
                self._metrics.migrations[trip.moving, "given up"] += 1
            await self._broke(trip, _harm(trip) if trip.guilty else self._lost(trip))
        elif trip.guilty:
            raise _harm(trip)
        elif setback.status:
            await x.reply(setback.status, setback.body, *_head(setback.headers or {}))
        else:
            raise _nobody(trip, setback)

    def _lost(self, trip: Trip) -> WorkerLost:
        differs = self._dispatch.difference(trip.ask.model, trip.author) if trip.author is not None else ""
        if not differs:
            return WorkerLost(trip.lost)
        why = f"{trip.lost}; the workers that are ready compute {trip.ask.model!r} otherwise: {differs}"
        return WorkerLost(why, hint="send the request again, or give all workers of a model the same settings")

    async def _broke(self, trip: Trip, error: EmberlineError) -> None:
        """Between two events of a stream the error can be one more; all else is cut off, so that nobody takes it for
        whole. It is raised to be told by who called, or logged if it is too late for that."""
        x, track = trip.x, trip.track
        if not trip.started or not track.started or track.torn:
            raise error
        if not track.ended:
            self._metrics.broken += 1
            x.note["error"] = error.code
        log.warning("%s: %s", x.path, error)
        try:
            async with asyncio.timeout(LAST_WORDS):  # its client may have stopped reading
                await x.send(b"" if track.ended else _last_words(x.path, error, track.count), last=True)
        except TimeoutError:
            raise error from None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _head(headers: Mapping[str, str], trip: Trip | None = None, leg: Leg | None = None) -> tuple[str, dict[str, str]]:
    """The reply's own, but for what belongs to one connection, and how its body was packed there."""
    kept = {name.lower(): value for name, value in headers.items() if name.lower() not in HOP}
    kept.pop("content-encoding", None)
    if leg is not None:
        kept[f"{PRIVATE}worker"] = leg.decision.worker.name
    if trip is not None and trip.prefill is not None and trip.prefill.ticket is not None:
        kept[f"{PRIVATE}prefill"] = trip.prefill.worker.name
    return kept.pop("content-type", "application/octet-stream"), kept


def _nobody(trip: Trip, setback: Setback) -> EngineUnavailable:
    if trip.suspect:
        why = f"{trip.crashes} workers broke under this request, and the others are not risked for it"
        return EngineUnavailable(why, hint=AGAIN)
    tries = "1 attempt" if trip.legs == 1 else f"{trip.legs} attempts"
    why = f"no worker could answer in {tries}, the last because of: {setback.reason}"
    return EngineUnavailable(why, hint="retry in a few seconds")


def _harm(trip: Trip) -> WorkersBroke:
    broken = "a worker, after others," if trip.accused else f"{trip.crashes} workers"
    hint = "it may be what breaks them: their logs say how they ended; do not send it again as it is"
    return WorkersBroke(f"{broken} broke under this request", hint=hint)


def _last_words(path: str, error: EmberlineError, number: int) -> bytes:
    """The protocol's error event, and its ending."""
    if path == "/v1/messages":
        return sse.event("error", anthropic_error(error).body)
    if path == "/v1/responses":
        told = {"type": "error", "code": error.code, "message": str(error), "param": None, "sequence_number": number}
        return sse.event("error", told)
    return sse.data(openai_error(error).body) + sse.DONE
