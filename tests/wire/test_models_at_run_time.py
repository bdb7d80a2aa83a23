"""Models that are pulled, loaded, used, unloaded and removed while the server runs, from a fake hub."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bytelevel
import pytest
import tiny
from hub_server import Page, Site, serve_repository, serving
from servers import Server, start_server, stop_server

API_KEY, ADMIN_KEY = "api-key", "admin-key"
NAME = "hf:org/name"
HELLO: Any = [{"role": "user", "content": "hello"}]


def write_model(home: Path, seed: int) -> Path:
    made = bytelevel.build()
    sizes = {"vocab_size": made.get_vocab_size(), "eos_token_id": made.token_to_id("<|end|>")}
    tiny.write(home, tiny.config("llama", max_position_embeddings=512, **sizes), seed=seed)
    made.save(str(home / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (home / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))
    return home


@dataclass
class Managed:
    server: Server
    site: Site
    cache: Path


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Managed]:
    root = tmp_path_factory.mktemp("managed")
    first, other = write_model(root / "first", 1), write_model(root / "other", 2)
    with serving() as site:
        serve_repository(site, {file.name: file.read_bytes() for file in other.iterdir()})
        settings = {"EMBERLINE_CACHE": str(root / "cache"), "HF_ENDPOINT": site.url, "HF_HUB_OFFLINE": "0"}
        keys = ("--api-key", API_KEY, "--admin-key", ADMIN_KEY)
        options = ("--served-name", "first", "--embedder", "none", "--kv-memory", "64M", *keys)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            server = start_server(root / "log", str(first), *options)
        yield Managed(server, site, root / "cache")
        stop_server(server)


def call(
    managed: Managed, path: str, body: Any = None, *, key: str = ADMIN_KEY, method: str | None = None
) -> tuple[int, Any]:
    """Return the status, and the JSON value or the list of values of a stream."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(managed.server.url + path, data, headers, method=method)
    try:
        reply = urllib.request.urlopen(request, timeout=120)
    except urllib.error.HTTPError as error:
        reply = error
    with reply:
        text = reply.read()
        if "ndjson" in reply.headers["content-type"]:
            return reply.status, [json.loads(line) for line in text.splitlines()]
        return reply.status, json.loads(text)


def chat(managed: Managed, model: str, **fields: Any) -> tuple[int, Any]:
    body = {"model": model, "messages": HELLO, "max_tokens": 4, "temperature": 0, **fields}
    return call(managed, "/v1/chat/completions", body, key=API_KEY)


def list_served(managed: Managed) -> list[str]:
    return [model["id"] for model in call(managed, "/v1/models", key=API_KEY)[1]["data"]]


def list_cached(managed: Managed) -> list[str]:
    return [model["name"] for model in call(managed, "/admin/models")[1]["cached"]]


def remove_all(managed: Managed) -> None:
    call(managed, "/api/delete", {"model": NAME}, method="DELETE")
    assert list_cached(managed) == [] and list_served(managed) == ["first"]


def test_model_is_pulled_loaded_used_unloaded_and_removed(managed: Managed) -> None:
    remove_all(managed)
    assert chat(managed, NAME)[0] == 404
    status, lines = call(managed, "/admin/models/pull", {"model": NAME})
    assert status == 200 and lines[-1] == {"status": "success"}
    assert max(line.get("completed", 0) for line in lines) > 10_000
    assert all(line["completed"] <= line["total"] for line in lines if "total" in line)
    assert list_cached(managed) == [NAME] and list_served(managed) == ["first"]
    assert call(managed, "/admin/models/load", {"model": NAME})[1][-1] == {"status": "success"}
    assert list_served(managed) == ["first", NAME]
    answers = [chat(managed, model) for model in ("first", NAME, NAME)]
    assert [status for status, _ in answers] == [200] * 3
    texts = [reply["choices"][0]["message"]["content"] for _, reply in answers]
    assert texts[1] == texts[2]
    assert call(managed, "/admin/models/remove", {"model": NAME})[0] == 409
    assert call(managed, "/admin/models/unload", {"model": NAME}) == (200, {"status": "success"})
    assert chat(managed, NAME)[0] == 404 and chat(managed, "first")[0] == 200
    status, removed = call(managed, "/admin/models/remove", {"model": NAME})
    assert status == 200 and removed["model"] == NAME and removed["bytes"] > 10_000
    assert list_cached(managed) == []


