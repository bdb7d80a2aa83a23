"""RedisLink: one connection to Redis that all calls share, in order, and that nobody waits for longer than agreed.

A Redis that is slow is worse than one that is gone: every call would pay its delay. So a call has a budget (50 ms),
after three in a row that ran out of it a breaker refuses the next ones at once, and connecting is no call's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ssl
from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

from emberline.core.breaker import Breaker
from emberline.core.clock import Clock
from emberline.core.errors import EmberlineError, InvalidRequest

try:
    import hiredis
except ImportError as e:
    raise InvalidRequest("Redis needs the package hiredis", hint="pip install 'emberline[gateway]'") from e

CONNECTING = 5.0  # seconds for a connection and its greeting
LONGEST_PAUSE = 2.0  # seconds between tries to connect
DEAF = 2.0  # seconds without an answer after which the connection is given up


class LinkDown(EmberlineError):
    """Redis was not asked, or did not answer in time: whether it did what it was asked to is not known."""

    status = 503
    code = "store_failed"


class RedisSaid(EmberlineError):
    """It answered with an error."""


@dataclass(slots=True)
class LinkStats:
    calls: int = 0
    slow: int = 0  # the budget ran out
    refused: int = 0  # not asked: no connection, or the breaker is open
    connects: int = 0


@dataclass(frozen=True, slots=True)
class Script:
    """Lua that Redis keeps by its hash."""

    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest())


class _Wire(asyncio.Protocol):
    """Bytes to answers. Answers come in the order of the questions."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.asked: deque[asyncio.Future[Any]] = deque()
        self._reader = hiredis.Reader(replyError=RedisSaid, protocolError=LinkDown)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one, but does not say so

    def ask(self, words: tuple[str | bytes | int, ...]) -> asyncio.Future[Any]:
        if self._transport is None or self.closed.is_set():  # in the moment before its keeper knows
            raise LinkDown("the connection to Redis was lost")
        answer = asyncio.get_running_loop().create_future()
        self.asked.append(answer)
        self._transport.write(hiredis.pack_command(words))  # type: ignore[arg-type]  # it packs numbers as well
        return answer

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (said := self._reader.gets()) is not False:
                answer = self.asked.popleft()
                if answer.done():
                    continue  # nobody waits for it any more
                if isinstance(said, RedisSaid):
                    answer.set_exception(said)
                else:
                    answer.set_result(said)
        except (LinkDown, IndexError):
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        for answer in self.asked:
            if not answer.done():
                answer.set_exception(LinkDown("the connection to Redis was lost"))
        self.asked.clear()
        self.closed.set()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class RedisLink:
    """At redis[s]://[USER:PASSWORD@]HOST[:PORT][/DATABASE][?patience=MILLISECONDS]."""

    def __init__(self, url: str, clock: Clock, *, patience: float = 0.05) -> None:
        try:
            self._parts = urlsplit(url)
            self._host, self._port = self._parts.hostname or "", self._parts.port or 6379
        except ValueError as e:
            raise InvalidRequest(f"the address of Redis is none: {e}") from e
        if self._parts.scheme not in ("redis", "rediss") or not self._host:
            raise InvalidRequest("the address of Redis must be redis:// or rediss:// (TLS) and name a host")
        self._clock, self.patience = clock, _patience(self._parts.query) or patience
        self._breaker = Breaker(pause=0.5)
        self._wire: _Wire | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.stats = LinkStats()

    async def start(self, seconds: float = 1.0) -> bool:
        """Keeps a connection from now on; waits a moment for the first. False: not there yet, and no harm done."""
        self._keeper = asyncio.create_task(self._keep())
        until = self._clock.now() + seconds
        while self._wire is None and self._clock.now() < until:
            await asyncio.sleep(0.01)
        return self._wire is not None

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper

    @property
    def healthy(self) -> bool:
        return self._wire is not None and self._breaker.allows(self._clock.now())

    def post(self, *words: str | bytes | int) -> asyncio.Future[Any]:
        """Asks, without waiting for the answer."""
        if self._wire is None:
            self.stats.refused += 1
            raise LinkDown("there is no connection to Redis")
        self.stats.calls += 1
        return self._wire.ask(words)

    async def call(self, *words: str | bytes | int) -> Any:
        now = self._clock.now()
        if not self._breaker.allows(now):
            self.stats.refused += 1
            raise LinkDown("Redis was too slow a moment ago, and is left alone")
        answer = self.post(*words)
        self._breaker.began(now)
        try:
            await asyncio.wait((answer,), timeout=self.patience)
            if not answer.done():
                await asyncio.sleep(0)  # this process may be the slow one: the answer is there, but not read
        except asyncio.CancelledError:
            self._breaker.neither()
            answer.cancel()
            raise
        if not answer.done():
            answer.cancel()
            self.stats.slow += 1
            self._breaker.failed(self._clock.now())
            raise LinkDown(f"Redis did not answer within {self.patience * 1000:.0f} ms")
        self._tell(answer.exception())
        return answer.result()

    async def run(self, script: Script, keys: list[str], values: list[str | int]) -> Any:
        try:
            return await self.call("EVALSHA", script.sha, len(keys), *keys, *values)
        except RedisSaid as e:
            if not e.message.startswith("NOSCRIPT"):
                raise
        return await self.call("EVAL", script.text, len(keys), *keys, *values)

    def _tell(self, error: BaseException | None) -> None:
        if isinstance(error, LinkDown):
            self._breaker.failed(self._clock.now())
        else:
            self._breaker.succeeded()

    async def _keep(self) -> None:
        pause = 0.05
        while True:
            wire = _Wire()
            try:
                await self._connect(wire)
                self._wire, pause = wire, 0.05
                self.stats.connects += 1
                await self._listen(wire)
            except (OSError, ValueError, TimeoutError, LinkDown, RedisSaid):  # ValueError: of a name that is none
                pass
            finally:
                self._wire = None
                wire.close()
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, pause * 2)

    async def _connect(self, wire: _Wire) -> None:
        parts, tls = self._parts, self._parts.scheme == "rediss"
        async with asyncio.timeout(CONNECTING):
            await asyncio.get_running_loop().create_connection(
                lambda: wire, self._host, self._port, ssl=ssl.create_default_context() if tls else None
            )
            if parts.password:
                user = (unquote(parts.username),) if parts.username else ()
                await wire.ask(("AUTH", *user, unquote(parts.password)))
            if (base := parts.path.strip("/")) and base != "0":
                await wire.ask(("SELECT", base))
            await wire.ask(("PING",))

    async def _listen(self, wire: _Wire) -> None:
        """Until the connection is lost, or nothing has been answered for too long."""
        while not wire.closed.is_set():
            oldest = wire.asked[0] if wire.asked else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wire.closed.wait(), DEAF)
            if oldest is not None and wire.asked and wire.asked[0] is oldest:
                return


def _patience(query: str) -> float | None:
    said = parse_qs(query, keep_blank_values=True)
    milliseconds = said.pop("patience", ["1"])[0]
    if said or not milliseconds.isdecimal() or not 0 < int(milliseconds) <= 60_000:
        raise InvalidRequest("the address of Redis may have ?patience=MILLISECONDS, from 1 to 60000, and nothing else")
    return int(milliseconds) / 1000 if query else None
