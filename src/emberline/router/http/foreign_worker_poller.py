"""ForeignWorkerPoller: registers vLLM and SGLang servers as workers, because they cannot register themselves.

It checks the health of each server regularly. Each successful check counts as a heartbeat."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from emberline.cluster.registration import DialectName, Heartbeat, ModelRegistration, WorkerRegistration
from emberline.core.errors import EmberlineError
from emberline.core.foreign_config import ForeignWorkerConfig
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.upstream_request import UpstreamRequest
from emberline.router.worker_client import UpstreamBroken, UpstreamUnreachable, WorkerClient

log = logging.getLogger("emberline.router")

POLL_TIMEOUT_S = 2.0
ASSUMED_MAX_RUNNING = 256  # the servers do not report their own limit
KEY_HINT = "hint: set --foreign-key-env to the environment variable with the server's API key"


class _ListedModel(msgspec.Struct):
    id: str
    max_model_len: int = 0


class _ModelList(msgspec.Struct):
    data: list[_ListedModel]


class ForeignWorkerPoller:
    def __init__(
        self,
        dispatcher: Dispatcher,
        client: WorkerClient,
        servers: Sequence[ForeignWorkerConfig],
        period: float,
        api_key: str | None = None,
    ) -> None:
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._logged_problems: dict[ForeignWorkerConfig, str] = {}
        self._dispatcher = dispatcher
        self._client = client
        self._period = period
        self._registrations: dict[ForeignWorkerConfig, WorkerRegistration] = {}
        self._unavailable: set[ForeignWorkerConfig] = set()  # may serve other models when they answer again
        self._servers = servers

    async def run(self) -> None:
        """Poll all servers until cancelled."""
        async with asyncio.TaskGroup() as group:
            for server in self._servers:
                group.create_task(self._poll_server_repeatedly(server))

    async def _poll_server_repeatedly(self, server: ForeignWorkerConfig) -> None:
        while True:
            started_at = time.monotonic()
            try:
                async with asyncio.timeout(POLL_TIMEOUT_S):
                    problem = await self._poll_server(server)
            except TimeoutError:
                problem = f"no answer within {POLL_TIMEOUT_S:g} s"
            except (UpstreamUnreachable, UpstreamBroken, EmberlineError, *JSON_DECODE_ERRORS, ValueError) as e:
                problem = f"{type(e).__name__}: {e}"
            (self._unavailable.add if problem else self._unavailable.discard)(server)
            self._log_problem_once(server, problem)
            # A fixed period: a slow answer must not delay the next heartbeat.
            await asyncio.sleep(max(0.0, started_at + self._period - time.monotonic()))

    def _log_problem_once(self, server: ForeignWorkerConfig, problem: str) -> None:
        """Log a server's problem when it begins and when it ends, but not at every check in between."""
        if self._logged_problems.get(server, "") == problem:
            return
        self._logged_problems[server] = problem
        if problem:
            log.warning("Server not used as a worker: kind=%s url=%s reason=%s", server.dialect, server.url, problem)
        else:
            log.info("Server used as a worker again: kind=%s url=%s", server.dialect, server.url)

    async def _poll_server(self, server: ForeignWorkerConfig) -> str:
        """Check a server's health, and register the server or record a heartbeat.

        Return the reason why the server cannot be used, or "" if it can."""
        status, _ = await self._fetch_status_and_body(server, "/health")
        if status in (404, 405):  # not every server has /health
            status, _ = await self._fetch_status_and_body(server, "/v1/models")
        if status in (401, 403):
            return f"the health check answered {status} ({KEY_HINT})"
        if status != 200:
            return f"the health check answered {status}"
        known = self._registrations.get(server)
        is_unknown = known is None or self._dispatcher.membership.get(known.name) is None
        if known is None or is_unknown or server in self._unavailable:
            status, body = await self._fetch_status_and_body(server, "/v1/models")
            if status != 200:
                return f"/v1/models answered {status}" + (f" ({KEY_HINT})" if status == 401 else "")
            registration = _build_registration(server, msgspec.json.decode(body, type=_ModelList))
            if (
                known is None
                or is_unknown
                or _names_and_context_lengths(registration) != _names_and_context_lengths(known)
            ):
                known = self._registrations[server] = registration
                self._dispatcher.register(known)
        self._dispatcher.record_heartbeat(
            Heartbeat(known.name, known.incarnation, paired=self._incarnations_of_prefill_servers(known))
        )
        return ""

    def _incarnations_of_prefill_servers(self, registration: WorkerRegistration) -> tuple[str, ...]:
        """Return the incarnations (ids of one run) of all prefill servers of the same kind as `registration`.

        vLLM and SGLang servers connect to each other by themselves, so the router treats each of them as connected to
        all prefill servers."""
        others = (
            other
            for other in self._registrations.values()
            if other.dialect == registration.dialect and other.role == "prefill"
        )
        return tuple(other.incarnation for other in others if registration.role != "prefill")

    async def _fetch_status_and_body(self, server: ForeignWorkerConfig, path: str) -> tuple[int, bytes]:
        reply = await self._client.request(server.url, UpstreamRequest("GET", path, self._headers, b""))
        try:
            return reply.status, await reply.read_all()
        finally:
            reply.close()


def _names_and_context_lengths(registration: WorkerRegistration) -> list[tuple[str, int]]:
    return [(model.name, model.max_context) for model in registration.models]


def _build_registration(server: ForeignWorkerConfig, model_list: _ModelList) -> WorkerRegistration:
    parts, incarnation = urlsplit(server.url), uuid.uuid4().hex
    peer: dict[str, Any] = {"incarnation": incarnation, "host": parts.hostname, "port": server.bootstrap}
    models = tuple(
        ModelRegistration(model.id, max_context=model.max_model_len, max_running=ASSUMED_MAX_RUNNING, peer=peer)
        for model in model_list.data
    )
    dialect: DialectName = "vllm" if server.dialect == "vllm" else "sglang"
    name = f"{server.dialect} {parts.netloc}{parts.path}"  # one proxy may have several servers at different paths
    return WorkerRegistration(name[:128], incarnation, server.url, models, server.role, dialect)
