"""Registrar: a worker's side of membership. It registers, beats, registers again with a router that has forgotten it or
when its card has changed, and says goodbye. A router that is away does not disturb the worker."""

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

PATIENCE = 1.5  # seconds for an answer: one that is missed must not make us lost
PAUSE = 1.0  # seconds between attempts to register
AWAY_PAUSE = 0.25  # seconds between attempts to reach a router that is not there: it may be restarting
SOON = 0.1  # seconds until a worker that is not ready says how it goes

Peers = dict[str, list[dict[str, Any]]]  # as Welcome has them


class Registrar:
    def __init__(
        self,
        router: str,
        key: str | None,
        card: Callable[[], Card],
        beat: Callable[[], Beat],
        meet: Callable[[Peers], None] = lambda peers: None,  # told with every answer of the router's
    ) -> None:
        self._router = router.rstrip("/")
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._card = card
        self._beat = beat
        self._meet = meet
        self._shown: Card | None = None  # the card that the router has, if it answered the last time
        self._task: asyncio.Task[None] | None = None
        self._leaving = False
        self._complaint: str | None = None

    def start(self) -> None:
        assert self._task is None
        self._task = asyncio.create_task(self._run())

    async def leave(self) -> None:
        """Nothing new comes after this; what is open goes on, and the beats with it. To a router that is started anew
        meanwhile we do not say that we are there."""
        self._leaving = True
        card = self._card()
        leaving = {"name": card.name, "incarnation": card.incarnation}
        with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
            async with aiohttp.ClientSession() as session:
                await self._post(session, "/cluster/leave", msgspec.json.encode(leaving))

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
                    pause = SOON if isinstance(e, TimeoutError) else AWAY_PAUSE  # that long it has waited already

    async def _turn(self, session: aiohttp.ClientSession) -> float:
        """A card or a beat. Seconds until the next."""
        card = self._card()
        beat = self._beat() if card == self._shown or self._leaving else None
        path, told = ("/cluster/register", card) if beat is None else ("/cluster/beat", beat)
        self._shown = None
        status, body = await self._post(session, path, msgspec.json.encode(told))
        match status:
            case 200:
                welcome = msgspec.json.decode(body, type=Welcome)
                self._shown = card
                self._say("")
                self._meet(welcome.peers)
                if beat is None:
                    return 0.0  # and at once how it goes
                return welcome.beat_seconds if beat.ready else min(SOON, welcome.beat_seconds)
            case 404 if beat is not None:
                return PAUSE if self._leaving else 0.0  # the router was started again
            case 409:
                self._say(f"this worker is not taken, and gets no requests: {_message(body)}")
                return PAUSE
        self._say(f"this worker is not taken, and gets no requests: {status} {_message(body)}")
        return PAUSE

    def _say(self, complaint: str) -> None:
        """Once for each change."""
        if complaint == self._complaint:
            return
        self._complaint = complaint
        if complaint:
            log.warning("router %s: %s", self._router, complaint)
        else:
            log.info("registered with %s as %s", self._router, self._card().name)

    async def _post(self, session: aiohttp.ClientSession, path: str, body: bytes) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=PATIENCE)
        async with session.post(self._router + path, data=body, headers=self._headers, timeout=timeout) as reply:
            return reply.status, await reply.read()


def _message(body: bytes) -> str:
    """The router's own words, or what came instead."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (*NOT_JSON, KeyError, TypeError):
        return body[:200].decode(errors="replace")
