"""The server process of `emberline serve` and of a worker, from start to stop.

The engine process is started first. Tokenizers and templates are loaded while it starts.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from emberline.core.background_threads import run_in_daemon_thread
from emberline.core.config import ServerConfig, WorkerConfig
from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.errors import InvalidRequest
from emberline.core.events import Stats
from emberline.core.tls import TLSIdentity, open_identity
from emberline.core.transfer_config import TransferConfig
from emberline.engine.async_engine import AsyncEngine, EngineState
from emberline.engine.engine_child import EngineChild
from emberline.engine.messages import LoadedModelInfo
from emberline.hub.model_lock import hold_model
from emberline.hub.source import resolve_model
from emberline.server.cross_site import CrossSiteGuard, CrossSitePolicy
from emberline.server.listener import (
    answer_while_loading,
    bind_listener,
    check_exposure,
    is_exposed,
    limit_silence,
    serve_until_stopped,
)

if TYPE_CHECKING:
    from emberline.cluster.registrar_group import RegistrarGroup
    from emberline.worker.engine_app import EngineApp

log = logging.getLogger("emberline.server")
QUANTISED_WEIGHTS = ("quantised", "fp8", "int4", "gguf", "q4", "q8")  # of Numerics.weights

LEASE_DRAIN_TIMEOUT_S = 5.0
ROUTER_TIMEOUT_S = 120  # after which requests of a router whose machine is unreachable are aborted


async def serve(
    config: ServerConfig,
    engine_config: EngineConfig,
    time_sharing_config: TimeSharingConfig,
    start_time: float,
    child: EngineChild | None = None,
) -> None:
    """Serve until a signal stops the process.

    `start_time`: when the process started, by the monotonic clock. `child`: an engine process that has been started.
    """
    tls = open_identity(config.tls)
    if tls is not None and config.worker is not None:
        tls.check_accepts_itself()
    listener = bind_listener(config.host, config.port)
    port = listener.getsockname()[1]
    config = _prepare_worker(_check_access(config, listener), listener)
    server = await answer_while_loading(listener, tls.listener_context() if tls is not None else None)
    # In a daemon thread, so that Ctrl-C works during a download of several minutes.
    resolving = run_in_daemon_thread(
        "loading", lambda: {name: resolve_model(source) for name, source in config.models.items()}
    )
    directories = await asyncio.wrap_future(resolving)
    if config.worker is not None and config.worker.can_sleep:
        time_sharing_config = replace(time_sharing_config, models_can_sleep=True)
    configs = _build_engine_configs(_add_transfer(engine_config, config, port), directories)
    engine = AsyncEngine(configs, time_sharing_config, stall_timeout=config.stall_timeout, child=child)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)  # lets the task spawn the process before the imports below block this one
    assembled = registrar = manager = None
    held = [hold_model(directory) for directory in directories.values()]
    try:
        from emberline.server.tracing import open_tracing
        from emberline.worker.assembly import assemble_server, preload_resources
        from emberline.worker.management import open_management

        parts = await asyncio.to_thread(preload_resources, config, directories)
        await starting
        service = "emberline-server" if config.worker is None else "emberline-worker"
        async with open_tracing(config.trace, service, _worker_name(config.worker, port)) as spans:
            assembled = assemble_server(config, parts, engine, spans, tls)
            manager = open_management(config, engine_config, assembled)
            _log_models(engine.model_info)
            if config.worker is not None:
                registrar = _make_registrars(config.worker, config, port, assembled.app, tls)

            def announce_ready() -> None:
                _log_ready(f"{config.scheme}://{config.host}:{port}", engine.model_info, start_time)
                if registrar is not None:
                    registrar.start()

            async def announce_shutdown() -> None:
                engine.block_events.close()
                if registrar is not None:
                    await registrar.announce_shutdown()

            guarded = CrossSiteGuard(assembled.app, _cross_site_policy(config, listener))
            await serve_until_stopped(guarded, listener, announce_ready, announce_shutdown, server=server)
            await wait_until_blocks_are_fetched(engine)
    finally:
        if registrar is not None:
            await registrar.stop()
        starting.cancel()
        if manager is not None:
            await manager.stop()
        await engine.stop()
        for each in held:
            each.close()
        if assembled is not None:
            assembled.close()


def _prepare_worker(config: ServerConfig, listener: socket.socket) -> ServerConfig:
    """Return the settings with the worker's URL added; unchanged if this server is not a worker.

    For a worker, also let the listener close connections whose other end acknowledges no data for ROUTER_TIMEOUT_S.
    Raises InvalidRequest if routers could not reach the worker, or would reject its name or address."""
    if config.worker is None:
        return config
    port = listener.getsockname()[1]
    limit_silence(listener, ROUTER_TIMEOUT_S)
    worker = with_reachable_url(config.worker, config.host, port, config.scheme)
    check_worker_address(worker, config.host, port)
    return replace(config, worker=worker)


def _build_engine_configs(config: EngineConfig, directories: Mapping[str, Path]) -> dict[str, EngineConfig]:
    """Return each model's engine config, by the model's name."""
    return {
        name: replace(config.with_kv_ports(i), model=str(directory))
        for i, (name, directory) in enumerate(directories.items())
    }


def _check_access(config: ServerConfig, listener: socket.socket) -> ServerConfig:
    """Raise InvalidRequest if other machines could use the server without a key.

    Return the config to use. If other machines can reach a worker that has no API keys, that config accepts only
    requests with the cluster key.
    """
    cluster_key = config.cluster_key if config.worker is not None else None
    hint = "set EMBERLINE_API_KEY" + (", or EMBERLINE_CLUSTER_KEY to accept the router only" if config.worker else "")
    authenticated = bool(config.api_keys or cluster_key)
    check_exposure(listener, is_authenticated=authenticated, allows_anyone=config.open, hint=hint)
    return replace(config, closed=is_exposed(listener) and not config.open and not config.api_keys)


def _cross_site_policy(config: ServerConfig, listener: socket.socket) -> CrossSitePolicy:
    hostname = (
        urlsplit(config.worker.worker_url).hostname if config.worker is not None and config.worker.worker_url else None
    )
    return CrossSitePolicy.build(
        config.cors_origins,
        (*config.allowed_hosts, *([hostname] if hostname else [])),
        is_loopback=not is_exposed(listener),
        is_authenticated=bool(config.api_keys),
    )


async def wait_until_blocks_are_fetched(engine: AsyncEngine) -> None:
    """Wait until other workers have read the KV blocks that this worker keeps for them, or until a time limit.

    After the time limit the other workers compute these blocks themselves.
    """
    deadline = engine.now() + LEASE_DRAIN_TIMEOUT_S
    while engine.state is EngineState.READY and engine.now() < deadline:
        transfer = Stats.total(engine.stats.values()).transfer
        if transfer is None or not transfer.leases:
            return
        await asyncio.sleep(0.05)


def _make_registrars(
    worker: WorkerConfig, config: ServerConfig, port: int, app: EngineApp, tls: TLSIdentity | None
) -> RegistrarGroup:
    from emberline.cluster.registrar_group import RegistrarGroup
    from emberline.worker.router_link_metrics import build_router_metrics
    from emberline.worker.worker_reporter import WorkerReporter

    name, url = _worker_name(worker, port), _worker_url(worker, config.host, port, config.scheme)
    reporter = WorkerReporter(name, app.incarnation, url, worker.role, app.engine, app.served_models)
    registrars = RegistrarGroup(
        worker.routers,
        config.cluster_key,
        reporter.build_registration,
        reporter.build_heartbeat,
        reporter.update_peers,
        tls.peer_client_context() if tls is not None else None,
    )
    app.extra_metrics = lambda: build_router_metrics(registrars.registrars)
    return registrars


def check_worker_address(worker: WorkerConfig, host: str, port: int) -> None:
    """Raise InvalidRequest if a router would reject this worker's name or address."""
    from emberline.cluster.registration import ModelRegistration, WorkerRegistration

    try:
        WorkerRegistration(
            _worker_name(worker, port), "none yet", _worker_url(worker, host, port), (ModelRegistration("any"),)
        )
    except ValueError as error:
        hint = "check --worker-name and --worker-url"
        raise InvalidRequest(f"invalid worker name or URL: {error}", param="worker", hint=hint) from error


