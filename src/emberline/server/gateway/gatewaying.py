"""serve_gateway: runs a gateway process from start to stop."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from emberline import __version__
from emberline.core.clock import Clock, SystemClock, WallClock
from emberline.core.config import MASTER_KEY, secret
from emberline.core.errors import EmberlineError, InvalidRequest
from emberline.core.gateway_config import GatewayConfig
from emberline.gateway.admin.admin import Admin
from emberline.gateway.admin.desk import Desk
from emberline.gateway.book import Book, Fixed, read_gateways
from emberline.gateway.cache.opening import open_cache, semantic_by
from emberline.gateway.costs.catalogue import CatalogueFiles
from emberline.gateway.costs.prices import Prices
from emberline.gateway.gateway import Gateway
from emberline.gateway.keys.identity import Identity
from emberline.gateway.keys.keys import Keys
from emberline.gateway.keys.masterkeys import master_keys
from emberline.gateway.keys.secretfile import SecretFile
from emberline.gateway.keys.secrets import Secrets
from emberline.gateway.keys.vault import Vault
from emberline.gateway.layers.attempt import Attempts
from emberline.gateway.layers.balanced import balanced
from emberline.gateway.layers.cached import Cached
from emberline.gateway.layers.continued import Continued
from emberline.gateway.layers.dynamic import Dynamic
from emberline.gateway.layers.guarded import Guarded
from emberline.gateway.layers.hedge import hedged
from emberline.gateway.layers.limited import limited
from emberline.gateway.layers.limited_session import limited_sessions
from emberline.gateway.layers.logged import logged
from emberline.gateway.layers.permitted import permitted
from emberline.gateway.layers.routed import routed
from emberline.gateway.layers.told import told
from emberline.gateway.layers.traced import traced
from emberline.gateway.limits.base import Limiter
from emberline.gateway.limits.claims import Claims
from emberline.gateway.limits.opening import open_limiter
from emberline.gateway.logs.logwriter import LogWriter
from emberline.gateway.logs.retention import Retention
from emberline.gateway.models import ModelList
from emberline.gateway.providers.registry import Registry
from emberline.gateway.realtime.realtime import Realtime
from emberline.gateway.run.queue import Queue
from emberline.gateway.run.runs import Runs
from emberline.gateway.stack import stacked
from emberline.gateway.store.base import Store
from emberline.gateway.store.opening import open_store
from emberline.gateway.store.watch import Watch
from emberline.gateway.upstream.upstream import Upstream
from emberline.server.crosssite import CrossSiteGuard, CrossSitePolicy
from emberline.server.gateway.gateway_app import GatewayApp
from emberline.server.gateway.gateway_metrics import GatewayMetrics
from emberline.server.listening import bind, is_exposed, listen
from emberline.server.pages import load_pages
from emberline.server.tracing import tracing

log = logging.getLogger("emberline.gateway")

LOOK = 5.0


async def serve_gateway(config: GatewayConfig, found: Mapping[str, Any]) -> None:
    """Run a gateway until a signal stops it. `config_file`: the decoded configuration file."""
    listener = bind(config.host, config.port)
    port = listener.getsockname()[1]
    exposed = is_exposed(listener) and not config.open
    policy = CrossSitePolicy.of(
        config.cors_origins, config.allowed_hosts, loopback=not is_exposed(listener), authenticated=False
    )
    async with AsyncExitStack() as stack:
        app = await build(config, found, stack, needs_keys=exposed)
        key_file = "" if config.api_keys else f" admin_key_file={config.admin_file}"

        def log_start() -> None:
            log.info("Gateway started: url=http://%s:%d%s", config.host, port, key_file)

        await listen(CrossSiteGuard(app, policy, app.knows), listener, log_start, largest_message=config.max_body)


async def build(
    config: GatewayConfig, found: Mapping[str, Any], stack: AsyncExitStack, *, needs_keys: bool = False
) -> GatewayApp:
    """Create the gateway's objects and return its application; closing `stack` closes them.

    `require_keys`: every gateway requires a key, whatever its settings say.
    """
    configured: Fixed = read_gateways(found, config.engine)
    if needs_keys:
        configured = _require_authentication(config, configured)
    clock, wall = SystemClock(), WallClock()
    store = await open_store(config.store_url)
    stack.push_async_callback(store.close)
    watch = Watch(store, clock)
    upstream = await stack.enter_async_context(Upstream())
    registry = Registry(config.private_providers)
    vault = Vault(store, watch, master_keys(config.master_file, secret(MASTER_KEY)))
    catalogue = CatalogueFiles(*(Path(file) for file in [config.catalogue] if file))
    prices = Prices(catalogue)
    attempts = Attempts(registry, Secrets(vault), upstream, prices, clock, wall)
    log_writer = await stack.enter_async_context(LogWriter(store, linger=config.flush / 5))
    limiter = await _open_limiter(config, store, clock, stack)
    cache_store = await open_cache(config.cache, clock, wall, stack)
    cached = Cached(cache_store, clock, semantic_by(upstream, config.engine, config.embedder, clock))
    claims = Claims(catalogue, prices)
    spans = await stack.enter_async_context(tracing(config.trace, "emberline-gateway"))
    metrics = GatewayMetrics(clock, attempts.breakers, log_writer, cached, limiter, spans)
    outer = (
        metrics.layer,
        *([traced(spans.tracer, payloads=config.otlp_payloads)] if spans is not None else []),
        logged(log_writer, clock),
        told,
        permitted,
    )
    layers = (
        *outer,
        Dynamic(limiter, claims, clock, wall).layer,
        balanced(claims, clock),
        limited(limiter, catalogue, prices, clock, wall),
        Guarded(routed(attempts), clock).layer,
        cached.layer,
        hedged(prices, clock),
        Continued(attempts, registry).layer,
        routed,
    )
    settings_store = Book(configured, store, watch, config.engine, needs_keys=needs_keys)
    keys = Keys(store, watch, wall, _configured_keys(config))
    breakers = attempts.breakers
    realtime = Realtime(registry, Secrets(vault), upstream, prices, clock, breakers, largest=config.max_body)
    session_handler = stacked((*outer, limited_sessions(limiter, claims, clock, wall)), realtime)
    gateway = Gateway(stacked(layers, attempts), session_handler, registry, settings_store, keys, clock, wall)
    context = Desk(store, vault, wall, limiter, fixed=configured, allow_private=config.private_providers)
    admin = Admin(context, __version__, catalogue)
    models = ModelList(registry, vault, upstream, catalogue)
    _start_task(stack, Retention(store, configured, wall).run())
    _start_task(stack, _reload_catalogue(catalogue))
    queue = await stack.enter_async_context(Queue(store, gateway.answer, lambda: metrics.open, wall).running())
    run_handler = Runs(gateway, queue, clock)
    return GatewayApp(
        config, gateway, run_handler, admin, models, store, metrics, load_pages("gateway/index.html"), needs_keys
    )


async def _open_limiter(config: GatewayConfig, store: Store, clock: Clock, stack: AsyncExitStack) -> Limiter:
    return await open_limiter(
        config.redis,
        clock,
        stack,
        degraded=config.redis_gone,  # type: ignore[arg-type]
        store=store,
        journal=config.journal_dir,
        interval=config.flush,
    )


def _require_authentication(config: GatewayConfig, configured: Fixed) -> Fixed:
    """Return the gateways with authentication required.

    Raise InvalidRequest if there is no API key and some gateway does not require authentication by itself.
    """
    if not config.api_keys and not all(settings.authentication for settings in configured.values()):
        raise InvalidRequest(
            f"refusing to listen on {config.host}:{config.port} without authentication: other machines could use the"
            " gateway",
            param="host",
            hint="give --api-key KEY, write `authentication = true` into every [gateways.NAME] of the configuration,"
            " or give --open to allow everyone",
        )
    return {name: msgspec.structs.replace(settings, authentication=True) for name, settings in configured.items()}


def _start_task(stack: AsyncExitStack, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` in the background until `stack` is closed."""
    task = asyncio.create_task(work)
    stack.callback(task.cancel)


async def _reload_catalogue(catalogue: CatalogueFiles) -> None:
    """Read the price catalogue again when its files change."""
    while True:
        await asyncio.sleep(LOOK)
        try:
            if catalogue.refresh():
                log.info("Price catalogue reloaded")
        except EmberlineError as e:
            log.warning("Reloading the price catalogue failed, the last one stays in use: error=%s", e)


def _configured_keys(config: GatewayConfig) -> dict[str, Identity]:
    """Return the configured API keys; without any, the admin key in `admin_file`, created if missing."""
    tokens = config.api_keys or (SecretFile(config.admin_file).read(lambda: secrets.token_urlsafe(24)).strip(),)
    return {
        token: Identity(f"configured-{i}", f"configured {i}", "token", admin=True) for i, token in enumerate(tokens)
    }
