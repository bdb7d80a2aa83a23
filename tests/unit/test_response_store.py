"""Stored responses: only the API key that created them can continue, read, list and delete them."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import Answer, WorkerHarness

from emberline.core.errors import InvalidRequest
from emberline.core.tenants import make_tenant
from emberline.worker.engine_app import EngineApp
from emberline.worker.response_store import ResponseStore

PATH = "/v1/responses"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ResponseStore]:
    worker = ResponseStore(tmp_path / "new" / "responses.sqlite")
    yield worker
    worker.close()


def make_worker(store: ResponseStore | None, *keys: str) -> WorkerHarness:
    worker = WorkerHarness(lambda before, index: before + "abc")
    config = replace(worker.app._config, api_keys=keys)
    worker.app = EngineApp(config, worker.app.engine, worker.catalog, None, {}, response_store=store)
    return worker


def call(worker: WorkerHarness, method: str, path: str, key: str = "a", query: str = "") -> Answer:
    async def send_request() -> Answer:
        answer, inbox = Answer(), [{"type": "http.request", "body": b""}]

        async def receive() -> dict[str, Any]:
            return inbox.pop() if inbox else await asyncio.Future()

        headers = [(b"authorization", b"Bearer " + key.encode())]
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": query.encode()}
        await worker.app(scope, receive, answer.send)
        return answer

    return asyncio.run(send_request())


def create_response(worker: WorkerHarness, key: str = "a", **fields: Any) -> Answer:
    return worker.post(PATH, {"input": "hi", **fields}, authorization=f"Bearer {key}")


@pytest.mark.parametrize("stream", [False, True])
def test_previous_response_id_continues_conversation(store: ResponseStore, stream: bool) -> None:
    worker = make_worker(store)
    first = create_response(worker, stream=stream, request_id="one")
    assert first.status == 200
    second = create_response(worker, input="and then?", previous_response_id="resp_one").json
    assert (second["previous_response_id"], second["store"]) == ("resp_one", True)
    listed = call(worker, "GET", f"{PATH}/{second['id']}/input_items", query="order=asc").json
    assert [item["role"] for item in listed["data"]] == ["user", "assistant", "user"]
    assert listed["data"][1]["content"][0]["text"] == "abc" and listed["has_more"] is False
    page = call(worker, "GET", f"{PATH}/{second['id']}/input_items", query="limit=1").json
    assert page["data"][0]["content"] == "and then?" and page["has_more"] is True


def test_callers_of_one_gateway_cannot_continue_each_others_responses(store: ResponseStore) -> None:
    worker = make_worker(store, "gateway's")
    ann, bob = ({"x_emberline_tenant_salt": name, "authorization": "Bearer gateway's"} for name in ("ann", "bob"))
    first = worker.post(PATH, {"input": "hi"}, **ann).json["id"]
    assert worker.post(PATH, {"input": "go on", "previous_response_id": first}, **ann).status == 200
    for other in (bob, {"authorization": "Bearer gateway's"}):
        assert worker.post(PATH, {"input": "go on", "previous_response_id": first}, **other).status == 404


def test_read_and_delete_response(store: ResponseStore) -> None:
    worker = make_worker(store)
    response = create_response(worker).json
    where = f"{PATH}/{response['id']}"
    assert call(worker, "GET", where).json == response
    assert call(worker, "POST", where).status == 405
    assert call(worker, "POST", f"{where}/cancel").status == 400
    assert call(worker, "POST", "/v1/responses/resp_other/cancel").status == 404
    assert call(worker, "DELETE", where).json == {"id": response["id"], "object": "response", "deleted": True}
    assert call(worker, "GET", where).status == call(worker, "DELETE", where).status == 404
    assert create_response(worker, previous_response_id=response["id"]).status == 404


def test_referenced_items_are_replaced_by_the_stored_ones(store: ResponseStore) -> None:
    """The AI SDK refers to the items of earlier replies unless `store` is false."""
    worker = make_worker(store, "a", "b")
    item = create_response(worker).json["output"][0]
    user = {"role": "user", "content": "and then?"}
    for reference in ({"type": "item_reference", "id": item["id"]}, {"id": item["id"]}):
        reply = create_response(worker, input=[user, reference, user])
        assert reply.status == 200, reply.body
        listed = call(worker, "GET", f"{PATH}/{reply.json['id']}/input_items", query="order=asc").json["data"]
        assert [each["role"] for each in listed] == ["user", "assistant", "user"]
        assert listed[1]["content"][0]["text"] == "abc"
    for key, id_ in (("b", item["id"]), ("a", item["id"][:-1] + "7"), ("a", "msg_x_0"), ("a", "other")):
        refused = create_response(worker, key, input=[user, {"type": "item_reference", "id": id_}])
        assert refused.status == 404 and refused.json["error"]["param"] == "input", id_


def test_response_belongs_to_its_api_key(store: ResponseStore) -> None:
    worker = make_worker(store, "a", "b")
    response = create_response(worker).json
    where = f"{PATH}/{response['id']}"
    assert call(worker, "GET", where, "b").status == call(worker, "DELETE", where, "b").status == 404
    assert create_response(worker, "b", previous_response_id=response["id"]).status == 404
    assert call(worker, "GET", where, "wrong").status == 401
    assert call(worker, "GET", where).status == 200


def test_store_false_is_not_stored(store: ResponseStore) -> None:
    response = create_response(worker := make_worker(store), store=False)
    assert response.json["store"] is False and "x-emberline-ignored" not in response.headers
    assert call(worker, "GET", f"{PATH}/{response.json['id']}").status == 404


def test_server_without_store_rejects_previous_response_id() -> None:
    worker = make_worker(None)
    response = create_response(worker, store=True)
    assert response.json["store"] is False and response.headers["x-emberline-ignored"] == "store"
    rejected = create_response(worker, previous_response_id=response.json["id"])
    assert rejected.status == 400 and rejected.json["error"]["param"] == "previous_response_id"
    assert "--response-store" in rejected.json["error"]["message"]


def test_file_is_private_and_survives_restart(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    path.write_bytes(b"")
    path.chmod(0o644)
    first = ResponseStore(path)
    response = create_response(make_worker(first)).json
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    first.close()
    again = ResponseStore(path)
    assert call(make_worker(again), "GET", f"{PATH}/{response['id']}").json == response
    again.close()
    with pytest.raises(InvalidRequest):
        ResponseStore(tmp_path)


def test_a_tenant_keeps_its_responses_while_others_flood_the_store() -> None:
    store = ResponseStore(None, max_bytes=4000)
    response = {"output": [], "text": "x" * 300}
    for at in range(3):
        store.put("quiet", {"id": str(at), **response}, [])
    for at in range(50):
        store.put(f"flood {at % 2}", {"id": str(at), **response}, [])
    assert all(store.get("quiet", str(at)) is not None for at in range(3))
    kept = [at for at in range(50) if store.get(f"flood {at % 2}", str(at)) is not None]
    assert kept == list(range(50 - len(kept), 50)) and len(kept) >= 6
    store.put("quiet", {"id": "huge", "output": [], "text": "x" * 5000}, [])
    assert store.get("quiet", "huge") is None and store.get("flood 1", "49") is not None
    store.close()


def test_oldest_responses_are_evicted() -> None:
    store = ResponseStore(None, max_bytes=2000)
    for at in range(20):
        store.put("", {"id": str(at), "output": [], "text": "x" * 300}, [])
    kept = [at for at in range(20) if store.get("", str(at)) is not None]
    assert kept == list(range(20 - len(kept), 20)) and 3 <= len(kept) <= 6
    store.close()


def test_a_key_gets_no_larger_share_by_splitting_itself_into_tenants() -> None:
    store = ResponseStore(None, max_bytes=4000)
    response = {"output": [], "text": "x" * 300}
    quiet = make_tenant("quiet", "")
    for at in range(4):
        store.put(quiet, {"id": str(at), **response}, [])
    for at in range(50):
        store.put(make_tenant("flood", str(at)), {"id": str(at), **response}, [])
    assert all(store.get(quiet, str(at)) is not None for at in range(4))
    store.close()
