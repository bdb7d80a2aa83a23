"""serve: a serving process from start to stop. The engine process starts first; all else is read while it loads."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from emberline.core.config import EngineConfig, FleetConfig, ServerConfig, TransferConfig, WorkerConfig
from emberline.core.errors import InvalidRequest
from emberline.core.events import Stats
from emberline.engine.messages import Facts
from emberline.engine.stream import AsyncEngine, State
from emberline.hub.source import resolve
from emberline.server.crosssite import CrossSiteGuard, CrossSitePolicy
from emberline.server.listening import answer_while_loading, bind, check_exposed, is_exposed, listen

if TYPE_CHECKING:
    from emberline.cluster.registrar import Registrar
    from emberline.server.worker.engine_app import EngineApp

log = logging.getLogger("emberline.server")

HANDING_ON = 5.0  # seconds

T = TypeVar("T")


async def serve(config: ServerConfig, engine_config: EngineConfig, rules: FleetConfig, began: float) -> None:
    """Runs until told to stop by a signal. `began` is when the process started, on the monotonic clock."""
    listener = bind(config.host, config.port)
    port = listener.getsockname()[1]
    config = _guarded(config, listener)
    if config.worker is not None:
        config = replace(config, worker=reachable(config.worker, config.host, port))
        assert config.worker is not None
        check_place(config.worker, config.host, port)
    server = await answer_while_loading(listener)
    directories = await _in_thread(lambda: {name: resolve(source) for name, source in config.models.items()})
    if config.worker is not None:
        engine_config = replace(engine_config, transfer=_transfer(config.worker, config.host, port))
    configs = {
        name: replace(engine_config.with_kv_ports(i), model=str(directory))
        for i, (name, directory) in enumerate(directories.items())
    }
    engine = AsyncEngine(configs, rules, stall_timeout=config.stall_timeout)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)  # lets it spawn the process before the imports below hold this one up
    assembled = registrar = None
    try:
        from emberline.server.tracing import tracing
        from emberline.server.worker.assembly import assemble, read_parts

        parts = await asyncio.to_thread(read_parts, config, directories)
        await starting
        service = "emberline-server" if config.worker is None else "emberline-worker"
        async with tracing(config.trace, service, _name(config.worker, port)) as spans:
            assembled = assemble(config, parts, engine, spans)
            _announce(engine.ready)
            if config.worker is not None:
                registrar = _registrar(config.worker, config, port, assembled.app)

            def ready() -> None:
                _ready(config.host, port, engine.ready, began)
                if registrar is not None:
                    registrar.start()

            async def leaving() -> None:
                engine.ledger.close()
                if registrar is not None:
                    await registrar.leave()

            guarded = CrossSiteGuard(assembled.app, _cross_site(config, listener))
            await listen(guarded, listener, ready, leaving, server=server)
            await handed_on(engine)
    finally:
        if registrar is not None:
            await registrar.stop()
        starting.cancel()
        await engine.stop()
        if assembled is not None:
            assembled.close()


async def _in_thread(work: Callable[[], T]) -> T:
    """The work's result. It may be a download of minutes, during which requests are answered, and Ctrl-C must end the
    process: asyncio's own threads would be waited for."""
    done: Future[T] = Future()

    def run() -> None:
        done.set_running_or_notify_cancel()
        try:
            done.set_result(work())
        except BaseException as e:
            done.set_exception(e)

    threading.Thread(target=run, name="loading", daemon=True).start()
    return await asyncio.wrap_future(done)


def _guarded(config: ServerConfig, listener: socket.socket) -> ServerConfig:
    """A worker beyond this machine without API keys answers only its router, by the cluster key."""
    cluster_key = config.worker.cluster_key if config.worker is not None else None
    hint = "give --api-key KEY" + (", or a cluster key for calls of the router alone" if config.worker else "")
    authenticated = bool(config.api_keys or cluster_key)
    check_exposed(listener, authenticated=authenticated, is_open=config.open, hint=hint)
    return replace(config, closed=is_exposed(listener) and not config.open and not config.api_keys)


