"""Sponsor: registers servers of other kinds, which do not know us, and beats for them as long as they answer."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from emberline.cluster.card import Beat, Card, Dialect, ModelCard
from emberline.core.errors import EmberlineError
from emberline.core.foreign_config import Foreign
from emberline.net.notjson import NOT_JSON
from emberline.router.call import Call
from emberline.router.upstream import Broken, Unreached, Upstream
from emberline.server.routing.dispatch import Dispatch

log = logging.getLogger("emberline.router")

PATIENCE = 2.0  # seconds for an answer
RUNNING = 256  # requests at once: they do not tell


class _Model(msgspec.Struct):
    id: str
    max_model_len: int = 0


class _Models(msgspec.Struct):
    data: list[_Model]


class Sponsor:
    def __init__(
        self,
        dispatch: Dispatch,
        upstream: Upstream,
        servers: Sequence[Foreign],
        period: float,
        key: str | None = None,
    ) -> None:
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._complaints: dict[Foreign, str] = {}  # what was last logged of each
        self._dispatch = dispatch
        self._upstream = upstream
        self._period = period
        self._cards: dict[Foreign, Card] = {}  # of those that were found
        self._away: set[Foreign] = set()  # those may come back as others
        self._servers = servers

    async def run(self) -> None:
        """For as long as the router runs."""
        async with asyncio.TaskGroup() as group:
            for server in self._servers:
                group.create_task(self._attend(server))

    async def _attend(self, server: Foreign) -> None:
        while True:
            began = time.monotonic()
            try:
                async with asyncio.timeout(PATIENCE):
                    complaint = await self._look(server)
            except TimeoutError:
                complaint = f"no answer within {PATIENCE:g} s"
            except (Unreached, Broken, EmberlineError, *NOT_JSON, ValueError) as e:
                complaint = f"{type(e).__name__}: {e}"
            (self._away.add if complaint else self._away.discard)(server)
            self._log(server, complaint)
            await asyncio.sleep(max(0.0, began + self._period - time.monotonic()))  # one slow answer is no silence

    def _log(self, server: Foreign, complaint: str) -> None:
        """Once for each change."""
        if self._complaints.get(server, "") == complaint:
            return
        self._complaints[server] = complaint
        if complaint:
            log.warning("%s server %s is not used: %s", server.dialect, server.url, complaint)
        else:
            log.info("%s server %s is used again", server.dialect, server.url)

    async def _look(self, server: Foreign) -> str:
        """Register it or beat for it. Returns why it cannot be used; "" if it can."""
        status, _ = await self._get(server, "/health")
        if status in (404, 405):  # not every server has one
            status, _ = await self._get(server, "/v1/models")
        if status in (401, 403):
            return f"it answers {status} (hint: name the variable that holds its key with --foreign-key-env)"
        if status != 200:
            return f"its health check answers {status}"
        card = self._cards.get(server)
        forgotten = card is None or self._dispatch.membership.get(card.name) is None
        if card is None or forgotten or server in self._away:
            status, body = await self._get(server, "/v1/models")
            if status != 200:
                key = " (hint: name the variable that holds its key with --foreign-key-env)" if status == 401 else ""
                return f"/v1/models answers {status}{key}"
            found = _card(server, msgspec.json.decode(body, type=_Models))
            if card is None or forgotten or _offers(found) != _offers(card):
                card = self._cards[server] = found
                self._dispatch.register(card)
        self._dispatch.beat(Beat(card.name, card.incarnation, paired=self._paired(card)))
        return ""

    def _paired(self, card: Card) -> tuple[str, ...]:
        """They find each other by themselves: all of a kind are paired."""
        others = (other for other in self._cards.values() if other.dialect == card.dialect and other.role == "prefill")
        return tuple(other.incarnation for other in others if card.role != "prefill")

    async def _get(self, server: Foreign, path: str) -> tuple[int, bytes]:
        reply = await self._upstream.request(server.url, Call("GET", path, self._headers, b""))
        try:
            return reply.status, await reply.whole()
        finally:
            reply.close()


def _offers(card: Card) -> list[tuple[str, int]]:
    return [(model.name, model.max_context) for model in card.models]


def _card(server: Foreign, found: _Models) -> Card:
    at, incarnation = urlsplit(server.url), uuid.uuid4().hex
    peer: dict[str, Any] = {"incarnation": incarnation, "host": at.hostname, "port": server.bootstrap}
    models = tuple(
        ModelCard(model.id, max_context=model.max_model_len, max_running=RUNNING, peer=peer) for model in found.data
    )
    dialect: Dialect = "vllm" if server.dialect == "vllm" else "sglang"
    name = f"{server.dialect} {at.netloc}{at.path}"  # one host may have several servers, behind one proxy
    return Card(name[:128], incarnation, server.url, models, server.role, dialect)
