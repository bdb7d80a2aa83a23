"""Stored responses: only the API key that created them can continue, read, list and delete them."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import Answer, House

from emberline.core.errors import InvalidRequest
from emberline.server.worker.engine_app import EngineApp
from emberline.server.worker.response_store import ResponseStore

PATH = "/v1/responses"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ResponseStore]:
    made = ResponseStore(tmp_path / "new" / "responses.sqlite")
    yield made
    made.close()


def make_worker(store: ResponseStore | None, *keys: str) -> House:
    made = House(lambda before, index: before + "abc")
    config = replace(made.app._config, api_keys=keys)
    made.app = EngineApp(config, made.app.engine, made.catalog, None, {}, response_store=store)
    return made


def call(made: House, method: str, path: str, key: str = "a", query: str = "") -> Answer:
    async def asked() -> Answer:
        answer, inbox = Answer(), [{"type": "http.request", "body": b""}]

        async def receive() -> dict[str, Any]:
            return inbox.pop() if inbox else await asyncio.Future()

        headers = [(b"authorization", b"Bearer " + key.encode())]
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": query.encode()}
        await made.app(scope, receive, answer.take)
        return answer

    return asyncio.run(asked())


def ask(made: House, key: str = "a", **fields: Any) -> Answer:
    return made.post(PATH, {"input": "hi", **fields}, authorization=f"Bearer {key}")


@pytest.mark.parametrize("stream", [False, True])
def test_previous_response_id_continues_conversation(store: ResponseStore, stream: bool) -> None:
    made = make_worker(store)
    first = ask(made, stream=stream, request_id="one")
    assert first.status == 200
    second = ask(made, input="and then?", previous_response_id="resp_one").json
    assert (second["previous_response_id"], second["store"]) == ("resp_one", True)
    listed = call(made, "GET", f"{PATH}/{second['id']}/input_items", query="order=asc").json
    assert [item["role"] for item in listed["data"]] == ["user", "assistant", "user"]
    assert listed["data"][1]["content"][0]["text"] == "abc" and listed["has_more"] is False
    page = call(made, "GET", f"{PATH}/{second['id']}/input_items", query="limit=1").json
    assert page["data"][0]["content"] == "and then?" and page["has_more"] is True


def test_read_and_delete_response(store: ResponseStore) -> None:
    made = make_worker(store)
    said = ask(made).json
    where = f"{PATH}/{said['id']}"
    assert call(made, "GET", where).json == said
    assert call(made, "POST", where).status == 405
    assert call(made, "POST", f"{where}/cancel").status == 400
    assert call(made, "POST", "/v1/responses/resp_other/cancel").status == 404
    assert call(made, "DELETE", where).json == {"id": said["id"], "object": "response", "deleted": True}
    assert call(made, "GET", where).status == call(made, "DELETE", where).status == 404
    assert ask(made, previous_response_id=said["id"]).status == 404


def test_response_belongs_to_its_api_key(store: ResponseStore) -> None:
    made = make_worker(store, "a", "b")
    said = ask(made).json
    where = f"{PATH}/{said['id']}"
    assert call(made, "GET", where, "b").status == call(made, "DELETE", where, "b").status == 404
    assert ask(made, "b", previous_response_id=said["id"]).status == 404
    assert call(made, "GET", where, "wrong").status == 401
    assert call(made, "GET", where).status == 200


def test_store_false_is_not_stored(store: ResponseStore) -> None:
    said = ask(made := make_worker(store), store=False)
    assert said.json["store"] is False and "x-emberline-ignored" not in said.headers
    assert call(made, "GET", f"{PATH}/{said.json['id']}").status == 404


def test_server_without_store_rejects_previous_response_id() -> None:
    made = make_worker(None)
    said = ask(made, store=True)
    assert said.json["store"] is False and said.headers["x-emberline-ignored"] == "store"
    refused = ask(made, previous_response_id=said.json["id"])
    assert refused.status == 400 and refused.json["error"]["param"] == "previous_response_id"
    assert "--response-store" in refused.json["error"]["message"]


def test_file_is_private_and_survives_restart(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    path.write_bytes(b"")
    path.chmod(0o644)
    first = ResponseStore(path)
    said = ask(make_worker(first)).json
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    first.close()
    again = ResponseStore(path)
    assert call(make_worker(again), "GET", f"{PATH}/{said['id']}").json == said
    again.close()
    with pytest.raises(InvalidRequest):
        ResponseStore(tmp_path)


def test_oldest_responses_are_evicted() -> None:
    store = ResponseStore(None, max_bytes=2000)
    for at in range(20):
        store.put("", {"id": str(at), "output": [], "text": "x" * 300}, [])
    kept = [at for at in range(20) if store.get("", str(at)) is not None]
    assert kept == list(range(20 - len(kept), 20)) and 3 <= len(kept) <= 6
    store.close()