def _cross_site(config: ServerConfig, listener: socket.socket) -> CrossSitePolicy:
    reached = urlsplit(config.worker.url).hostname if config.worker is not None and config.worker.url else None
    return CrossSitePolicy.of(
        config.cors_origins,
        (*config.allowed_hosts, *([reached] if reached else [])),
        loopback=not is_exposed(listener),
        authenticated=bool(config.api_keys),
    )


async def handed_on(engine: AsyncEngine) -> None:
    """What was computed for others is theirs to take; who does not in time computes it again."""
    until = engine.now() + HANDING_ON
    while engine.state is State.READY and engine.now() < until:
        moving = Stats.total(engine.stats.values()).transfer
        if moving is None or not moving.leases:
            return
        await asyncio.sleep(0.05)


def _registrar(worker: WorkerConfig, config: ServerConfig, port: int, app: EngineApp) -> Registrar:
    from emberline.cluster.registrar import Registrar
    from emberline.server.worker.presence import Presence

    name, url = _name(worker, port), _url(worker, config.host, port)
    us = Presence(name, uuid.uuid4().hex, url, worker.role, app.engine, app.served)
    return Registrar(worker.router, worker.cluster_key, us.card, us.beat, us.meet)


def check_place(worker: WorkerConfig, host: str, port: int) -> None:
    """Before anything is loaded: whether a router would take a worker of this name and address."""
    from emberline.cluster.card import Card, ModelCard

    try:
        Card(_name(worker, port), "none yet", _url(worker, host, port), (ModelCard("any"),))
    except ValueError as error:
        raise InvalidRequest(f"no router would take this worker: {error}", param="worker") from error


def reachable(worker: WorkerConfig, host: str, port: int) -> WorkerConfig:
    """With the URL of this machine's address towards the router, if the worker listens on all interfaces."""
    from emberline.cluster.address import is_unspecified, outgoing_address

    if worker.url or not is_unspecified(host):
        return worker
    try:
        found = outgoing_address(worker.router)
    except (OSError, ValueError) as e:
        what = f"cannot find this machine's address towards the router {worker.router}: {e}"
        raise InvalidRequest(what, param="worker_url", hint="give --worker-url http://HOST:PORT") from e
    return replace(worker, url=f"http://{f'[{found}]' if ':' in found else found}:{port}")


def _url(worker: WorkerConfig, host: str, port: int) -> str:
    return worker.url or f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _name(worker: WorkerConfig | None, port: int) -> str:
    """By default the address under which it is reached: hostnames may be equal, as those of cloned machines are."""
    if worker is None:
        return f"{socket.gethostname()}:{port}"
    return worker.name or (urlsplit(worker.url).netloc if worker.url else f"{socket.gethostname()}:{port}")


def _transfer(worker: WorkerConfig, host: str, port: int) -> TransferConfig:
    """Blocks are exchanged where requests are, under the same name."""
    reached = urlsplit(worker.url).hostname if worker.url else None
    return TransferConfig(_name(worker, port), host, advertise=reached, required=worker.role != "both")


def _announce(ready: Mapping[str, Facts]) -> None:
    for name, facts in ready.items():
        log.info(
            "%s: context %d, %d KV tokens, %.0f MB of weights, %.0f MB of cache; kernels: %s",
            name,
            facts.max_context,
            facts.kv_tokens,
            facts.weight_bytes / 1e6,
            facts.kv_bytes / 1e6,
            facts.kernels,
        )


def _ready(host: str, port: int, ready: Mapping[str, Facts], began: float) -> None:
    """Phases of all models together; they are imported for once."""
    phases: dict[str, float] = {}
    for facts in ready.values():
        for phase, seconds in facts.seconds.items():
            phases[phase] = seconds if phase == "imports" else phases.get(phase, 0.0) + seconds
    listed = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases.items())
    log.info("ready in %.2f s (%s) at http://%s:%d", time.monotonic() - began, listed, host, port)
