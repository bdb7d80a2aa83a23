"""RouterClient: reads a router's status, and starts and ends the draining of its workers."""

from __future__ import annotations

import ssl
from collections.abc import Collection
from typing import Any

import msgspec

from emberline.autoscaler.router_status import find_status_problem
from emberline.core.errors import EmberlineError, WrongClusterKey
from emberline.net.connection_pool import HTTPConnectionPool
from emberline.net.errors import UpstreamFailed
from emberline.net.json_errors import JSON_DECODE_ERRORS

REQUEST_TIMEOUT_S = 5.0
DRAIN_TIMEOUT_S = 10.0  # a drain that moves streams waits for other workers to connect
IDLE_TIMEOUT_S = 4.0  # the router closes idle connections after 5 s
MAX_STATUS_BYTES = 64 << 20


class RouterUnavailable(EmberlineError):
    status = 503
    code = "router_unavailable"


class RouterClient:
    def __init__(self, url: str, cluster_key: str | None, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: the context for an https URL; by default one with the system's CAs."""
        self.url = url.rstrip("/")
        self._headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {cluster_key}"} if cluster_key else {}
        )
        self._pool = HTTPConnectionPool(
            connect_timeout_s=REQUEST_TIMEOUT_S, idle_timeout_s=IDLE_TIMEOUT_S, retries_stale=True, tls=tls
        )

    def close(self) -> None:
        self._pool.close()

    async def fetch_status(self) -> dict[str, Any]:
        """Return the router's /cluster/status. Raises RouterUnavailable or WrongClusterKey."""
        status, document = await self._call("GET", "/cluster/status", b"", REQUEST_TIMEOUT_S)
        problem = find_status_problem(document) if status == 200 else f"HTTP status {status}"
        if problem:
            raise RouterUnavailable(
                f"{self.url}/cluster/status did not answer with a router's status: {problem[:300]}",
                hint="set --router to the URL of an Emberline router of the same release",
            )
        found: dict[str, Any] = document
        return found

    async def drain(self, name: str, *, on: bool = True) -> bool:
        """Start or end the draining of a worker, and return whether the router knows the worker.

        The streams of a draining worker move to other workers. Raises RouterUnavailable or WrongClusterKey."""
        body = msgspec.json.encode({"name": name, "on": on, "move": on})
        status, _ = await self._call("POST", "/cluster/drain", body, DRAIN_TIMEOUT_S)
        if status not in (200, 404):
            message = f"the router at {self.url} answered {status} to the drain of {name!r}"
            raise RouterUnavailable(message, hint="see the router's log")
        return status == 200

    async def set_asleep(self, name: str, *, on: bool = True) -> bool:
        """Tell a worker to sleep, which it does only without open requests, or to wake.

        Return False if the worker cannot sleep, or if the router does not know it. Raises RouterUnavailable or
        WrongClusterKey."""
        body = msgspec.json.encode({"name": name, "on": on})
        status, _ = await self._call("POST", "/cluster/sleep", body, DRAIN_TIMEOUT_S)
        if status not in (200, 400, 404):
            message = f"the router at {self.url} answered {status} when {name!r} was to {'sleep' if on else 'wake'}"
            raise RouterUnavailable(message, hint="see the router's log")
        return status == 200

    async def announce_models(self, names: Collection[str], seconds: float) -> None:
        """Let requests for these models wait at the router while they have no worker.

        Raises RouterUnavailable or WrongClusterKey. A router of an earlier release ignores the call."""
        body = msgspec.json.encode({"models": sorted(names), "seconds": seconds})
        status, _ = await self._call("POST", "/cluster/models", body, REQUEST_TIMEOUT_S)
        if status not in (200, 404):
            message = f"the router at {self.url} answered {status} to the announcement of models"
            raise RouterUnavailable(message, hint="see the router's log")

    async def _call(self, method: str, path: str, body: bytes, timeout_s: float) -> tuple[int, Any]:
        try:
            reply = await self._pool.fetch(
                method, self.url + path, self._headers, body, timeout_s=timeout_s, max_bytes=MAX_STATUS_BYTES
            )
            document = msgspec.json.decode(reply.body) if reply.status == 200 else None
        except (UpstreamFailed, *JSON_DECODE_ERRORS) as e:
            message = f"no router answers at {self.url}: {e}"
            raise RouterUnavailable(message, hint="check --router, and that the router runs") from e
        if reply.status in (401, 403):
            raise WrongClusterKey(
                f"the router at {self.url} refused the call: the cluster key is missing or wrong",
                hint="set --cluster-key or EMBERLINE_CLUSTER_KEY to the router's key",
            )
        return reply.status, document
