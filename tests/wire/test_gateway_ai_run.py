"""/ai/run with any provider: envelope, streams, busy providers, and batches that survive a restart."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_gateway import LocalGateway
from routers import until

from emberline.gateway.run import batch_queue, run_handler

TEXT = "".join(f"word{i} " for i in range(8))
RUN = "/client/v4/accounts/default/ai/run"
KEY = {"authorization": "Bearer a-key-of-the-tests"}


def providers(urls: dict[str, str]) -> dict[str, Any]:
    return {
        "oai": {"base_url": urls["fake"]},
        "ant": {"base_url": urls["fake"], "speaks": ["anthropic"]},
        "workers-ai": {"base_url": f"{urls['fake']}/ai", "key": "of-workers"},
    }


def start_gateway(home: Path, **settings: Any) -> LocalGateway:
    return LocalGateway(home, ("fake",), providers, default_provider="oai", **settings)


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    with start_gateway(tmp_path_factory.mktemp("runs")) as made:
        yield made


def run(gateway: LocalGateway, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    status, _, answer = gateway.post(f"{RUN}{path}", body, KEY)
    return status, json.loads(answer)


@pytest.mark.parametrize("model", ["oai/@cf/some/model", "ant/claude", "@cf/meta/llama"])
def test_run_answers_prompt(gateway: LocalGateway, model: str) -> None:
    status, answer = run(gateway, f"/{model}", {"prompt": "What is it?", "max_tokens": 8})
    assert status == 200 and answer["success"] and answer["errors"] == answer["messages"] == []
    assert answer["result"]["response"] == TEXT and answer["result"]["usage"]["completion_tokens"] == 8
    request = gateway.fakes["fake"].requests[-1]
    assert request.json["messages"] == [{"role": "user", "content": "What is it?"}]
    assert request.json["model"] == model.removeprefix("oai/").removeprefix("ant/")


def test_model_may_be_in_the_body(gateway: LocalGateway) -> None:
    status, answer = run(gateway, "", {"model": "oai/m", "input": {"messages": [{"role": "user", "content": "x"}]}})
    assert status == 200 and answer["result"]["response"] == TEXT
    assert run(gateway, "", {"model": "oai/m"})[0] == 400


def test_tools_and_schemas_are_translated(gateway: LocalGateway) -> None:
    tool = {"name": "weather", "description": "d", "parameters": {"type": "object"}}
    form = {"type": "json_schema", "json_schema": {"type": "object"}}
    body = {"prompt": "x", "tools": [tool], "response_format": form}
    _, answer = run(gateway, "/m", body)
    assert answer["result"]["tool_calls"] == [{"name": "weather", "arguments": {"city": "Paris"}}]
    request = gateway.fakes["fake"].requests[-1].json
    assert request["tools"] == [{"type": "function", "function": tool}]
    assert request["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_text_is_embedded(gateway: LocalGateway) -> None:
    _, answer = run(gateway, "/m", {"text": ["a"]})
    assert answer["result"]["shape"] == [1, 2] and answer["result"]["data"] == [[0.25, -0.5]]


def test_run_streams(gateway: LocalGateway) -> None:
    tools = [{"name": "weather", "parameters": {}}]
    status, headers, answer = gateway.post(f"{RUN}/m", {"prompt": "x", "stream": True, "tools": tools}, KEY)
    events = [line.removeprefix("data: ") for line in answer.decode().split("\n\n") if line]
    assert status == 200 and headers["content-type"].startswith("text/event-stream") and events[-1] == "[DONE]"
    found = [json.loads(event) for event in events[:-1]]
    assert "".join(each["response"] for each in found) == TEXT
    assert [each["tool_calls"] for each in found if "tool_calls" in each] == [
        [{"name": "weather", "arguments": {"city": "Paris"}}]
    ]
    assert found[-1]["usage"]["completion_tokens"] == 8


def test_run_and_chat_share_the_cache(tmp_path: Path) -> None:
    with start_gateway(tmp_path, cache_ttl=60) as gateway:
        error = [run(gateway, "/m", {"prompt": "x"}) for _ in range(2)]
        chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        status, headers, answer = gateway.post("/accounts/default/ai/v1/chat/completions", chat, KEY)
        assert [each[0] for each in error] == [200, 200] and error[0] == error[1]
        assert status == 200 and headers["cf-aig-cache-status"] == "HIT" and "choices" in json.loads(answer)
        assert gateway.fakes["fake"].count == 1


FORM = {"prompt": "x", "response_format": {"type": "json_object"}}


def is_idle(gateway: LocalGateway) -> bool:
    return b"gateway_open_requests 0" in gateway.post("/metrics", b"", KEY, method="GET")[2]


def test_deeply_nested_json_stays_text(gateway: LocalGateway) -> None:
    gateway.fakes["fake"].text = "[" * 1500
    status, headers, answer = gateway.post(f"{RUN}/m", FORM, KEY)
    assert status == 200 and json.loads(answer)["result"]["response"] == "[" * 1500
    assert gateway.record(headers["cf-aig-log-id"]).success and is_idle(gateway)
    [row] = fetch_results(gateway, queue_batch(gateway, [FORM]))["responses"]
    assert row["success"] and row["result"]["response"] == "[" * 1500 and gateway.fakes["fake"].count == 2


def test_result_too_deep_for_a_batch_fails_alone(gateway: LocalGateway) -> None:
    fake = gateway.fakes["fake"]
    fake.text = "[" * 900 + "]" * 900
    assert gateway.post(f"{RUN}/m", FORM, KEY)[0] == 200 and is_idle(gateway)
    [row] = fetch_results(gateway, queue_batch(gateway, [FORM]))["responses"]
    assert row["error"]["code"] == 3043 and fake.count == 2, "the result is too deep to be stored"


def test_reply_is_closed_if_conversion_fails(gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(*_: Any) -> Any:
        raise RuntimeError("as told")

    monkeypatch.setattr(run_handler, "to_run_reply", odd)
    assert gateway.post(f"{RUN}/odd", {"prompt": "x"}, KEY)[0] == 500
    until(lambda: (record := gateway.newest()) is not None and record.model == "odd", 10)
    assert is_idle(gateway)


def test_busy_provider_is_retried_or_rejected(gateway: LocalGateway) -> None:
    fake = gateway.fakes["fake"]
    fake.fault = "429"
    status, answer = run(gateway, "/m?rejectIfBusy=true", {"prompt": "x"})
    assert status == 429 and answer["success"] is False and fake.count == 1
    assert answer["errors"] == [{"code": 3040, "message": "Capacity temporarily exceeded, please try again."}]
    status, answer = run(gateway, "", {"model": "m", "input": {"prompt": "x"}, "options": {"rejectIfBusy": True}})
    assert status == 429 and answer["errors"][0]["code"] == 3040
    fake.fault, fake.script = "", ["429"] * 5
    assert run(gateway, "/m", {"prompt": "x"})[0] == 200, "the request waits for capacity"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/m", b"[]", 400),
        ("/m", {}, 400),
        ("/m", {"prompt": "x", "lora": "l"}, 400),
        ("/m?queueRequest=true", {"requests": []}, 400),
        ("/m?queueRequest=true", {"requests": [{"odd": 1}]}, 400),
        ("/m?queueRequest=true", {"requests": [{"prompt": "x", "stream": True}]}, 400),
        ("/m?queueRequest=true", {"prompt": "x"}, 400),
        ("/m", {"request_id": "nobody"}, 404),
        ("/m?rejectIfBusy=yes", {"prompt": "x"}, 400),
        ("", {"model": "m", "input": {"prompt": "x"}, "options": {"rejectIfBusy": "yes"}}, 400),
        ("", {"model": "m", "input": {"prompt": "x"}, "options": {"rejectIfLazy": True}}, 400),
        ("", {"model": "m", "input": {"prompt": "x"}, "gateway": {"id": "x"}}, 400),
    ],
)
def test_invalid_runs_are_refused(gateway: LocalGateway, path: str, body: Any, status: int) -> None:
    got, answer = run(gateway, path, body)
    assert got == status and answer["success"] is False and answer["errors"][0]["message"]


def test_workers_ai_models_are_forwarded(gateway: LocalGateway) -> None:
    status, _ = run(gateway, "/workers-ai/@cf/meta/llama-3.1-8b-instruct", {"prompt": "x"})
    request = gateway.fakes["fake"].requests[-1]
    assert status == 200 and request.path == "/ai/run/@cf/meta/llama-3.1-8b-instruct"
    assert request.headers["authorization"] == "Bearer of-workers"
    model = "workers-ai/@cf/meta/llama-3.1-8b-instruct"
    run(gateway, "", {"model": model, "input": {"prompt": "x"}, "options": {"rejectIfBusy": True}})
    assert gateway.fakes["fake"].requests[-1].path.endswith("-instruct?rejectIfBusy=true")


# -- batches -----------------------------------------------------------------------------------------------------------


def queue_batch(gateway: LocalGateway, requests: list[dict[str, Any]]) -> str:
    status, answer = run(gateway, "/m?queueRequest=true", {"requests": requests})
    assert status == 200 and answer["result"]["status"] == "queued" and answer["result"]["model"] == "m"
    return str(answer["result"]["request_id"])


def fetch_results(gateway: LocalGateway, id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while True:
        status, answer = run(gateway, "/m", {"request_id": id})
        assert status == 200 and time.monotonic() < deadline, answer
        if "responses" in answer["result"]:
            return dict(answer["result"])
        assert answer["result"]["status"] in ("queued", "running")
        time.sleep(0.05)


def test_batch_is_answered(gateway: LocalGateway) -> None:
    given = [{"prompt": f"number {i}", "max_tokens": 8, "external_reference": f"r{i}"} for i in range(9)]
    found = fetch_results(gateway, queue_batch(gateway, given))
    assert [each["id"] for each in found["responses"]] == list(range(9))
    assert [each["external_reference"] for each in found["responses"]] == [f"r{i}" for i in range(9)]
    assert all(each["success"] and each["result"]["response"] == TEXT for each in found["responses"])
    assert found["usage"] == {"prompt_tokens": 99, "completion_tokens": 72, "total_tokens": 171}
    prompts = {request.json["messages"][0]["content"] for request in gateway.fakes["fake"].requests}
    assert prompts == {f"number {i}" for i in range(9)}


def test_options_of_a_batch_apply_to_each_request(gateway: LocalGateway) -> None:
    headers = {**KEY, "cf-aig-metadata": '{"team": "red"}', "cf-aig-custom-cost": '{"total_cost": 0.5}'}
    status, _, answer = gateway.post(f"{RUN}/m?queueRequest=true", {"requests": [{"prompt": "x"}]}, headers)
    assert status == 200
    fetch_results(gateway, json.loads(answer)["result"]["request_id"])
    until(lambda: (record := gateway.newest()) is not None and record.metadata.get("team") == "red", 10)
    record = gateway.newest()
    assert record is not None and record.micros == 500_000


def test_failed_request_of_a_batch_fails_alone(gateway: LocalGateway) -> None:
    fake = gateway.fakes["fake"]
    fake.script = ["empty"] * 2
    found = fetch_results(gateway, queue_batch(gateway, [{"prompt": "x"}]))
    [row] = found["responses"]
    assert row["success"] is False and "empty" in row["error"]["message"] and "result" not in row


def test_batch_is_hidden_from_other_keys(gateway: LocalGateway) -> None:
    id = queue_batch(gateway, [{"prompt": "x"}])
    status, _, answer = gateway.post(f"{RUN}/m", {"request_id": id})
    assert status == 404 and json.loads(answer)["success"] is False
    fetch_results(gateway, id)


@pytest.mark.parametrize("narrowed", [{"disabled": True}, {"allowed_models": ["other"]}])
def test_revoked_permission_stops_queued_requests(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch, narrowed: dict[str, Any]
) -> None:
    monkeypatch.setattr(batch_queue, "RETRY_DELAYS_S", (0.05,))
    fake = gateway.fakes["fake"]
    fake.script, fake.fault = ["", ""], "429"  # two are answered, the others wait for capacity
    status, _, made = gateway.post("/admin/accounts/default/keys", {"name": "k", "kind": "virtual"}, KEY)
    assert status == 201
    key = json.loads(made)
    own = {"authorization": f"Bearer {key['secret']}"}
    given = {"requests": [{"prompt": str(i)} for i in range(7)]}
    status, _, answer = gateway.post(f"{RUN}/m?queueRequest=true", given, own)
    assert status == 200, answer
    until(lambda: fake.count > 4, 10)
    assert gateway.post(f"/admin/accounts/default/keys/{key['id']}", narrowed, KEY, "PATCH")[0] == 200
    rows = fetch_results(gateway, json.loads(answer)["result"]["request_id"])["responses"]
    assert [row["success"] for row in rows].count(True) == 2
    assert [row["error"]["code"] for row in rows if not row["success"]] == [10000] * 5


def test_batch_survives_restart(tmp_path: Path) -> None:
    first = start_gateway(tmp_path, timeouts={"first_byte": 20.0, "between_events": 20.0, "total": 60.0})
    try:
        first.fakes["fake"].script = ["", ""] + ["silent"] * 20
        id = queue_batch(first, [{"prompt": f"number {i}"} for i in range(6)])
        deadline = time.monotonic() + 20
        while first.fakes["fake"].count < 6:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        first.close()
    second = start_gateway(tmp_path)
    try:
        found = fetch_results(second, id)
        assert all(each["success"] for each in found["responses"]) and len(found["responses"]) == 6
        assert second.fakes["fake"].count == 4, "answered requests are not sent again"
    finally:
        second.close()