def with_reachable_url(worker: WorkerConfig, host: str, port: int, scheme: str = "http") -> WorkerConfig:
    """Return the config with a URL that the router can reach.

    For a worker that listens on all interfaces, the URL has the address of the interface that leads to the router.
    Raises InvalidRequest if that address cannot be found.
    """
    from emberline.cluster.address import find_outgoing_address, is_unspecified_address

    if worker.worker_url or not is_unspecified_address(host):
        return worker
    try:
        found = find_outgoing_address(worker.routers[0])
    except (OSError, ValueError) as e:
        what = f"cannot determine this machine's address towards the router {worker.routers[0]}: {e}"
        raise InvalidRequest(what, param="worker_url", hint=f"set --worker-url {scheme}://HOST:PORT") from e
    return replace(worker, worker_url=f"{scheme}://{f'[{found}]' if ':' in found else found}:{port}")


def _worker_url(worker: WorkerConfig, host: str, port: int, scheme: str = "http") -> str:
    return worker.worker_url or f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _worker_name(worker: WorkerConfig | None, port: int) -> str:
    """Return --worker-name, else host and port of the worker's URL, else the hostname and port.

    The URL comes before the hostname because cloned machines may have equal hostnames."""
    if worker is None:
        return f"{socket.gethostname()}:{port}"
    return worker.worker_name or (
        urlsplit(worker.worker_url).netloc if worker.worker_url else f"{socket.gethostname()}:{port}"
    )