def test_concurrent_pulls_share_one_download(managed: Managed) -> None:
    remove_all(managed)
    before = len(managed.site.seen)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(call, managed, "/admin/models/pull", {"model": NAME}) for _ in range(4)]
        assert [future.result()[1][-1] for future in futures] == [{"status": "success"}] * 4
    fetched = [path for method, path, _ in managed.site.seen[before:] if method == "GET" and "safetensors" in path]
    assert len(fetched) == 1
    remove_all(managed)


def test_interrupted_download_is_an_error_and_can_be_repeated(managed: Managed) -> None:
    remove_all(managed)
    path = next(path for path in managed.site.pages if path.endswith("model.safetensors"))
    whole = managed.site.pages[path]
    managed.site.pages[path] = Page(b"forbidden", status=403)
    try:
        status, lines = call(managed, "/admin/models/pull", {"model": NAME})
        assert status == 200 and "hf:org/name" in lines[-1]["error"]["message"]
        status, reply = call(managed, "/api/pull", {"model": NAME, "stream": False})
        assert status == 502 and "hf:org/name" in reply["error"]
    finally:
        managed.site.pages[path] = whole
    assert call(managed, "/admin/models/pull", {"model": NAME})[1][-1] == {"status": "success"}
    remove_all(managed)


def test_unloading_waits_for_open_requests(managed: Managed) -> None:
    call(managed, "/admin/models/load", {"model": NAME})
    started = threading.Event()
    body = {"model": NAME, "prompt": "a", "max_tokens": 300, "stream": True, "ignore_eos": True}
    headers = {"content-type": "application/json", "authorization": f"Bearer {API_KEY}"}
    request = urllib.request.Request(managed.server.url + "/v1/completions", json.dumps(body).encode(), headers)

    def stream() -> bytes:
        with urllib.request.urlopen(request, timeout=120) as reply:
            first = reply.readline()
            started.set()
            return bytes(first + reply.read())

    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(stream)
        assert started.wait(60)
        assert call(managed, "/admin/models/unload", {"model": NAME, "timeout_s": 100})[0] == 200
        events = text.result()
    assert b"error" not in events and events.endswith(b"data: [DONE]\n\n")
    remove_all(managed)


def test_model_of_the_start_stays(managed: Managed) -> None:
    status, reply = call(managed, "/admin/models/unload", {"model": "first"})
    assert status == 400 and "was named at the start" in reply["error"]["message"]
    assert call(managed, "/admin/models/load", {"model": "smolm2"})[0] == 400
    assert chat(managed, "first")[0] == 200


@pytest.mark.parametrize("path", ["/admin/models/pull", "/admin/models/load", "/admin/models/remove", "/api/pull"])
@pytest.mark.parametrize("name", ["", "/etc", "../first", "hf:org/..", "hf:org/name/../../x.gguf", "hf:org", "x\n"])
def test_names_cannot_be_paths(managed: Managed, path: str, name: str) -> None:
    status, reply = call(managed, path, {"model": name})
    assert status == 400 and "error" in reply


def test_admin_key_is_required(managed: Managed) -> None:
    for method, path in (("GET", "/admin/models"), ("POST", "/api/pull"), ("DELETE", "/api/delete")):
        for key in (API_KEY, "wrong"):
            status, reply = call(managed, path, {"model": NAME} if method != "GET" else None, key=key, method=method)
            assert status == 401 and "admin key" in str(reply["error"])
    assert chat(managed, "first")[0] == 200
    assert call(managed, "/v1/models", key=ADMIN_KEY)[0] == 200


def test_ollama_client_pulls_uses_and_deletes(managed: Managed) -> None:
    lines = call(managed, "/api/pull", {"name": NAME})[1]
    assert any("digest" in line and "completed" in line for line in lines) and lines[-1] == {"status": "success"}
    names = [model["name"] for model in call(managed, "/api/tags", key=API_KEY)[1]["models"]]
    assert names == ["first:latest", f"{NAME}:latest"]
    request = {"model": f"{NAME}:latest", "messages": HELLO, "stream": False, "options": {"num_predict": 3}}
    assert call(managed, "/api/chat", request, key=API_KEY)[1]["done"] is True
    assert call(managed, "/api/show", {"model": NAME}, key=API_KEY)[1]["model_info"]["general.architecture"] == "llama"
    assert call(managed, "/api/delete", {"model": NAME}, method="DELETE") == (200, {"status": "success"})
    assert list_served(managed) == ["first"] and list_cached(managed) == []
    assert call(managed, "/api/delete", {"model": NAME}, method="DELETE")[0] == 404
