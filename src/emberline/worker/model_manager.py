"""ModelManager: pulls, loads, unloads and removes models while the server runs.

A model that is loaded at run time has an engine process of its own. The models that were named at the start share one
engine process; they stay until the server stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, ExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from emberline.api.model_management import SUCCESS, render_loading, render_pull_progress
from emberline.core.errors import InvalidRequest, Overloaded
from emberline.hub.cached_models import CachedModel, list_cached_models, remove_model
from emberline.hub.catalogue import load_catalogue
from emberline.hub.model_lock import hold_model
from emberline.hub.source import find_remote_source
from emberline.worker.catalog import LoadedModel, ModelCatalog
from emberline.worker.memory_check import check_available_memory, read_available_bytes
from emberline.worker.model_puller import ModelPuller

log = logging.getLogger("emberline.server")

DRAIN_POLL_S = 0.02
MAX_RUNTIME_MODELS = 16


class Loader(Protocol):
    async def load(self, name: str, directory: Path) -> LoadedModel: ...


@dataclass(slots=True)
class RuntimeModel:
    model: LoadedModel
    source: str
    held: ExitStack  # the lock on the model's directory


class ModelManager:
    def __init__(
        self,
        catalog: ModelCatalog,
        first_models: Mapping[str, str],
        loader: Loader,
        puller: ModelPuller,
        cache: Path,
        *,
        can_load: bool = True,
    ) -> None:
        """`first_models`: sources of the models that were named at the start, by their names."""
        self._catalog = catalog
        self._first_models = dict(first_models)
        self._loader = loader
        self._puller = puller
        self._cache = cache
        self._can_load = can_load
        self._runtime_models: dict[str, RuntimeModel] = {}
        self._changing = asyncio.Lock()  # held while a model is loaded, unloaded or removed

    async def pull(self, name: str) -> AsyncGenerator[dict[str, Any], None]:
        """Download a model, and yield lines of progress."""
        source = find_remote_source(name)
        yield render_pull_progress(name, 0, 0)
        async with aclosing(self._puller.pull(source)) as reports:
            async for report in reports:
                if report.completed or report.total:
                    yield render_pull_progress(name, report.completed, report.total)
        yield SUCCESS

    async def load(self, name: str) -> AsyncGenerator[dict[str, Any], None]:
        """Download a model if necessary and serve it under this name. Yield lines of progress."""
        source = find_remote_source(name)
        if not self._is_served(name):
            self._check_can_load()
            async with aclosing(self.pull(name)) as lines:
                async for line in lines:
                    if line is not SUCCESS:
                        yield line
            yield render_loading(name)
            async with self._changing:
                if not self._is_served(name):
                    await self._load(name.removesuffix(":latest"), source)
        yield SUCCESS

    async def unload(self, name: str, timeout_s: float) -> None:
        """Stop serving a model. Requests that are open have `timeout_s` to end; then they fail."""
        async with self._changing:
            await self._unload(name, timeout_s)

    async def remove(self, name: str, *, unload_timeout_s: float | None = None) -> CachedModel:
        """Delete a model from the cache. Raises ModelInUse if it is served by this server or another.

        `unload_timeout_s`: unload the model first if it was loaded at run time; None: do not.
        """
        source = find_remote_source(name)
        async with self._changing:
            users = [each for each in self._runtime_models.values() if each.source == source]
            for user in users if unload_timeout_s is not None else ():
                await self._unload(user.model.name, unload_timeout_s or 0.0)
            removed = await asyncio.to_thread(remove_model, source, self._cache)
        log.info("Model removed: model=%s bytes=%d", removed.name, removed.num_bytes)
        return removed

    async def describe(self) -> dict[str, Any]:
        """Return the served models, those in the cache, the open downloads, and the models with a short name."""
        cached = await asyncio.to_thread(list_cached_models, self._cache)
        served = []
        for model in self._catalog:
            runtime = self._runtime_models.get(model.name)
            served.append(
                {
                    "name": model.name,
                    "source": runtime.source if runtime else self._first_models.get(model.name, ""),
                    "can_unload": runtime is not None,
                    "open_requests": model.generator.engine.num_open_submissions,
                    "context": model.generator.prompt_builder.max_context,
                }
            )
        entries = [{"name": each.name, "bytes": each.num_bytes, "changed": int(each.changed_at)} for each in cached]
        pulls = [
            {"source": source, "completed": report.completed, "total": report.total}
            for source, report in self._puller.open_pulls.items()
        ]
        catalogue = [
            {
                "name": entry.name,
                "source": entry.source,
                "parameters": int(entry.parameters),
                "download_bytes": int(entry.download_gb * 1e9),
                "gpu_bytes": int(entry.full_gb * 1e9),
                "context": entry.context,
                "licence": entry.licence,
            }
            for entry in load_catalogue().values()
        ]
        return {
            "served": served,
            "cached": entries,
            "pulling": pulls,
            "catalogue": catalogue,
            "available_bytes": await asyncio.to_thread(read_available_bytes),
        }

    async def stop(self) -> None:
        async with AsyncExitStack() as stack:
            for runtime in self._runtime_models.values():
                self._catalog.remove(runtime.model.name)
                stack.push_async_callback(_stop_model, runtime)
            self._runtime_models = {}

    def _is_served(self, name: str) -> bool:
        served = {*self._first_models, *self._runtime_models}
        return name in served or name.removesuffix(":latest") in served

    def _check_can_load(self) -> None:
        if not self._can_load:
            hint = "start another worker for the model"
            raise InvalidRequest("a worker of a router serves the models it was started with", hint=hint)

    async def _load(self, name: str, source: str) -> None:
        if len(self._runtime_models) >= MAX_RUNTIME_MODELS:
            raise Overloaded(
                f"{MAX_RUNTIME_MODELS} models are loaded, which is the limit", hint="unload one: /admin/models/unload"
            )
        directory = await self._puller.pull_directory(source)
        held = hold_model(directory)
        try:
            await asyncio.to_thread(check_available_memory, name, directory)
            model = await self._loader.load(name, directory)
        except BaseException:
            held.close()
            raise
        self._runtime_models[name] = RuntimeModel(model, source, held)
        self._catalog.add(model)
        log.info("Model loaded at run time: model=%s source=%s", name, source)

    async def _unload(self, name: str, timeout_s: float) -> None:
        model = self._catalog[name]
        runtime = self._runtime_models.get(model.name)
        if runtime is None:
            hint = "stop the server, or start it without the model"
            message = f"model {model.name} was named at the start of this server, and stays until it stops"
            raise InvalidRequest(message, param="model", hint=hint)
        self._catalog.remove(model.name)
        del self._runtime_models[model.name]
        engine = model.generator.engine
        deadline = engine.now() + timeout_s
        while engine.num_open_submissions and engine.now() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        failed = engine.num_open_submissions
        await _stop_model(runtime)
        log.info("Model unloaded: model=%s failed_requests=%d", model.name, failed)


async def _stop_model(runtime: RuntimeModel) -> None:
    await runtime.model.generator.engine.stop()
    await asyncio.to_thread(runtime.model.close)
    runtime.held.close()
