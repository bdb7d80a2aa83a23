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

from emberline.cluster.card import Beat, Card, Welcome
from emberline.net.notjson import NOT_JSON

log = logging.getLogger("emberline.worker")

PATIENCE = 1.5  # so short that one missed reply does not make the worker lost
PAUSE = 1.0
AWAY_PAUSE = 0.25  # the router may be restarting
SOON = 0.1  # between heartbeats of a worker that is not ready yet

Peers = dict[str, list[dict[str, Any]]]  # as in RegistrationReply


class Registrar:
    def __init__(
        self,
        router: str,
        key: str | None,
        card: Callable[[], Card],
        beat: Callable[[], Beat],
        meet: Callable[[Peers], None] = lambda peers: None,  # called with the peers of every reply
    ) -> None:
        self._router = router.rstrip("/")
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._card = card
        self._beat = beat
        self._meet = meet
        self._shown: Card | None = None  # the registration that the router has; None if its last reply was not 200
        self._task: asyncio.Task[None] | None = None
        self._leaving = False
        self._complaint: str | None = None

    def start(self) -> None:
        assert self._task is None
        self._task = asyncio.create_task(self._run())

    async def leave(self) -> None:
        """Announce the shutdown: the router sends no new requests.

        Open requests and heartbeats continue. A router that is restarted meanwhile gets no registration."""
        self._leaving = True
        registration = self._card()
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
                    pause = await self._turn(session)
                except (TimeoutError, aiohttp.ClientError, OSError, *NOT_JSON) as e:
                    self._say(f"{type(e).__name__}: {e}")
                    pause = SOON if isinstance(e, TimeoutError) else AWAY_PAUSE  # a timeout has waited already

    async def _turn(self, session: aiohttp.ClientSession) -> float:
        """Send the registration or a heartbeat, and return the seconds until the next message."""
        registration = self._card()
        heartbeat = self._beat() if registration == self._shown or self._leaving else None
        path, message = ("/cluster/register", registration) if heartbeat is None else ("/cluster/beat", heartbeat)
        self._shown = None
        status, body = await self._post(session, path, msgspec.json.encode(message))
        match status:
            case 200:
                reply = msgspec.json.decode(body, type=Welcome)
                self._shown = registration
                self._say("")
                self._meet(reply.peers)
                if heartbeat is None:
                    return 0.0  # the first heartbeat follows at once
                return reply.beat_seconds if heartbeat.ready else min(SOON, reply.beat_seconds)
            case 404 if heartbeat is not None:
                return PAUSE if self._leaving else 0.0  # the router was restarted
            case 409:
                self._say(f"registration rejected, this worker gets no requests: {_message(body)}")
                return PAUSE
        self._say(f"registration rejected, this worker gets no requests: status {status}, {_message(body)}")
        return PAUSE

    def _say(self, complaint: str) -> None:
        """Log a problem, or its end, once."""
        if complaint == self._complaint:
            return
        self._complaint = complaint
        if complaint:
            log.warning("not registered: router=%s reason=%s", self._router, complaint)
        else:
            log.info("registered: router=%s worker=%s", self._router, self._card().name)

    async def _post(self, session: aiohttp.ClientSession, path: str, body: bytes) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=PATIENCE)
        async with session.post(self._router + path, data=body, headers=self._headers, timeout=timeout) as reply:
            return reply.status, await reply.read()


def _message(body: bytes) -> str:
    """Return the error message of the router's reply, or the start of its body."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (*NOT_JSON, KeyError, TypeError):
        return body[:200].decode(errors="replace")
