"""serve_gateway: runs a gateway process from start to stop."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from emberline import __version__
from emberline.core.clock import Clock, SystemClock, WallClock
from emberline.core.config import MASTER_KEY_VARIABLE, read_secret
from emberline.core.errors import EmberlineError, InvalidRequest
from emberline.core.gateway_config import GatewayConfig
from emberline.core.tls import TLSIdentity, open_identity
from emberline.gateway.admin.admin import AdminAPI
from emberline.gateway.admin.admin_context import AdminContext
from emberline.gateway.admin.sign_in import LINK_LIFETIME_S, SignIn
from emberline.gateway.cache.factory import open_cache, semantic_cache_factory
from emberline.gateway.core.identity import Identity
from emberline.gateway.core.request import Layer
from emberline.gateway.core.settings import GatewaySettings, ProviderSettings
from emberline.gateway.costs.catalogue import CatalogueFiles
from emberline.gateway.costs.price_list import PriceList
from emberline.gateway.gateway import Gateway
from emberline.gateway.http.gateway_app import GatewayApp
from emberline.gateway.http.gateway_metrics import GatewayMetrics
from emberline.gateway.keys.key_store import KeyStore
from emberline.gateway.keys.master_keys import open_master_keys
from emberline.gateway.keys.object_ids import ObjectIds
from emberline.gateway.keys.provider_key_vault import ProviderKeyVault
from emberline.gateway.keys.provider_keys import ProviderKeySelector
from emberline.gateway.keys.secret_file import SecretFile
from emberline.gateway.keys.tenant_secret import open_engine_tenants
from emberline.gateway.layers.caching import CacheLayer
from emberline.gateway.layers.call_logging import log_calls
from emberline.gateway.layers.continuation import ContinuationLayer
from emberline.gateway.layers.dynamic_routes import DynamicRouteLayer
from emberline.gateway.layers.errors_to_replies import errors_to_replies
from emberline.gateway.layers.fallbacks import try_fallbacks
from emberline.gateway.layers.guardrail_checks import GuardrailLayer
from emberline.gateway.layers.hedging import hedge_slow_calls
from emberline.gateway.layers.load_balancing import balance_pools
from emberline.gateway.layers.permissions import check_endpoints, check_gateway, find_posted_model, find_realtime_model
from emberline.gateway.layers.rate_limiting import limit_calls
from emberline.gateway.layers.retries import RetryHandler
from emberline.gateway.layers.session_limiting import limit_sessions
from emberline.gateway.layers.stored_objects import StoredObjectLayer
from emberline.gateway.layers.tracing import trace_calls
from emberline.gateway.limits.base import Limiter
from emberline.gateway.limits.claims import ClaimBuilder
from emberline.gateway.limits.factory import open_limiter
from emberline.gateway.logs.log_writer import LogWriter
from emberline.gateway.logs.retention import LogRetention
from emberline.gateway.model_lister import ModelLister
from emberline.gateway.providers.registry import ProviderRegistry
from emberline.gateway.realtime.handler import RealtimeHandler
from emberline.gateway.run.batch_queue import BatchQueue
from emberline.gateway.run.run_handler import RunHandler
from emberline.gateway.settings_store import (
    ConfiguredGateways,
    SettingsStore,
    load_default_gateway,
    read_configured_gateways,
)
from emberline.gateway.stack import stack_layers
from emberline.gateway.store.base import GatewayStore
from emberline.gateway.store.factory import open_store
from emberline.gateway.store.version_watch import StoreVersionWatch
from emberline.gateway.upstream.client import UpstreamClient
from emberline.server.cross_site import CrossSiteGuard, CrossSitePolicy
from emberline.server.listener import bind_listener, is_exposed, serve_until_stopped
from emberline.server.pages import load_pages
from emberline.server.tracing import RequestTracing, open_tracing

log = logging.getLogger("emberline.gateway")

CATALOGUE_POLL_INTERVAL_S = 5.0


async def serve_gateway(config: GatewayConfig, config_file: Mapping[str, Any]) -> None:
    """Run a gateway until a signal stops it. `config_file`: the decoded configuration file."""
    tls = open_identity(config.tls)
    listener = bind_listener(config.host, config.port)
    port = listener.getsockname()[1]
    exposed = is_exposed(listener) and not config.open
    policy = CrossSitePolicy.build(
        config.cors_origins, config.allowed_hosts, is_loopback=not is_exposed(listener), is_authenticated=False
    )
    async with AsyncExitStack() as stack:
        app = await build_gateway(config, config_file, stack, require_keys=exposed, tls=tls)
        key_file = "" if config.api_keys else f" admin_key_file={config.admin_key_file}"

        def log_start() -> None:
            log.info("Gateway started: url=%s://%s:%d%s", config.scheme, config.host, port, key_file)
            print_sign_in_link(app.sign_in, config, port, is_exposed=is_exposed(listener))

        await serve_until_stopped(
            CrossSiteGuard(app, policy, app.has_valid_key),
            listener,
            log_start,
            max_message_bytes=config.max_body,
            tls=tls.listener_context() if tls is not None else None,
        )


def print_sign_in_link(sign_in: SignIn, config: GatewayConfig, port: int, *, is_exposed: bool) -> None:
    """Print a link that signs in to the dashboard. It is printed and not logged, because its token is a secret.

    There is no link if other machines can reach the listener without TLS, because the token could be read on its way.
    """
    if is_exposed and config.tls is None:
        return
    host = "localhost" if is_exposed else config.host
    link = sign_in.create_link(f"{config.scheme}://{f'[{host}]' if ':' in host else host}:{port}")
    print(f"Sign in to the dashboard (once, within {LINK_LIFETIME_S / 60:.0f} minutes): {link}", flush=True)


async def build_gateway(
    config: GatewayConfig,
    config_file: Mapping[str, Any],
    stack: AsyncExitStack,
    *,
    require_keys: bool = False,
    tls: TLSIdentity | None = None,
) -> GatewayApp:
    """Create the gateway's objects and return its application. Closing `stack` closes these objects.

    `require_keys`: require a key whatever the settings say. `tls`: the listener's TLS files, for metrics."""
    engine = ProviderSettings(base_url=config.engine, key=config.engine_key)
    configured: ConfiguredGateways = read_configured_gateways(config_file, engine)
    clock, wall = SystemClock(), WallClock()
    store = await open_store(config.store_url)
    stack.push_async_callback(store.close)
    default_gateway = await load_default_gateway(configured, store, wall)
    if require_keys:
        _check_authentication(config, [default_gateway, *configured.values()])
        configured = _with_authentication(configured)
    watch = StoreVersionWatch(store, clock)
    upstream = await stack.enter_async_context(UpstreamClient(tls_by_origin=make_engine_tls(config)))
    registry = ProviderRegistry(config.private_providers, await open_engine_tenants(store, wall))
    master_keys = open_master_keys(config.master_key_file, read_secret(MASTER_KEY_VARIABLE))
    vault = ProviderKeyVault(store, watch, master_keys)
    catalogue = CatalogueFiles(*(Path(file) for file in [config.catalogue] if file))
    prices = PriceList(catalogue)
    attempts = RetryHandler(registry, ProviderKeySelector(vault), upstream, prices, clock, wall)
    log_writer = await stack.enter_async_context(LogWriter(store, flush_delay_s=config.flush / 5))
    limiter = await _open_limiter(config, store, clock, stack)
    semantic_caches = semantic_cache_factory(upstream, config.engine, config.embedder, clock, key=config.engine_key)
    cached = CacheLayer(await open_cache(config.cache, clock, wall, stack), clock, semantic_caches)
    claims = ClaimBuilder(catalogue, prices)
    spans = await stack.enter_async_context(open_tracing(config.trace, "emberline-gateway"))
    metrics = GatewayMetrics(clock, attempts.breakers, log_writer, cached, limiter, spans, tls)
    outer = _build_outer_layers(config, metrics, spans, log_writer, clock)
    layers = (
        *outer,
        check_endpoints(registry, find_posted_model),
        StoredObjectLayer(ObjectIds(master_keys), registry).wrap,
        DynamicRouteLayer(limiter, claims, clock, wall).wrap,
        balance_pools(claims, clock),
        limit_calls(limiter, catalogue, prices, clock, wall),
        GuardrailLayer(try_fallbacks(attempts), clock).wrap,
        cached.wrap,
        hedge_slow_calls(prices, clock),
        ContinuationLayer(attempts, registry).wrap,
        try_fallbacks,
    )
    settings_store = SettingsStore(configured, store, watch, engine, require_keys=require_keys)
    keys = KeyStore(store, watch, wall, _identities_by_key(config))
    selector, limit = ProviderKeySelector(vault), config.max_body
    realtime = RealtimeHandler(registry, selector, upstream, prices, clock, attempts.breakers, max_message_bytes=limit)
    check_sessions = check_endpoints(registry, find_realtime_model)
    session_handler = stack_layers((*outer, check_sessions, limit_sessions(limiter, claims, clock, wall)), realtime)
    sources = registry, settings_store, keys, clock, wall
    gateway = Gateway(stack_layers(layers, attempts), session_handler, *sources, partial(stack_layers, outer))
    context = AdminContext(
        store,
        vault,
        wall,
        limiter,
        configured=configured,
        allow_private=config.private_providers,
        engine_url=config.engine,
    )
    admin = AdminAPI(context, __version__, catalogue)
    models = ModelLister(registry, vault, upstream, catalogue)
    _start_task(stack, LogRetention(store, configured, wall).run())
    _start_task(stack, _reload_catalogue(catalogue))
    batches = BatchQueue(store, gateway.answer, lambda: metrics.open_requests, wall)
    run_handler = RunHandler(gateway, await stack.enter_async_context(batches.run_in_background()), clock)
    return GatewayApp(
        config,
        gateway,
        run_handler,
        admin,
        SignIn(context, clock),
        models,
        store,
        metrics,
        load_pages("gateway/index.html"),
        log_writer,
        require_keys,
    )


