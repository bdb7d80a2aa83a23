"""Relay: passes a client's request to a worker, and the reply back.

If a worker fails before the first byte, another worker is tried. If it fails later and the stream is tracked, another
worker continues the stream after the client's output. A stream that cannot be continued ends with an error event of its
API protocol. Every request is answered exactly once."""

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

WHOLE = 1 << 20  # up to this size a reply is read completely before it is passed on, so that it can be retried
EXTENSION_S = 1.0  # rescheduling a timer for every token would cost too much CPU time
PAUSE = 0.1
MOST_WAITING = 1024  # requests that wait for a worker at the same time
HANDOVER_S = 2.0  # for a draining worker to offer blocks that it has computed
LAST_WORDS = 5.0  # for sending the error event to a client that may have stopped reading
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
        """Answer the exchange; raise an EmberlineError for the caller to reply with, or to close the
        connection for."""
        routed = self._trip(x, self._dispatch.named(ask), body)
        try:
            async with asyncio.timeout(None) as routed.limit:
                self._extend(routed, anew=True)
                await self._travel(routed)
        except TimeoutError:  # no failure of the worker: the client may read slowly
            await self._broke(routed, self._exceeded(routed))
        except asyncio.CancelledError:
            if routed.started and not x.has_left:  # the router shuts down
                error = ShuttingDown()
                x.outcome = error.status
                with contextlib.suppress(EmberlineError):
                    await self._broke(routed, error)
            raise
        finally:
            await routed.close()
            routed.end_trace()

    def _trip(self, x: Exchange, ask: Ask, body: bytes) -> Trip:
        decoded = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in x.headers.items())
        headers = {name: value for name, value in decoded if name not in HOP and not name.startswith(PRIVATE)}
        if self._config.kv_events:
            headers[CHAIN] = "1"
        if tenant := tenant_of(x):
            headers[TENANT] = f"{'checked' if self._config.api_keys else 'presented'} {tenant}"
        call = Call(x.method, x.path + (f"?{x.query}" if x.query else ""), headers, body)
        config, deadline = self._config, self._now() + self._config.request_timeout
        identity = (secrets.randbits(64), int(WallClock.now()), config.cluster_key)
        is_known_suspect = self._suspects.knows(ask.digest, self._now())
        limits, is_generation = (config.attempts, config.migrations), x.path in GENERATING
        return Trip(x, ask, call, *identity, deadline, *limits, is_generation, is_known_suspect, config.foreign_key)

    def _extend(self, trip: Trip, *, anew: bool = False) -> None:
        """Give the next part of the reply `token_timeout` from now, within the request's deadline."""
        now = self._now()
        if trip.limit is None or (now < trip.extended + EXTENSION_S and not anew):
            return
        trip.extended, config = now, self._config
        deadline = min(trip.deadline, now + config.token_timeout if trip.shows_tokens else math.inf)
        trip.limit.reschedule(None if math.isinf(deadline) else deadline)

    def _exceeded(self, trip: Trip) -> DeadlineExceeded:
        config = self._config
        if self._now() < trip.deadline:
            return DeadlineExceeded(
                f"no token arrived within {config.token_timeout:.0f} s", hint="raise --token-timeout"
            )
        return DeadlineExceeded(
            f"the request was not complete within {config.request_timeout:.0f} s", hint="raise --request-timeout"
        )

    async def _travel(self, trip: Trip) -> None:
        while (decision := self._next(trip) or await self._wait(trip)) is not None:
            trip.x.note["worker"] = decision.worker.name
            failure = await self._attempt(trip, decision)
            if failure is None:
                return
            log.info("attempt failed: path=%s worker=%s reason=%s", trip.x.path, decision.worker.name, failure.reason)
            trip.fell_back(failure, decision, self._now())
        await self._give_up(trip)

    def _next(self, trip: Trip) -> Decision | None:
        """Return the next worker to try; None if none is available or the limit of attempts is reached.

        Raises the client's error if no worker can take the first attempt."""
        try:
            if trip.goes_on:
                excluded = trip.tried
                if trip.author is not None:
                    excluded = excluded | self._dispatch.unable(trip.ask.model, trip.author)
                decision = self._dispatch.choose(trip.ask, excluded, urgent=trip.started, suspect=trip.suspect)
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
        drained, trip.origin = trip.origin, None
        return self._dispatch.again(drained) if drained is not None else None

    async def _wait(self, trip: Trip) -> Decision | None:
        """Wait for a worker, at most `migration_wait` seconds, and return it.

        Return None if the request may not wait or no worker becomes available. Workers that were tried before may be
        tried again."""
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
        with self._dispatch.opened(trip.ask, decision) as attempt:
            trip.trace(attempt, "resume" if trip.started else "plain")
            attempt.movable = trip.may_move
            try:
                had_started = trip.started
                failure = await self._split(trip, attempt)
                if failure is not None or trip.started != had_started:
                    return failure
                url, call = self._dispatch.url(decision.worker), await trip.call(decision.worker, self._now())
                if call is None:
                    attempt.outcome = "refused"
                    return Setback("unable")
                async with attempt.asked(self._upstream, url, call) as reply:
                    return await self._answer(trip, reply, attempt, resumed=call.target == RESUME)
            except (Unreached, Broken, Garbled, EngineUnavailable) as e:
                log.debug("attempt failed: worker=%s error=%s", decision.worker.name, e)
                if attempt.lost in ("drained", "prefill"):  # the worker itself is healthy
                    attempt.outcome = "moved" if attempt.lost == "drained" else "refused"
                    return Setback(attempt.lost)
                attempt.outcome = "failed"
                if isinstance(e, Unreached | EngineUnavailable):
                    return Setback("unreached")
                return Setback(attempt.lost or ("garbled" if isinstance(e, Garbled) else "broken"), crash=True)

    async def _split(self, trip: Trip, leg: Leg) -> Setback | None:
        """Have another worker compute the prompt if that is worthwhile, and wait for its ticket.

        If that worker rejects the request itself, its reply is passed to the client."""
        worker = leg.decision.worker
        dialect = trip.speak(worker)
        is_required = worker.role == "decode" and not dialect.computes
        if not trip.generates or not (trip.may_split or is_required) or (trip.started and worker.dialect != "native"):
            return None
        trip.may_split = False
        timeout_s = self._config.ticket_timeout
        decision = None
        if trip.origin is not None:
            decision = self._dispatch.handover(trip.ask, trip.said_tokens, leg.decision, trip.origin.worker)
        if decision is not None:
            timeout_s = HANDOVER_S
        else:
            decision = self._dispatch.split(trip.ask, leg.decision, must=is_required)
        if decision is None:
            return Setback("no prefill") if is_required else None
        await trip.close()
        missing_tokens = leg.decision.load.prefill
        worker.relieved(leg.key)
        deadline = min(trip.deadline, self._now() + self._config.token_timeout)
        peer = self._dispatch.peer(decision.worker, trip.ask.model)
        prepared = await trip.written(dialect.prefill, peer, deadline - self._now())
        prefill = trip.prefill = Prefill(
            self._dispatch, self._upstream, trip.ask, decision, dialect, prepared, deadline
        )
        trip.trace(prefill.leg, "prefill")
        if is_required:
            prefill.needed_by(leg)
        refusal = await prefill.begun(decision.wait + timeout_s)
        if refusal is not None and not trip.started:
            leg.outcome = "refused"
            await trip.x.reply(refusal.status, refusal.body, *_head(refusal.headers))
        elif prefill.ticket is None:
            worker.owes(leg.key, missing_tokens)
        return None

    async def _answer(self, trip: Trip, reply: Reply, leg: Leg, *, resumed: bool) -> Setback | None:
        cannot_resume = resumed and reply.status in (401, 403, 404)  # no resume endpoint there, or another cluster key
        if cannot_resume or reply.status in (429, 500, 502, 503) or (trip.started and reply.status != 200):
            # The request itself may cause a 500, which therefore must not open the worker's circuit breaker.
            leg.outcome = "failed" if reply.status in (502, 503) else "refused"
            body = await reply.whole()
            if cannot_resume and trip.prefill is not None:
                trip.prefill.failed = "unable"
            reason = "unable" if cannot_resume and not trip.started else f"status {reply.status}"
            return Setback(reason, reply.status == 500, reply.status, dict(reply.headers), body)
        content_length = reply.headers.get("content-length", "")
        if content_length.isdigit() and int(content_length) <= WHOLE:
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
            raise Garbled("the worker continued a stream with a reply that is not a stream")
        self._dispatch.came(leg, 0)
        leg.usage = Usage.read(body[-2048:])
        if CHAIN in reply.headers:
            self._dispatch.told(leg, read_link(reply.headers[CHAIN]))
        await trip.x.reply(reply.status, body, *_head(reply.headers, trip, leg))

    async def _pieces(self, trip: Trip, reply: Reply, leg: Leg) -> None:
        if trip.started:
            raise Garbled("the worker continued a stream with a reply that is not an event stream")
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
        x, tracker = trip.x, trip.track
        while data := await reply.read():
            count_before = tracker.count
            if not (output := tracker.push(data)):
                continue
            self._extend(trip)
            if leg.first is None:
                await self._first(trip, reply, leg)
            self._dispatch.came(leg, tracker.count - count_before)
            await x.send(output)
        if tracker.movable:
            raise Broken("the stream ended before its final event")
        leg.usage = Usage.read(tracker.first[:2048], tracker.last[-2048:])
        if not trip.started:  # the stream contained no complete event
            await self._begin(trip, reply, leg)
        await x.send(tracker.rest(), last=True)

    async def _first(self, trip: Trip, reply: Reply, leg: Leg) -> None:
        """Start the reply if necessary, and record that this worker now serves the request."""
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
        """Send status and headers to the client.

        `keep_length`: the body is passed on unchanged, with its content-length."""
        content_type, headers = _head(reply.headers, trip, leg)
        # A compressed body is relayed uncompressed, so its content-length does not apply.
        if sized and "content-length" in reply.headers and "content-encoding" not in reply.headers:
            headers["content-length"] = reply.headers["content-length"]
        await trip.x.start(reply.status, content_type, headers)

    async def _give_up(self, trip: Trip) -> None:
        failure, x = trip.setback, trip.x
        if failure is None:
            assert trip.nobody is not None
            raise trip.nobody
        log.info("request abandoned: path=%s attempts=%d reason=%s", x.path, trip.legs, failure.reason)
        if trip.suspect and trip.ask.digest:
            self._suspects.add(trip.ask.digest, self._now())
        if trip.started:
            if trip.moving and not trip.track.ended:
                self._metrics.migrations[trip.moving, "given up"] += 1
            await self._broke(trip, _harm(trip) if trip.guilty else self._lost(trip))
        elif trip.guilty:
            raise _harm(trip)
        elif failure.status:
            await x.reply(failure.status, failure.body, *_head(failure.headers or {}))
        else:
            raise _nobody(trip, failure)

    def _lost(self, trip: Trip) -> WorkerLost:
        difference = self._dispatch.difference(trip.ask.model, trip.author) if trip.author is not None else ""
        if not difference:
            return WorkerLost(trip.lost)
        message = f"{trip.lost}; the ready workers compute {trip.ask.model!r} differently: {difference}"
        return WorkerLost(message, hint="retry the request; start all workers of a model with the same settings")

    async def _broke(self, trip: Trip, error: EmberlineError) -> None:
        """End a reply with an error event if the output ends between two events of a stream.

        Otherwise raise the error, so that the caller replies with it or closes the connection and the client sees that
        the reply is incomplete."""
        x, tracker = trip.x, trip.track
        if not trip.started or not tracker.started or tracker.torn:
            raise error
        if not tracker.ended:
            self._metrics.broken += 1
            x.note["error"] = error.code
        log.warning("stream ended with an error: path=%s error=%s", x.path, error)
        try:
            async with asyncio.timeout(LAST_WORDS):
                await x.send(b"" if tracker.ended else _last_words(x.path, error, tracker.count), last=True)
        except TimeoutError:
            raise error from None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _head(headers: Mapping[str, str], trip: Trip | None = None, leg: Leg | None = None) -> tuple[str, dict[str, str]]:
    """Return the content-type and the other headers for the client.

    They are the worker's, without hop-by-hop headers and content-encoding, with the names of the workers."""
    kept = {name.lower(): value for name, value in headers.items() if name.lower() not in HOP}
    kept.pop("content-encoding", None)
    if leg is not None:
        kept[f"{PRIVATE}worker"] = leg.decision.worker.name
    if trip is not None and trip.prefill is not None and trip.prefill.ticket is not None:
        kept[f"{PRIVATE}prefill"] = trip.prefill.worker.name
    return kept.pop("content-type", "application/octet-stream"), kept


def _nobody(trip: Trip, setback: Setback) -> EngineUnavailable:
    if trip.suspect:
        message = f"{trip.crashes} workers failed while serving this request, and no other worker is free to risk it"
        return EngineUnavailable(message, hint=AGAIN)
    attempts = "1 attempt" if trip.legs == 1 else f"{trip.legs} attempts"
    message = f"no worker answered in {attempts}; the last attempt failed with {setback.reason!r}"
    return EngineUnavailable(message, hint="retry in a few seconds")


def _harm(trip: Trip) -> WorkersBroke:
    workers = "another worker" if trip.accused else f"{trip.crashes} workers"
    hint = "the request may be the cause: see the workers' logs, and do not send it again unchanged"
    return WorkersBroke(f"{workers} failed while serving this request", hint=hint)


def _last_words(path: str, error: EmberlineError, number: int) -> bytes:
    """Return the error event of the path's API protocol, and the protocol's final event."""
    if path == "/v1/messages":
        return sse.event("error", anthropic_error(error).body)
    if path == "/v1/responses":
        event = {"type": "error", "code": error.code, "message": str(error), "param": None, "sequence_number": number}
        return sse.event("error", event)
    return sse.data(openai_error(error).body) + sse.DONE
