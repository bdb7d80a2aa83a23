"""Registrar: a worker's side of membership.

It registers the worker, sends heartbeats, registers again when the router does not know the worker or the registration
has changed, and announces the shutdown. A router that does not answer never disturbs the worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from emberline.cluster.registration import Heartbeat, RegistrationReply, WorkerRegistration
from emberline.net.json_errors import JSON_DECODE_ERRORS

log = logging.getLogger("emberline.worker")

REQUEST_TIMEOUT_S = 1.5  # so short that one missed reply does not make the worker lost
REGISTER_INTERVAL_S = 1.0
RECONNECT_INTERVAL_S = 0.25  # the router may be restarting
NOT_READY_INTERVAL_S = 0.1  # between heartbeats of a worker that is not ready yet

PeersByModel = dict[str, list[dict[str, Any]]]  # as in RegistrationReply


class Registrar:
    def __init__(
        self,
        router_url: str,
        cluster_key: str | None,
        registration: Callable[[], WorkerRegistration],
        heartbeat: Callable[[], Heartbeat],
        on_peers: Callable[[PeersByModel], None] = lambda peers: None,  # called with the peers of every reply
    ) -> None:
        self._router_url = router_url.rstrip("/")
        self._headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {cluster_key}"} if cluster_key else {}
        )
        self._registration = registration
        self._heartbeat = heartbeat
        self._on_peers = on_peers
        # The registration that the router has; None if its last reply was not 200.
        self._acknowledged: WorkerRegistration | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_leaving = False
        self._logged_problem: str | None = None

    def start(self) -> None:
        assert self._task is None
        self._task = asyncio.create_task(self._run())

    async def leave(self) -> None:
        """Announce the shutdown: the router sends no new requests.

        Open requests and heartbeats continue. A router that is restarted meanwhile gets no registration."""
        self._is_leaving = True
        registration = self._registration()
        message = {"name": registration.name, "incarnation": registration.incarnation}
        with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
            async with aiohttp.ClientSession() as session:
                await self._post(session, "/cluster/leave", msgspec.json.encode(message))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        async with aiohttp.ClientSession() as session:
            pause = 0.0
            while True:
                await asyncio.sleep(pause)
                try:
                    pause = await self._send_next(session)
                except (TimeoutError, aiohttp.ClientError, OSError, *JSON_DECODE_ERRORS) as e:
                    self._log_change(f"{type(e).__name__}: {e}")
                    # A timeout has waited already.
                    pause = NOT_READY_INTERVAL_S if isinstance(e, TimeoutError) else RECONNECT_INTERVAL_S

    async def _send_next(self, session: aiohttp.ClientSession) -> float:
        """Send the registration or a heartbeat, and return the seconds until the next message."""
        registration = self._registration()
        heartbeat = self._heartbeat() if registration == self._acknowledged or self._is_leaving else None
        path, message = ("/cluster/register", registration) if heartbeat is None else ("/cluster/beat", heartbeat)
        self._acknowledged = None
        status, body = await self._post(session, path, msgspec.json.encode(message))
        match status:
            case 200:
                reply = msgspec.json.decode(body, type=RegistrationReply)
                self._acknowledged = registration
                self._log_change("")
                self._on_peers(reply.peers)
                if heartbeat is None:
                    return 0.0  # the first heartbeat follows at once
                return reply.beat_seconds if heartbeat.ready else min(NOT_READY_INTERVAL_S, reply.beat_seconds)
            case 404 if heartbeat is not None:
                return REGISTER_INTERVAL_S if self._is_leaving else 0.0  # the router was restarted
            case 409:
                self._log_change(f"registration rejected, this worker gets no requests: {_error_message(body)}")
                return REGISTER_INTERVAL_S
        self._log_change(
            f"registration rejected, this worker gets no requests: status {status}, {_error_message(body)}"
        )
        return REGISTER_INTERVAL_S

    def _log_change(self, problem: str) -> None:
        """Log a problem, or its end, once."""
        if problem == self._logged_problem:
            return
        self._logged_problem = problem
        if problem:
            log.warning("Not registered: router=%s reason=%s", self._router_url, problem)
        else:
            log.info("registered: router=%s worker=%s", self._router_url, self._registration().name)

    async def _post(self, session: aiohttp.ClientSession, path: str, body: bytes) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with session.post(self._router_url + path, data=body, headers=self._headers, timeout=timeout) as reply:
            return reply.status, await reply.read()


def _error_message(body: bytes) -> str:
    """Return the error message of the router's reply, or the start of its body."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (*JSON_DECODE_ERRORS, KeyError, TypeError):
        return body[:200].decode(errors="replace")
