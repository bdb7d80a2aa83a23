"""run_router: runs the router's process until a signal stops it."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import replace

from emberline.core.clock import SystemClock
from emberline.core.config import RouterConfig
from emberline.core.tls import open_identity
from emberline.router.http.foreign_worker_poller import ForeignWorkerPoller
from emberline.router.http.kv_event_subscriber import KVEventSubscriber
from emberline.router.http.router_app import RouterApp
from emberline.router.worker_client import WorkerClient
from emberline.server.cross_site import CrossSiteGuard, CrossSitePolicy
from emberline.server.listener import bind_listener, check_exposure, is_exposed, serve_until_stopped
from emberline.server.pages import load_pages
from emberline.server.tracing import open_tracing

log = logging.getLogger("emberline.router")


async def run_router(config: RouterConfig) -> None:
    """Serve requests until a signal stops the process. Raises InvalidRequest if the address is in use."""
    tls = open_identity(config.tls)
    is_inherited = config.listen_fd is not None
    listener = socket.socket(fileno=config.listen_fd) if is_inherited else bind_listener(config.host, config.port)
    port = listener.getsockname()[1]
    check_exposure(
        listener, is_authenticated=bool(config.api_keys), allows_anyone=config.open, hint="set EMBERLINE_API_KEY"
    )
    policy = CrossSitePolicy.build(
        config.cors_origins,
        config.allowed_hosts,
        is_loopback=not is_exposed(listener),
        is_authenticated=bool(config.api_keys),
    )
    config = replace(config, port=port)
    has_ca = tls is not None and config.tls_ca is not None
    client_tls = tls.peer_client_context() if tls is not None and has_ca else None
    async with WorkerClient(client_tls) as client, open_tracing(config.trace, "emberline-router") as spans:
        app = RouterApp(config, client, SystemClock(), load_pages("router.html"), spans, tls)
        poller = ForeignWorkerPoller(app.dispatcher, client, config.foreign, config.beat_seconds, config.foreign_key)
        coroutines = [app.check_workers_repeatedly(), poller.run()]
        if (index := app.dispatcher.kv_index) is not None:
            coroutines.append(KVEventSubscriber(app.dispatcher, index, client, config.cluster_key).run())
        tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]

        def log_ready() -> None:
            log.info("Router ready: url=%s://%s:%d", config.scheme, config.host, port)
            if config.cluster_key is None:
                log.warning(
                    "No cluster key is set, workers can register and be drained from this machine only"
                    " (hint: set EMBERLINE_CLUSTER_KEY for workers on other machines)"
                )

        try:
            context = tls.listener_context() if tls is not None else None
            await serve_until_stopped(CrossSiteGuard(app, policy), listener, log_ready, tls=context)
        finally:
            for task in tasks:
                task.cancel()
