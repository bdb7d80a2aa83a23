"""Registrar: a worker's side of membership. It registers, beats, registers again with a router that has forgotten it,
and says goodbye. A router that is away does not disturb the worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import aiohttp
import msgspec

from emberline.cluster.card import Beat, Card, Welcome

log = logging.getLogger("emberline.worker")

PATIENCE = 3.0  # seconds for an answer
PAUSE = 1.0  # seconds between attempts to register


class Registrar:
    def __init__(self, router: str, key: str | None, card: Card, beat: Callable[[], Beat]) -> None:
        self._router = router.rstrip("/")
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._card = card
        self._beat = beat
        self._task: asyncio.Task[None] | None = None
        self._complaint = ""

    def start(self) -> None:
        assert self._task is None
        self._task = asyncio.create_task(self._run())

    async def leave(self) -> None:
        """Nothing new comes after this; what is open goes on, and the beats with it."""
        leaving = {"name": self._card.name, "incarnation": self._card.incarnation}
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
            registered = False
            pause = PAUSE
            while True:
                try:
                    if not registered:
                        status, body = await self._post(session, "/cluster/register", msgspec.json.encode(self._card))
                        if registered := status == 200:
                            pause = msgspec.json.decode(body, type=Welcome).beat_seconds
                            self._say("")
                    else:
                        status, body = await self._post(session, "/cluster/beat", msgspec.json.encode(self._beat()))
                        registered = status != 404
                    if status == 409:
                        log.error("%s: a newer worker has this name; the router sends nothing here", self._card.name)
                        return
                    if status not in (200, 404):
                        self._say(f"{status} {body[:200].decode(errors='replace')}")
                    if status == 404 and not registered:
                        continue  # at once: the router was started again
                except (TimeoutError, aiohttp.ClientError, OSError, msgspec.MsgspecError) as e:
                    self._say(f"{type(e).__name__}: {e}")
                await asyncio.sleep(pause)

    def _say(self, complaint: str) -> None:
        """Once for each change."""
        if complaint == self._complaint:
            return
        self._complaint = complaint
        if complaint:
            log.warning("router %s: %s", self._router, complaint)
        else:
            log.info("registered with %s as %s", self._router, self._card.name)

    async def _post(self, session: aiohttp.ClientSession, path: str, body: bytes) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=PATIENCE)
        async with session.post(self._router + path, data=body, headers=self._headers, timeout=timeout) as reply:
            return reply.status, await reply.read()