def _add_transfer(engine_config: EngineConfig, config: ServerConfig, port: int) -> EngineConfig:
    """Return the engine's settings with those of KV transfers, if this is a worker that exchanges KV blocks."""
    worker = config.worker
    if worker is None or worker.can_sleep:
        return engine_config
    hostname = urlsplit(worker.worker_url).hostname if worker.worker_url else None
    name, is_required = _worker_name(worker, port), worker.role != "both"
    transfer = TransferConfig(name, config.host, advertised_host=hostname, tls=config.tls, required=is_required)
    return replace(engine_config, transfer=transfer)


def _log_models(info_by_model: Mapping[str, LoadedModelInfo]) -> None:
    for name, info in info_by_model.items():
        dtype = "" if info.numerics is None else info.numerics.dtype
        if info.stored_dtype == "float16" and dtype == "bfloat16":
            hint = "--dtype float16 on a CPU, or --dtype float32 in twice the memory, keeps the exact values"
            log.info("Weights rounded: model=%s from=float16 to=bfloat16 (hint: %s)", name, hint)
        elif info.numerics is not None and info.numerics.weights.partition("+")[0] in QUANTISED_WEIGHTS:
            form = info.numerics.weights.partition("+")[0]
            if form in ("gguf", "quantised"):
                log.info("Weights kept quantised: model=%s format=%s", name, info.stored_dtype)
            else:
                log.info("Weights quantised: model=%s from=%s kept_as=%s", name, info.stored_dtype, form)
        elif info.stored_dtype not in ("", "float16", "bfloat16", "float32"):
            log.info("Weights dequantised: model=%s from=%s kept_as=%s", name, info.stored_dtype, dtype)
        if info.full_context:
            hint = f"--max-context N, up to {info.full_context}, serves longer requests"
            log.info("Default context cut: model=%s model_context_tokens=%d (hint: %s)", name, info.full_context, hint)
        log.info(
            "Model loaded: model=%s dtype=%s context_tokens=%d kv_tokens=%d kv_groups=%d full_contexts=%.1f "
            "weights_mb=%.0f kv_cache_mb=%.0f ranks=%d kernels=%r",
            name,
            dtype,
            info.max_context,
            info.kv_tokens,
            info.kv_groups,
            info.kv_contexts,
            info.weight_bytes / 1e6,
            info.kv_bytes / 1e6,
            max(1, len(info.ranks)),
            info.kernels,
        )
        stages = {each.stage: each for each in info.ranks}
        if len(stages) > 1:
            layers, shares = [each.layers for each in stages.values()], [each.cost_share for each in stages.values()]
            log.info(
                "Layers divided into stages: model=%s layers=%s measured_cost=%s",
                name,
                ",".join(map(str, layers)),
                ",".join(f"{share:.3f}" for share in shares) if any(shares) else "none",
            )


def _log_ready(url: str, info_by_model: Mapping[str, LoadedModelInfo], start_time: float) -> None:
    """Log that the server is ready, with the seconds of each start-up phase added up over all models."""
    phases: dict[str, float] = {}
    for info in info_by_model.values():
        for phase, seconds in info.seconds.items():
            phases[phase] = seconds if phase == "imports" else phases.get(phase, 0.0) + seconds
    phase_list = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases.items())
    log.info("Server ready: url=%s seconds=%.2f phases=%r", url, time.monotonic() - start_time, phase_list)
