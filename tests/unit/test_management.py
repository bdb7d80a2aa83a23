"""The management endpoints: keys, requests, and a manager with fake engines that loads, drains and unloads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scripted_engine import Answer, WorkerHarness

from emberline.core.config import ServerConfig
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError, InvalidRequest, ModelError, RequestForbidden, Unauthorized
from emberline.hub.pull_process import PullReport
from emberline.server.access import AccessPolicy
from emberline.server.exchange import Exchange
from emberline.worker import memory_check
from emberline.worker.catalog import LoadedModel
from emberline.worker.engine_app import EngineApp
from emberline.worker.management_handler import ManagementHandler
from emberline.worker.model_loader import ModelLoader
from emberline.worker.model_manager import ModelManager
from emberline.worker.model_puller import ModelPuller

SOURCE = "hf:org/name"


def exchange_with(key: str) -> Exchange:
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope: Any = {"method": "POST", "path": "/admin/models/pull", "headers": headers}
    return Exchange(scope, cast("Any", None), cast("Any", None))


def test_admin_routes_are_off_without_an_admin_key() -> None:
    for key in ("", "api"):
        with pytest.raises(RequestForbidden, match="has no admin key"):
            AccessPolicy(api_keys=("api",)).check(exchange_with(key), "admin")


def test_admin_key_opens_all_routes_and_an_api_key_does_not() -> None:
    policy = AccessPolicy(api_keys=("api",), admin_keys=("admin",))
    for required in ("admin", "key", "operator"):
        policy.check(exchange_with("admin"), required)
    policy.check(exchange_with("api"), "key")
    for key in ("", "api", "admin2"):
        with pytest.raises(Unauthorized):
            policy.check(exchange_with(key), "admin")


class FakeEngine:
    def __init__(self) -> None:
        self.num_open_submissions = 0
        self.stopped_with: int | None = None  # open requests
        self.clock = 0.0

    def now(self) -> float:
        self.clock += 1.0
        return self.clock

    async def stop(self) -> None:
        self.stopped_with = self.num_open_submissions


class FakePuller:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pulled: list[str] = []
        self.open_pulls = {"hf:org/other": PullReport(1, 4)}

    async def pull(self, source: str) -> AsyncGenerator[PullReport, None]:
        self.pulled.append(source)
        yield PullReport(5, 10)
        yield PullReport(directory=str(self.directory))

    async def pull_directory(self, source: str) -> Path:
        return self.directory


class FakeLoader:
    def __init__(self, like: LoadedModel) -> None:
        self.like = like
        self.engines: list[FakeEngine] = []
        self.error: EmberlineError | None = None

    async def load(self, name: str, directory: Path) -> LoadedModel:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.engines.append(FakeEngine())
        generator: Any = SimpleNamespace(engine=self.engines[-1], prompt_builder=SimpleNamespace(max_context=9))
        generator.prompt_builder.close = lambda: None
        checker: Any = SimpleNamespace(close=lambda: None)
        return replace(self.like, name=name, generator=generator, grammar_checker=checker)


class Managed:
    def __init__(self, tmp_path: Path, *, can_load: bool = True) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text("{}")
        self.worker = WorkerHarness(lambda before, index: before + "abc")
        (first,) = self.worker.catalog
        self.loader, self.puller = FakeLoader(first), FakePuller(tmp_path / "model")
        puller = cast("ModelPuller", self.puller)
        self.manager = ModelManager(
            self.worker.catalog, {"m": "m"}, self.loader, puller, tmp_path / "cache", can_load=can_load
        )
        config = replace(self.worker.app._config, api_keys=("api",), admin_keys=("admin",))
        app = EngineApp(config, self.worker.app.engine, self.worker.catalog, None, {})
        app.add_routes(ManagementHandler(self.manager).routes())
        self.worker.app = app

    @property
    def names(self) -> list[str]:
        return [model.name for model in self.worker.catalog]

    async def load(self, name: str = SOURCE) -> list[dict[str, Any]]:
        return [line async for line in self.manager.load(name)]

    def post(self, path: str, body: Any, key: str = "admin") -> Answer:
        return self.worker.post(path, body, authorization=f"Bearer {key}")


@pytest.fixture
def managed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Managed:
    monkeypatch.setattr("emberline.worker.model_manager.check_available_memory", lambda name, directory: None)
    return Managed(tmp_path)


def test_load_streams_progress_and_serves_the_model(managed: Managed) -> None:
    answer = managed.post("/admin/models/load", {"model": SOURCE})
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert answer.headers["content-type"] == "application/x-ndjson"
    statuses = [line["status"] for line in lines]
    assert statuses == [f"pulling {SOURCE}", f"pulling {SOURCE}", f"loading {SOURCE}", "success"]
    assert (lines[1]["completed"], lines[1]["total"]) == (5, 10) and lines[1]["digest"].startswith("sha256:")
    assert managed.names == ["m", SOURCE]
    whole = managed.post("/admin/models/load", {"model": SOURCE, "stream": False})
    assert whole.json == {"status": "success"} and len(managed.loader.engines) == 1


def test_description_has_all_that_a_page_shows(managed: Managed) -> None:
    asyncio.run(managed.load())
    cast("Any", managed.worker.engine).num_open_submissions = 0
    first, second = asyncio.run(managed.manager.describe())["served"]
    assert (first["name"], first["can_unload"], first["source"]) == ("m", False, "m")
    assert (second["name"], second["can_unload"], second["context"]) == (SOURCE, True, 9)
    described = asyncio.run(managed.manager.describe())
    assert described["pulling"] == [{"source": "hf:org/other", "completed": 1, "total": 4}]
    entry = next(entry for entry in described["catalogue"] if entry["name"] == "qwen3-0.6b")
    assert entry["licence"] == "Apache-2.0" and entry["download_bytes"] < entry["gpu_bytes"]
    assert described["cached"] == []
    assert described["available_bytes"] is None or described["available_bytes"] > 0


def test_wrong_key_is_refused_before_the_body_is_read(managed: Managed) -> None:
    for path in ("/admin/models/load", "/admin/models/remove", "/api/pull"):
        assert managed.post(path, b"no json", key="api").status == 401
        assert managed.post(path, b"no json").status == 400
    assert managed.puller.pulled == []


def test_concurrent_loads_start_one_engine(managed: Managed) -> None:
    async def load_twice() -> None:
        lines = await asyncio.gather(managed.load(), managed.load(f"{SOURCE}"))
        assert [each[-1] for each in lines] == [{"status": "success"}] * 2

    asyncio.run(load_twice())
    assert len(managed.loader.engines) == 1 and managed.names == ["m", SOURCE]


def test_failed_load_leaves_nothing(managed: Managed) -> None:
    managed.loader.error = ModelError("damaged")
    answer = managed.post("/admin/models/load", {"model": SOURCE})
    assert json.loads(answer.body.splitlines()[-1])["error"]["message"] == "damaged"
    assert managed.post("/api/pull", {"model": SOURCE, "stream": False}).json == {"error": "damaged"}
    assert managed.names == ["m"]
    managed.loader.error = None
    asyncio.run(managed.load())
    assert managed.names == ["m", SOURCE]


@pytest.mark.parametrize("ends_in_time", [True, False])
def test_unload_waits_for_open_requests_until_a_limit(managed: Managed, ends_in_time: bool) -> None:
    async def unload() -> None:
        await managed.load()
        (engine,) = managed.loader.engines
        engine.num_open_submissions = 1
        task = asyncio.create_task(managed.manager.unload(SOURCE, 1e9 if ends_in_time else 3.0))
        await asyncio.sleep(0)
        assert managed.names == ["m"] and engine.stopped_with is None
        if ends_in_time:
            engine.num_open_submissions = 0
        await task
        assert engine.stopped_with == (0 if ends_in_time else 1)

    asyncio.run(unload())


def test_models_of_the_start_stay(managed: Managed) -> None:
    with pytest.raises(InvalidRequest, match="named at the start"):
        asyncio.run(managed.manager.unload("m", 0.0))
    assert managed.names == ["m"]


def test_worker_of_a_router_loads_nothing(tmp_path: Path) -> None:
    managed = Managed(tmp_path, can_load=False)
    with pytest.raises(InvalidRequest, match="worker of a router"):
        asyncio.run(managed.load())
    assert managed.puller.pulled == []


def test_stop_ends_the_engines(managed: Managed) -> None:
    async def stop() -> None:
        await managed.load()
        await managed.manager.stop()

    asyncio.run(stop())
    assert [engine.stopped_with for engine in managed.loader.engines] == [0]


def test_model_larger_than_the_memory_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:     1000 kB\n")
    tensors = {"a": SimpleNamespace(nbytes=1000)}
    monkeypatch.setattr(memory_check.Checkpoint, "open", lambda directory: SimpleNamespace(tensors=tensors))
    monkeypatch.setattr(memory_check, "MEMINFO", meminfo)
    with pytest.raises(memory_check.NotEnoughMemory, match=r"needs about 1\.1 GB, and 0\.0 GB are available"):
        memory_check.check_available_memory("m", tmp_path)
    for text in ("MemAvailable: 9000000 kB\n", "other"):
        meminfo.write_text(text)
        memory_check.check_available_memory("m", tmp_path)


def test_loader_drops_the_kv_store_of_the_first_model_with_its_address() -> None:
    """Without the store, an address for it is an invalid setting, which ended workers with a store at their start."""
    engine = EngineConfig.build("m", kv_store="mooncake://127.0.0.1:5", kv_mooncake_host="127.0.0.1")
    assert ModelLoader(ServerConfig(), engine)._engine_config.network.kv_mooncake_host is None