def make_engine_tls(config: GatewayConfig) -> dict[str, ssl.SSLContext]:
    """Return {origin of the engine: its TLS context}, or {} if the configuration has no TLS files for the engine."""
    identity = open_identity(config.engine_tls)
    return {} if identity is None else {f"https://{urlsplit(config.engine).netloc}": identity.peer_client_context()}


def _build_outer_layers(
    config: GatewayConfig, metrics: GatewayMetrics, tracing: RequestTracing | None, log_writer: LogWriter, clock: Clock
) -> tuple[Layer, ...]:
    """Return the layers around every request and every realtime session."""
    traced = [] if tracing is None else [trace_calls(tracing.tracer, record_payloads=config.otlp_payloads)]
    return (metrics.layer, *traced, log_calls(log_writer, clock), errors_to_replies, check_gateway)


async def _open_limiter(config: GatewayConfig, store: GatewayStore, clock: Clock, stack: AsyncExitStack) -> Limiter:
    return await open_limiter(
        config.redis,
        clock,
        stack,
        degraded_mode=config.redis_gone,  # type: ignore[arg-type]
        store=store,
        journal_directory=config.journal_dir,
        store_interval_s=config.flush,
    )


def _check_authentication(config: GatewayConfig, gateways: Iterable[GatewaySettings]) -> None:
    """Raise InvalidRequest if no API key is configured and a gateway's own settings leave authentication off.

    This check is for a listener that other machines can reach.
    """
    if not config.api_keys and not all(settings.authentication for settings in gateways):
        raise InvalidRequest(
            f"refusing to listen on {config.host}:{config.port} without authentication: other machines could use the"
            " gateway",
            param="host",
            hint="set EMBERLINE_ADMIN_KEY, require a key for every gateway (in the dashboard, or `authentication ="
            " true` in every [gateways.NAME] of the configuration), or give --open to allow everyone",
        )


