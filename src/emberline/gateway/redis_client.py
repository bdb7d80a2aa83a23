"""RedisClient: one connection to Redis that all requests share, with a short timeout for each command.

A slow Redis is worse than none, because every request would wait for it. So each command has a timeout (50 ms by
default), and after three timeouts in a row a circuit breaker rejects commands at once. A background task opens the
connection and reopens it after it is lost.
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

from emberline.core.breaker import CircuitBreaker
from emberline.core.clock import Clock
from emberline.core.engine_packages import install_hint
from emberline.core.errors import EmberlineError, InvalidRequest

try:
    import hiredis
except ImportError as e:
    message = "Redis cannot be used: the package hiredis is not installed"
    raise InvalidRequest(message, hint=install_hint("gateway")) from e

CONNECT_TIMEOUT_S = 5.0  # includes AUTH, SELECT and PING
MAX_RECONNECT_DELAY_S = 2.0
UNANSWERED_TIMEOUT_S = 2.0  # a connection that has answered nothing for so long is closed


class RedisUnavailable(EmberlineError):
    """Redis could not be reached or did not answer in time. Redis may or may not have run the command."""

    status = 503
    code = "store_failed"


class RedisErrorReply(EmberlineError):
    """Redis answered a command with an error."""


@dataclass(slots=True)
class RedisStats:
    calls: int = 0
    timeouts: int = 0  # commands without an answer in time
    rejected: int = 0  # commands not sent: no connection, or the circuit breaker is open
    connects: int = 0  # connections made


@dataclass(frozen=True, slots=True)
class RedisScript:
    """A Lua script, which Redis caches by its SHA-1 hash."""

    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest())


class _RedisProtocol(asyncio.Protocol):
    """One connection: sends commands and resolves their futures. Redis answers commands in order."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.pending: deque[asyncio.Future[Any]] = deque()
        self._reader = hiredis.Reader(replyError=RedisErrorReply, protocolError=RedisUnavailable)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport does not subclass it

    def send_command(self, command: tuple[str | bytes | int, ...]) -> asyncio.Future[Any]:
        if self._transport is None or self.closed.is_set():  # just lost: RedisClient has not noticed yet
            raise RedisUnavailable("Redis command failed: the connection was lost")
        answer = asyncio.get_running_loop().create_future()
        self.pending.append(answer)
        self._transport.write(hiredis.pack_command(command))  # type: ignore[arg-type]  # integers are accepted, too
        return answer

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not False:
                answer = self.pending.popleft()
                if answer.done():
                    continue  # cancelled: the caller's timeout is over
                if isinstance(reply, RedisErrorReply):
                    answer.set_exception(reply)
                else:
                    answer.set_result(reply)
        except (RedisUnavailable, IndexError):
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        for answer in self.pending:
            if not answer.done():
                answer.set_exception(RedisUnavailable("Redis command failed: the connection was lost"))
        self.pending.clear()
        self.closed.set()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class RedisClient:
    """A client for the URL redis[s]://[USER:PASSWORD@]HOST[:PORT][/DATABASE][?patience=MILLISECONDS].

    `patience` is the timeout of one command.
    """

    def __init__(self, url: str, clock: Clock, *, timeout_s: float = 0.05) -> None:
        try:
            self._parts = urlsplit(url)
            self._host, self._port = self._parts.hostname or "", self._parts.port or 6379
        except ValueError as e:
            raise InvalidRequest(f"the Redis URL is invalid: {e}", hint="use redis://HOST:PORT/DATABASE") from e
        if self._parts.scheme not in ("redis", "rediss") or not self._host:
            raise InvalidRequest(
                f"the Redis URL is invalid: scheme {self._parts.scheme[:20]!r}, host {self._host[:80]!r}",
                hint="use redis://HOST:PORT or rediss://HOST:PORT (TLS)",
            )
        self._clock, self.timeout_s = clock, _parse_timeout_s(self._parts.query) or timeout_s
        self._breaker = CircuitBreaker(first_pause_s=0.5)
        self._connection: _RedisProtocol | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()  # set by the first connection
        self.stats = RedisStats()

    async def start(self, timeout_s: float = 1.0) -> bool:
        """Start a task that keeps the client connected.

        Wait up to `timeout_s` seconds for the first connection and return whether there is one.
        """
        self._connecting = asyncio.create_task(self._keep_connected())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._connected.wait(), timeout_s)
        return self._connection is not None

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._connecting

    @property
    def is_healthy(self) -> bool:
        """Whether commands can be sent now: there is a connection, and the circuit breaker is closed."""
        return self._connection is not None and self._breaker.allows_request(self._clock.now())

    def send_command(self, *command: str | bytes | int) -> asyncio.Future[Any]:
        """Send a command and return the future of its reply. Raise RedisUnavailable if there is no connection."""
        if self._connection is None:
            self.stats.rejected += 1
            raise RedisUnavailable(f"Redis command was not sent: no connection to {self._host}:{self._port}")
        self.stats.calls += 1
        return self._connection.send_command(command)

    async def run_command(self, *command: str | bytes | int) -> Any:
        """Send a command and return Redis's reply.

        Raise RedisUnavailable after the timeout, or at once if there is no connection or the circuit breaker is open.
        Raise RedisErrorReply if Redis answers with an error.
        """
        now = self._clock.now()
        if not self._breaker.allows_request(now):
            self.stats.rejected += 1
            raise RedisUnavailable("Redis command was not sent: the circuit breaker is open after several timeouts")
        answer = self.send_command(*command)
        self._breaker.record_start(now)
        try:
            await asyncio.wait((answer,), timeout=self.timeout_s)
            if not answer.done():
                await asyncio.sleep(0)  # this process may be slow: then the answer has arrived but is not read yet
        except asyncio.CancelledError:
            self._breaker.record_cancellation()
            answer.cancel()
            raise
        if not answer.done():
            answer.cancel()
            self.stats.timeouts += 1
            self._breaker.record_failure(self._clock.now())
            raise RedisUnavailable(f"Redis command timed out after {self.timeout_s * 1000:.0f} ms")
        self._record_outcome(answer.exception())
        return answer.result()

    async def run_script(self, script: RedisScript, keys: list[str], arguments: list[str | int]) -> Any:
        """Run a script by its hash. If Redis does not have the script, send its text."""
        try:
            return await self.run_command("EVALSHA", script.sha, len(keys), *keys, *arguments)
        except RedisErrorReply as e:
            if not e.message.startswith("NOSCRIPT"):
                raise
        return await self.run_command("EVAL", script.text, len(keys), *keys, *arguments)

    def _record_outcome(self, error: BaseException | None) -> None:
        if isinstance(error, RedisUnavailable):
            self._breaker.record_failure(self._clock.now())
        else:
            self._breaker.record_success()

    async def _keep_connected(self) -> None:
        delay = 0.05
        while True:
            connection = _RedisProtocol()
            try:
                await self._connect(connection)
                self._connection, delay = connection, 0.05
                self.stats.connects += 1
                self._connected.set()
                await self._wait_until_lost(connection)
            except (
                OSError,
                ValueError,
                TimeoutError,
                RedisUnavailable,
                RedisErrorReply,
            ):  # ValueError: an invalid host name
                pass
            finally:
                self._connection = None
                connection.close()
            await asyncio.sleep(delay)
            delay = min(MAX_RECONNECT_DELAY_S, delay * 2)

    async def _connect(self, connection: _RedisProtocol) -> None:
        parts, tls = self._parts, self._parts.scheme == "rediss"
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().create_connection(
                lambda: connection, self._host, self._port, ssl=ssl.create_default_context() if tls else None
            )
            if parts.password:
                user = (unquote(parts.username),) if parts.username else ()
                await connection.send_command(("AUTH", *user, unquote(parts.password)))
            if (database := parts.path.strip("/")) and database != "0":
                await connection.send_command(("SELECT", database))
            await connection.send_command(("PING",))

    async def _wait_until_lost(self, connection: _RedisProtocol) -> None:
        """Return when the connection is lost, or when the oldest command has waited too long for its reply."""
        while not connection.closed.is_set():
            oldest = connection.pending[0] if connection.pending else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(connection.closed.wait(), UNANSWERED_TIMEOUT_S)
            if oldest is not None and connection.pending and connection.pending[0] is oldest:
                return


def _parse_timeout_s(query: str) -> float | None:
    parameters = parse_qs(query, keep_blank_values=True)
    milliseconds = parameters.pop("patience", ["1"])[0]
    if parameters or not milliseconds.isdecimal() or not 0 < int(milliseconds) <= 60_000:
        raise InvalidRequest(
            f"the Redis URL has an invalid query {query[:80]!r}",
            hint="only ?patience=MILLISECONDS is allowed, from 1 to 60000: the timeout of a command",
        )
    return int(milliseconds) / 1000 if query else None
