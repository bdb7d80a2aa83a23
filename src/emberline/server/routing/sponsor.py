"""ForeignWorkerPoller: registers vLLM and SGLang servers, which cannot register themselves.

Each successful health check is recorded as a heartbeat."""

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

PATIENCE = 2.0
RUNNING = 256  # the servers do not report their own limit
KEY_HINT = "hint: set --foreign-key-env to the environment variable with the server's API key"


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
        self._complaints: dict[Foreign, str] = {}
        self._dispatch = dispatch
        self._upstream = upstream
        self._period = period
        self._cards: dict[Foreign, Card] = {}
        self._away: set[Foreign] = set()  # may serve other models when they answer again
        self._servers = servers

    async def run(self) -> None:
        """Poll all servers until cancelled."""
        async with asyncio.TaskGroup() as group:
            for server in self._servers:
                group.create_task(self._attend(server))

    async def _attend(self, server: Foreign) -> None:
        while True:
            started_at = time.monotonic()
            try:
                async with asyncio.timeout(PATIENCE):
                    problem = await self._look(server)
            except TimeoutError:
                problem = f"no answer within {PATIENCE:g} s"
            except (Unreached, Broken, EmberlineError, *NOT_JSON, ValueError) as e:
                problem = f"{type(e).__name__}: {e}"
            (self._away.add if problem else self._away.discard)(server)
            self._log(server, problem)
            # A fixed period: a slow answer must not delay the next heartbeat.
            await asyncio.sleep(max(0.0, started_at + self._period - time.monotonic()))

    def _log(self, server: Foreign, complaint: str) -> None:
        """Log a problem, or its end, once."""
        if self._complaints.get(server, "") == complaint:
            return
        self._complaints[server] = complaint
        if complaint:
            log.warning("foreign server not used: kind=%s url=%s reason=%s", server.dialect, server.url, complaint)
        else:
            log.info("foreign server used again: kind=%s url=%s", server.dialect, server.url)

    async def _look(self, server: Foreign) -> str:
        """Check a server's health, and register it or record its heartbeat.

        Return why it cannot be used, or ""."""
        status, _ = await self._get(server, "/health")
        if status in (404, 405):  # not every server has /health
            status, _ = await self._get(server, "/v1/models")
        if status in (401, 403):
            return f"the health check answered {status} ({KEY_HINT})"
        if status != 200:
            return f"the health check answered {status}"
        card = self._cards.get(server)
        is_unknown = card is None or self._dispatch.membership.get(card.name) is None
        if card is None or is_unknown or server in self._away:
            status, body = await self._get(server, "/v1/models")
            if status != 200:
                return f"/v1/models answered {status}" + (f" ({KEY_HINT})" if status == 401 else "")
            registration = _card(server, msgspec.json.decode(body, type=_Models))
            if card is None or is_unknown or _offers(registration) != _offers(card):
                card = self._cards[server] = registration
                self._dispatch.register(card)
        self._dispatch.beat(Beat(card.name, card.incarnation, paired=self._paired(card)))
        return ""

    def _paired(self, card: Card) -> tuple[str, ...]:
        """Return the prefill servers of the same kind.

        These servers find each other, so that all of them count as paired."""
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
    parts, incarnation = urlsplit(server.url), uuid.uuid4().hex
    peer: dict[str, Any] = {"incarnation": incarnation, "host": parts.hostname, "port": server.bootstrap}
    models = tuple(
        ModelCard(model.id, max_context=model.max_model_len, max_running=RUNNING, peer=peer) for model in found.data
    )
    dialect: Dialect = "vllm" if server.dialect == "vllm" else "sglang"
    name = f"{server.dialect} {parts.netloc}{parts.path}"  # one proxy may have several servers at different paths
    return Card(name[:128], incarnation, server.url, models, server.role, dialect)