def _with_authentication(configured: ConfiguredGateways) -> ConfiguredGateways:
    """Return the gateways of the configuration file with authentication enabled."""
    return {name: msgspec.structs.replace(settings, authentication=True) for name, settings in configured.items()}


def _start_task(stack: AsyncExitStack, coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in the background until `stack` is closed."""
    task = asyncio.create_task(coroutine)
    stack.callback(task.cancel)


async def _reload_catalogue(catalogue: CatalogueFiles) -> None:
    """Reload the price catalogue whenever its files change."""
    while True:
        await asyncio.sleep(CATALOGUE_POLL_INTERVAL_S)
        try:
            if catalogue.refresh():
                log.info("Price catalogue reloaded")
        except EmberlineError as e:
            log.warning("Price catalogue not reloaded, keeping the loaded prices: error=%s", e)


def _identities_by_key(config: GatewayConfig) -> dict[str, Identity]:
    """Return the identity of each configured API key.

    Without a configured key, the only key is the admin key in `admin_key_file`, which is created if missing.
    """
    tokens = config.api_keys or (
        SecretFile(config.admin_key_file).read_or_create(lambda: secrets.token_urlsafe(24)).strip(),
    )
    return {
        token: Identity(f"configured-{i}", f"configured {i}", "token", is_admin=True, may_state_cost=True)
        for i, token in enumerate(tokens)
    }
