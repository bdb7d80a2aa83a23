"""run_autoscaler: runs the autoscaler's process until a signal stops it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from emberline.autoscaler.controller import Autoscaler
from emberline.autoscaler.fleet import WorkerFleet
from emberline.autoscaler.router_client import RouterUnavailable
from emberline.autoscaler.router_group import RouterGroup
from emberline.autoscaler.settings import AutoscalerSettings
from emberline.core.clock import SystemClock
from emberline.core.errors import MethodNotAllowed, NotFound
from emberline.net.server import HTTPServer
from emberline.server.exchange import Exchange, Receive, Scope, Send
from emberline.server.listener import bind_listener
from emberline.server.metrics import listener_families, render_exposition
from emberline.server.route_table import reply_error

log = logging.getLogger("emberline.autoscaler")

ROUTER_WAIT_S = 30.0  # longest wait for a router at the start; later, the autoscaler tries again without a limit
ROUTER_RETRY_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    host: str
    port: int


async def run_autoscaler(
    settings: AutoscalerSettings,
    router: RouterGroup,
    fleet: WorkerFleet,
    metrics_address: MetricsAddress | None,
    *,
    keep_workers: bool,
    models: Collection[str] = (),
) -> None:
    """Scale until SIGTERM or SIGINT. Raises RouterUnavailable if no router answers within ROUTER_WAIT_S.

    `keep_workers`: the workers keep running after such a signal. After kill -9 or an error they always keep running,
    because they may serve requests. `models`: the API names of the pools' models, as far as they are known."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    autoscaler = Autoscaler(settings, router, fleet, SystemClock(), models)
    server = None
    try:
        if metrics_address is not None:
            listener = bind_listener(metrics_address.host, metrics_address.port, option_prefix="--metrics-")
            server = HTTPServer(MetricsApp(autoscaler))
            await server.start(listener)
        await wait_for_router(router, stop)
        log.info("Autoscaler ready: routers=%s slo=%s pools=%s", router.url, settings.slo, _describe_pools(settings))
        await autoscaler.run(stop)
    finally:
        if server is not None:
            await server.stop(0.0)
        router.close()
        await fleet.close(stop_workers=stop.is_set() and not keep_workers)


async def wait_for_router(router: RouterGroup, stop: asyncio.Event, timeout_s: float = ROUTER_WAIT_S) -> None:
    """Return when a router answers, or `stop` is set. Raises RouterUnavailable or WrongClusterKey."""
    end = asyncio.get_running_loop().time() + timeout_s
    while not stop.is_set():
        try:
            await router.fetch_status()
            return
        except RouterUnavailable:
            if asyncio.get_running_loop().time() > end:
                raise
            await asyncio.sleep(ROUTER_RETRY_INTERVAL_S)


def _describe_pools(settings: AutoscalerSettings) -> str:
    return ",".join(f"{pool.role}:{pool.min_workers}-{pool.max_workers}" for pool in settings.pools)


class MetricsApp:
    """Serves /metrics and /health. Neither has a secret, so no key is needed."""

    def __init__(self, autoscaler: Autoscaler) -> None:
        self._autoscaler = autoscaler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        if exchange.path in ("/metrics", "/health") and exchange.method not in ("GET", "HEAD"):
            message = f"{exchange.path} accepts GET, not {exchange.method[:20]}"
            await reply_error(exchange, MethodNotAllowed(message, allowed="GET"))
        elif exchange.path == "/metrics":
            text = render_exposition([*self._autoscaler.metrics.metric_families(), *listener_families()])
            await exchange.reply(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")
        elif exchange.path == "/health":
            body: dict[str, Any] = {"status": "live", "decisions": self._autoscaler.metrics.decisions}
            await exchange.reply_json(body)
        else:
            await reply_error(exchange, NotFound(f"no page at {exchange.path[:200]!r}", hint="use /metrics or /health"))
