"""run_router: a router process from start to stop."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import replace

from emberline.core.clock import SystemClock
from emberline.core.config import RouterConfig
from emberline.router.upstream import Upstream
from emberline.server.crosssite import CrossSiteGuard, CrossSitePolicy
from emberline.server.listening import bind, check_exposed, is_exposed, listen
from emberline.server.pages import load_pages
from emberline.server.routing.following import Following
from emberline.server.routing.router_app import RouterApp
from emberline.server.routing.sponsor import Sponsor
from emberline.server.tracing import tracing

log = logging.getLogger("emberline.router")


async def route(config: RouterConfig) -> None:
    """Serve until a signal stops the process; raise InvalidRequest if the address cannot be used."""
    is_inherited = config.listen_fd is not None
    listener = socket.socket(fileno=config.listen_fd) if is_inherited else bind(config.host, config.port)
    port = listener.getsockname()[1]
    check_exposed(listener, authenticated=bool(config.api_keys), is_open=config.open, hint="add --api-key KEY")
    policy = CrossSitePolicy.of(
        config.cors_origins,
        config.allowed_hosts,
        loopback=not is_exposed(listener),
        authenticated=bool(config.api_keys),
    )
    config = replace(config, port=port)
    async with Upstream() as upstream, tracing(config.trace, "emberline-router") as spans:
        app = RouterApp(config, upstream, SystemClock(), load_pages("router.html"), spans)
        poller = Sponsor(app.dispatch, upstream, config.foreign, config.beat_seconds, config.foreign_key)
        coroutines = [app.tick(), poller.run()]
        if (index := app.dispatch.kv) is not None:
            coroutines.append(Following(app.dispatch, index, upstream, config.cluster_key).run())
        tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]

        def log_ready() -> None:
            log.info("router ready: url=http://%s:%d", config.host, port)
            if config.cluster_key is None:
                log.warning(
                    "no cluster key is set, workers can register and be drained from this machine only"
                    " (hint: set EMBERLINE_CLUSTER_KEY for workers on other machines)"
                )

        try:
            await listen(CrossSiteGuard(app, policy), listener, log_ready)
        finally:
            for task in tasks:
                task.cancel()
