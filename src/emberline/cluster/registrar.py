"""Registrar: registers a worker with its router and sends the worker's heartbeats.

It registers the worker again when the router has forgotten it or the registration has changed, and announces the
worker's shutdown. If the router does not answer, the worker keeps serving its requests and the registrar tries
again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from typing import Any

import msgspec

from emberline.cluster.registration import Heartbeat, RegistrationReply, RouterReport, WorkerRegistration
from emberline.net.connection_pool import FetchedReply, HTTPConnectionPool
from emberline.net.errors import UpstreamFailed
from emberline.net.json_errors import JSON_DECODE_ERRORS

log = logging.getLogger("emberline.worker")

REQUEST_TIMEOUT_S = 1.5  # so short that one missed reply does not make the worker lost
REGISTER_INTERVAL_S = 1.0
RECONNECT_INTERVAL_S = 0.25  # the router may be restarting
IDLE_TIMEOUT_S = 4.0  # seconds that a connection is kept between two heartbeats; the router closes idle ones after 5 s
NOT_READY_INTERVAL_S = 0.1  # seconds between heartbeats of a worker that is not ready yet

PeersByModel = dict[str, list[dict[str, Any]]]  # the engines to pair with, as in RegistrationReply


class Registrar:
    def __init__(
        self,
        router_url: str,
        cluster_key: str | None,
        registration: Callable[[], WorkerRegistration],
        heartbeat: Callable[[], Heartbeat],
        on_peers: Callable[[PeersByModel], None] = lambda peers: None,  # called with the peers of every reply
        tls: ssl.SSLContext | None = None,  # context for an https router; None: one with the system's CAs
        on_report: Callable[[RouterReport], None] = lambda report: None,  # called with the report of every reply
    ) -> None:
        self.router_url = router_url.rstrip("/")
        self.is_registered = False  # the router accepted the last message
        self.failure_count = 0  # messages that the router did not answer or did not accept
        self._headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {cluster_key}"} if cluster_key else {}
        )
        self._registration = registration
        self._heartbeat = heartbeat
        self._on_peers = on_peers
        self._tls = tls
        self._on_report = on_report
        # The registration that the router has; None if its last reply was not 200.
        self._acknowledged: WorkerRegistration | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_leaving = False
        self._logged_problem: str | None = None

    def start(self) -> None:
        assert self._task is None
        self._task = asyncio.create_task(self._send_messages_until_stopped())

    async def announce_shutdown(self) -> None:
        """Announce the worker's shutdown, so that the router sends it no new requests.

        Open requests and heartbeats continue. If the router restarts after this call, the worker does not register
        again."""
        self._is_leaving = True
        registration = self._registration()
        message = {"name": registration.name, "incarnation": registration.incarnation}
        with contextlib.closing(self._new_pool()) as pool, contextlib.suppress(UpstreamFailed, TimeoutError):
            await self._post(pool, "/cluster/leave", msgspec.json.encode(message))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _send_messages_until_stopped(self) -> None:
        with contextlib.closing(self._new_pool()) as pool:
            pause = 0.0
            while True:
                await asyncio.sleep(pause)
                try:
                    pause = await self._send_next_message(pool)
                except (TimeoutError, UpstreamFailed, *JSON_DECODE_ERRORS) as e:
                    self._record_problem(f"{type(e).__name__}: {e}")
                    # A timeout has waited already.
                    pause = NOT_READY_INTERVAL_S if isinstance(e, TimeoutError) else RECONNECT_INTERVAL_S

    async def _send_next_message(self, pool: HTTPConnectionPool) -> float:
        """Send the registration or a heartbeat, and return the seconds until the next message."""
        registration = self._registration()
        heartbeat = self._heartbeat() if registration == self._acknowledged or self._is_leaving else None
        path, message = ("/cluster/register", registration) if heartbeat is None else ("/cluster/beat", heartbeat)
        self._acknowledged = None
        status, _, body = await self._post(pool, path, msgspec.json.encode(message))
        match status:
            case 200:
                reply = msgspec.json.decode(body, type=RegistrationReply)
                self._acknowledged = registration
                self._record_problem("")
                self._on_peers(reply.peers)
                if reply.report is not None:
                    self._on_report(reply.report)
                if heartbeat is None:
                    return 0.0  # the first heartbeat follows at once
                return reply.beat_seconds if heartbeat.ready else min(NOT_READY_INTERVAL_S, reply.beat_seconds)
            case 404 if heartbeat is not None:
                return REGISTER_INTERVAL_S if self._is_leaving else 0.0  # the router was restarted
            case 409:
                self._record_problem(
                    f"registration rejected, this worker gets no requests: {_parse_error_message(body)}"
                )
                return REGISTER_INTERVAL_S
        self._record_problem(
            f"registration rejected, this worker gets no requests: status {status}, {_parse_error_message(body)}"
        )
        return REGISTER_INTERVAL_S

    def _record_problem(self, problem: str) -> None:
        """Record the outcome of the last message. `problem`: why it failed, or "" if the router accepted it.

        A problem is logged when it begins and when it ends, but not for every message in between."""
        self.is_registered = not problem
        self.failure_count += bool(problem)
        if problem == self._logged_problem:
            return
        self._logged_problem = problem
        if problem:
            log.warning("Worker is not registered: router=%s reason=%s", self.router_url, problem)
        else:
            log.info("Worker is registered: router=%s worker=%s", self.router_url, self._registration().name)

    async def _post(self, pool: HTTPConnectionPool, path: str, body: bytes) -> FetchedReply:
        """Send a request to the router. Raises UpstreamFailed, or TimeoutError after REQUEST_TIMEOUT_S."""
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            return await pool.fetch("POST", self.router_url + path, self._headers, body)

    def _new_pool(self) -> HTTPConnectionPool:
        return HTTPConnectionPool(
            connect_timeout_s=2 * REQUEST_TIMEOUT_S,  # never passes: the whole request has REQUEST_TIMEOUT_S
            idle_timeout_s=IDLE_TIMEOUT_S,
            retries_stale=True,
            tls=self._tls,
        )


def _parse_error_message(body: bytes) -> str:
    """Return the error message in the JSON body of the router's reply. If the body has none, return its start."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (*JSON_DECODE_ERRORS, KeyError, TypeError):
        return body[:200].decode(errors="replace")
