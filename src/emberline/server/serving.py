"""serve: a serving process from start to stop. The engine process starts first; all else is read while it loads."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from emberline.core.config import EngineConfig, FleetConfig, ServerConfig
from emberline.core.errors import InvalidRequest
from emberline.engine.messages import Facts
from emberline.engine.stream import AsyncEngine
from emberline.hub.source import resolve

log = logging.getLogger("emberline.server")


async def serve(config: ServerConfig, engine_config: EngineConfig, rules: FleetConfig, began: float) -> None:
    """Runs until told to stop by a signal. `began` is when the process started, on the monotonic clock."""
    listener = _bind(config)
    directories = {name: resolve(source) for name, source in config.models.items()}
    configs = {name: replace(engine_config, model=str(directory)) for name, directory in directories.items()}
    engine = AsyncEngine(configs, rules, stall_timeout=config.stall_timeout)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)  # lets it spawn the process before the imports below hold this one up
    assembled = None
    try:
        from emberline.server.assembly import assemble, read_parts

        parts = await asyncio.to_thread(read_parts, config, directories)
        await starting
        assembled = assemble(config, parts, engine)
        _announce(engine.ready)
        await _listen(assembled.app, listener, lambda: _ready(config, engine.ready, began))
    finally:
        starting.cancel()
        await engine.stop()
        if assembled is not None:
            assembled.close()


def _bind(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except (OSError, OverflowError) as e:
        listener.close()
        raise InvalidRequest(f"cannot listen on {config.host}:{config.port}: {e}", hint="choose another --port") from e
    return listener


async def _listen(app: Any, listener: socket.socket, ready: Callable[[], None]) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

    settings = uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_level="warning",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=10,
    )
    await Server(settings).serve([listener])


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


def _ready(config: ServerConfig, ready: Mapping[str, Facts], began: float) -> None:
    """Phases of all models together; they are imported for once."""
    phases: dict[str, float] = {}
    for facts in ready.values():
        for phase, seconds in facts.seconds.items():
            phases[phase] = seconds if phase == "imports" else phases.get(phase, 0.0) + seconds
    listed = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases.items())
    log.info("ready in %.2f s (%s) at http://%s:%d", time.monotonic() - began, listed, config.host, config.port)
