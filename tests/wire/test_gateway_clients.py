"""Real clients through a real gateway to fake providers of every dialect."""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from local_gateway import TIMEOUTS, LocalGateway
from routers import until

TEXT = "".join(f"word{i} " for i in range(8))
HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL = {
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
KEY = "a-key-of-the-tests"
OPENAI, ANTHROPIC = "oai/some-model", "ant/some-model"


def provider_settings(urls: dict[str, str]) -> dict[str, Any]:
    return {
        "oai": {"base_url": urls["fake"], "speaks": ["openai-chat", "openai-embeddings"], "key": "secret-of-oai"},
        "res": {"base_url": urls["fake"], "speaks": ["openai-responses"]},
        "ant": {"base_url": urls["fake"] + "/v1", "speaks": ["anthropic"]},
        "custom-mine": {"base_url": urls["fake"], "speaks": ["openai-chat"]},
        "openai": {"base_url": urls["fake"] + "/v1"},
        "anthropic": {"base_url": urls["fake"]},
    }


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    more: Any = {"default_provider": "oai", "models": {"quick": ANTHROPIC}, "breaker": {"pause": 3.0}}
    with LocalGateway(tmp_path_factory.mktemp("clients"), ("fake",), provider_settings, **more) as made:
        yield made


@pytest.fixture
def oai(gateway: LocalGateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="sk-of-a-client", max_retries=0)


@pytest.fixture
def ant(gateway: LocalGateway) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.url, api_key="sk-of-a-client", max_retries=0)


@pytest.mark.parametrize("base", ["v1", "v1/default/default/compat", "client/v4/accounts/default/ai/v1"])
def test_models_are_listed_by_their_request_names(gateway: LocalGateway, base: str) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/{base}", api_key="sk-of-a-client", max_retries=0)
    assert {model.id for model in client.models.list()} >= {"quick"}
    assert client.models.retrieve("quick").id == "quick"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("unknown/model")


@pytest.mark.parametrize("model", [OPENAI, ANTHROPIC, "res/some-model", "some-model", "quick"])
def test_chat_client(oai: openai.OpenAI, model: str) -> None:
    reply = oai.chat.completions.create(model=model, messages=HELLO, max_tokens=8)
    assert reply.choices[0].message.content == TEXT and reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None and (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (11, 8)
    with oai.chat.completions.create(model=model, messages=HELLO, max_tokens=8, stream=True) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert all(chunk.choices for chunk in chunks), "the request did not ask for usage"
    options: Any = {"include_usage": True}
    with oai.chat.completions.create(
        model=model, messages=HELLO, max_tokens=8, stream=True, stream_options=options
    ) as s:
        last = list(s)[-1]
    assert last.usage is not None and last.usage.completion_tokens == 8


@pytest.mark.parametrize("model", [OPENAI, ANTHROPIC, "res/some-model"])
def test_anthropic_client(ant: anthropic.Anthropic, model: str) -> None:
    reply = ant.messages.create(model=model, messages=HELLO, max_tokens=8)
    assert reply.content[0].type == "text" and reply.content[0].text == TEXT and reply.stop_reason == "end_turn"
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (11, 8)
    with ant.messages.stream(model=model, messages=HELLO, max_tokens=8) as stream:
        assert "".join(stream.text_stream) == TEXT
        assert stream.get_final_message().usage.output_tokens == 8


@pytest.mark.parametrize("model", [OPENAI, ANTHROPIC, "res/some-model"])
def test_responses_client(oai: openai.OpenAI, model: str) -> None:
    reply = oai.responses.create(model=model, input="hello", max_output_tokens=8)
    assert reply.output_text == TEXT and reply.usage is not None and reply.usage.output_tokens == 8
    with oai.responses.create(model=model, input="hello", max_output_tokens=8, stream=True) as stream:
        events = list(stream)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == TEXT
    assert events[-1].type == "response.completed"


@pytest.mark.parametrize("model", [OPENAI, ANTHROPIC])
def test_tool_calls(oai: openai.OpenAI, ant: anthropic.Anthropic, model: str) -> None:
    tools: Any = [{"type": "function", "function": TOOL}]
    called = oai.chat.completions.create(model=model, messages=HELLO, tools=tools, max_tokens=8)
    calls: Any = called.choices[0].message.tool_calls
    assert called.choices[0].finish_reason == "tool_calls" and calls[0].function.name == "weather"
    assert json.loads(calls[0].function.arguments) == {"city": "Paris"}
    own: Any = [{"name": "weather", "input_schema": TOOL["parameters"]}]
    with ant.messages.stream(model=model, messages=HELLO, tools=own, max_tokens=8) as stream:
        message = stream.get_final_message()
    used = message.content[-1]
    assert used.type == "tool_use" and used.input == {"city": "Paris"} and message.stop_reason == "tool_use"


def test_embeddings(oai: openai.OpenAI, gateway: LocalGateway) -> None:
    reply = oai.embeddings.create(model=OPENAI, input="hello", encoding_format="float")
    assert reply.data[0].embedding == [0.25, -0.5]
    with pytest.raises(openai.BadRequestError, match="openai-embeddings"):
        oai.embeddings.create(model=ANTHROPIC, input="hello")


def metrics(gateway: LocalGateway) -> str:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{gateway.url}/metrics")
    scrape = urllib.request.Request(f"{gateway.url}/metrics", headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(scrape) as reply:
        return str(reply.read().decode())


def ask_provider_directly(gateway: LocalGateway, body: bytes) -> bytes:
    """Return the provider's answer without the gateway."""
    url, kind = f"{gateway.fakes['fake'].url}/v1/chat/completions", {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, kind)) as reply:
        return bytes(reply.read())


def test_body_passes_unchanged(gateway: LocalGateway) -> None:
    """Nothing is added to a body that is not streamed."""
    fake = gateway.fakes["fake"]
    body = b'{ "model":"m",\n "messages":[], "odd": 1e3, "stream":false }'
    status, _, through = gateway.post(
        "/v1/default/default/openai/chat/completions", body, {"authorization": "Bearer mine"}
    )
    sent_request = fake.requests[-1]
    assert status == 200 and sent_request.body == body and sent_request.path == "/v1/chat/completions"
    assert ask_provider_directly(gateway, body) == through


def test_events_pass_unchanged(gateway: LocalGateway) -> None:
    body = b'{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true}}'
    _, _, through = gateway.post("/v1/default/default/openai/chat/completions", body, {"authorization": "Bearer mine"})
    assert ask_provider_directly(gateway, body) == through


def test_only_include_usage_is_added(gateway: LocalGateway) -> None:
    body = b'{"model":"m", "messages":[ ],"stream":true}'
    gateway.post("/v1/default/default/custom-mine/v1/chat/completions", body)
    assert gateway.fakes["fake"].requests[-1].json == {**json.loads(body), "stream_options": {"include_usage": True}}


def test_credentials_reach_the_right_provider(gateway: LocalGateway, oai: openai.OpenAI) -> None:
    fake = gateway.fakes["fake"]
    oai.chat.completions.create(model=OPENAI, messages=HELLO)
    assert fake.requests[-1].headers["authorization"] == "Bearer secret-of-oai", "the configured key, not the client's"
    oai.chat.completions.create(model="custom-mine/m", messages=HELLO)
    assert "authorization" not in fake.requests[-1].headers, "the key on this path is for the gateway"
    headers = {
        "authorization": "Bearer mine",
        "cf-aig-authorization": f"Bearer {KEY}",
        "cf-aig-event-id": "e",
        "x-odd": "1",
    }
    gateway.post("/v1/default/default/openai/chat/completions", {"model": "m", "messages": []}, headers)
    seen = fake.requests[-1].headers
    assert seen["authorization"] == "Bearer mine" and seen["x-odd"] == "1"
    assert not any(name.startswith("cf-") for name in seen)
    gateway.post("/v1/default/default/compat/chat/completions", {"model": "ant/m", "messages": HELLO}, headers)
    assert "mine" in fake.requests[-1].headers["authorization"], "the key on this path is for the provider"
    ours = {"authorization": f"Bearer {KEY}"}
    gateway.post("/v1/default/default/oai/v1/chat/completions", {"model": "m", "messages": []}, ours)
    assert fake.requests[-1].headers["authorization"] == "Bearer secret-of-oai", (
        "a gateway key is recognized in any header"
    )
    status, _, body = gateway.post("/v1/default/default/openai/chat/completions", {"model": "m", "messages": []})
    assert status == 401 and json.loads(body)["error"]["code"] == "provider_key_missing"


def test_gateway_keys_never_reach_a_provider(gateway: LocalGateway) -> None:
    """Neither an expired or revoked one, nor one that was sent in two headers or in Google's header."""
    fake, path, body = gateway.fakes["fake"], "/v1/default/default/openai/chat/completions", {"model": "m"}
    for name in ("authorization", "x-api-key", "x-goog-api-key", "api-key"):
        for where in (path, "/v1/chat/completions"):
            status, _, error_body = gateway.post(where, body, {name: "Bearer evk_" + "x" * 43})
            assert status == 401 and json.loads(error_body)["error"]["code"] == "invalid_api_key", "revoked, or expired"
    step = {"provider": "openai", "endpoint": "chat/completions", "query": body, "authorization": "Bearer evk_x"}
    assert gateway.post("/v1/default/default", [step])[0] == 400 and fake.count == 0
    native = "/v1/default/default/oai/v1/chat/completions"
    for headers in (
        {"cf-aig-authorization": f"bearer {KEY}", "authorization": f"Bearer {KEY}"},
        {"x-goog-api-key": KEY},
        {"api-key": KEY},
    ):
        status, reply_headers, _ = gateway.post(native, {"model": "m", "messages": []}, headers)
        assert status == 200 and KEY not in str(fake.requests[-1].headers)
        assert gateway.record(reply_headers["cf-aig-log-id"]).key_id == "configured-0"


def test_unknown_key_alias_is_rejected(gateway: LocalGateway) -> None:
    """The alias is not replaced by another key."""
    headers = {"cf-aig-byok-alias": "missing"}
    status, _, error_body = gateway.post("/v1/chat/completions", {"model": OPENAI, "messages": HELLO}, headers)
    assert status == 401 and json.loads(error_body)["error"]["code"] == "provider_key_missing"
    assert gateway.fakes["fake"].count == 0


def test_anthropic_key_and_version(gateway: LocalGateway) -> None:
    headers = {"authorization": "Bearer mine"}
    body = {"model": "anthropic/m", "messages": HELLO, "max_tokens": 8}
    assert gateway.post("/v1/default/default/compat/chat/completions", body, headers)[0] == 200
    seen = gateway.fakes["fake"].requests[-1]
    assert seen.headers["x-api-key"] == "mine" and "authorization" not in seen.headers
    assert seen.headers["anthropic-version"] and seen.path == "/v1/messages"


def test_changes_by_translation_are_in_a_header(gateway: LocalGateway) -> None:
    body = {"model": ANTHROPIC, "messages": HELLO, "max_tokens": 8, "seed": 7, "logit_bias": {"5": 1}}
    status, headers, _ = gateway.post("/v1/chat/completions", body)
    assert (
        status == 200 and "seed=" in headers["x-emberline-changed"] and "logit_bias" in headers["x-emberline-changed"]
    )


def test_universal_endpoint_tries_steps_in_order(gateway: LocalGateway) -> None:
    fake = gateway.fakes["fake"]
    fake.script = ["500", "500"]
    steps = [
        {"provider": "oai", "endpoint": "v1/chat/completions", "query": {"model": "a", "messages": []}},
        {
            "provider": "ant",
            "endpoint": "/v1/messages",
            "headers": {"Authorization": "Bearer two", "cf-aig-max-attempts": "1"},
            "query": {"model": "b", "messages": [], "max_tokens": 8},
            "config": {"requestTimeout": 900},
        },
    ]
    status, headers, body = gateway.post("/v1/default/default", steps, {"authorization": "Bearer unused"})
    assert status == 200 and json.loads(body)["type"] == "message" and headers["cf-aig-step"] == "1"
    assert (headers["cf-aig-provider"], headers["cf-aig-model"]) == ("ant", "b")
    assert fake.count == 3 and fake.requests[-1].headers["authorization"] == "Bearer two"
    assert all("unused" not in sent_request.headers.get("authorization", "") for sent_request in fake.requests)
    assert gateway.record(headers["cf-aig-log-id"]).step == 1
    payload = gateway.payload(headers["cf-aig-log-id"])
    assert payload is not None and json.loads(payload.request) == steps[1]["query"]  # without the keys
    for bad in ([], [{"provider": "oai"}], [{**steps[0], "config": {"odd": 1}}], [{**steps[0], "provider": "unknown"}]):
        assert gateway.post("/v1/default/default", bad)[0] in (400, 404)


def test_gemini_api_is_served_at_the_root(gateway: LocalGateway) -> None:
    fake = gateway.fakes["fake"]
    body = {
        "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "generationConfig": {"maxOutputTokens": 8},
    }
    key = {"x-goog-api-key": "a-key-of-the-tests"}
    for version, model, asked_at in (("v1", "oai/a", "/v1/chat/completions"), ("v1beta", "ant/b", "/v1/messages")):
        status, headers, reply_body = gateway.post(f"/{version}/models/{model}:generateContent", body, key)
        reply = json.loads(reply_body)
        assert status == 200 and reply["candidates"][0]["content"]["role"] == "model", reply
        assert reply["usageMetadata"]["candidatesTokenCount"] == 8 and headers["cf-aig-provider"] == model[:3]
        sent = fake.requests[-1]
        assert sent.path.endswith(asked_at) and json.loads(sent.body)["model"] == model[4:]
        assert "a-key-of-the-tests" not in str(sent.headers)
    assert gateway.record(headers["cf-aig-log-id"]).key_id == "configured-0"

    # The key as a query parameter, which is not passed on; a stream of events.
    path = "/v1beta/models/ant/b:streamGenerateContent"
    status, headers, reply_body = gateway.post(f"{path}?alt=sse&key=a-key-of-the-tests", body)
    events = [json.loads(line[6:]) for line in reply_body.splitlines() if line.startswith(b"data: ")]
    text = "".join(part["text"] for event in events for part in event["candidates"][0]["content"].get("parts", ()))
    assert status == 200 and text.startswith("word0 ") and events[-1]["candidates"][0]["finishReason"]
    assert "a-key-of-the-tests" not in fake.requests[-1].path + str(fake.requests[-1].headers)
    assert gateway.record(headers["cf-aig-log-id"]).key_id == "configured-0"

    status, _, reply_body = gateway.post(path, body, key)
    assert (
        status == 400 and json.loads(reply_body)["error"]["status"] == "INVALID_ARGUMENT" and b"alt=sse" in reply_body
    )
    assert gateway.post("/v1beta/models/:generateContent", body, key)[0] == 400
    assert gateway.post("/v1beta/models/ant/b:predictLongRunning", body, key)[0] == 404
    assert gateway.post("/v1beta/models/ant%2fb:generateContent", body, key)[0] == 400


def test_compat_step_names_its_provider_in_the_model(gateway: LocalGateway) -> None:
    fake = gateway.fakes["fake"]

    def step(model: str, **more: Any) -> dict[str, Any]:
        query = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **more}
        headers = {"Authorization": "Bearer of-the-step"}
        return {"provider": "compat", "endpoint": "chat/completions", "headers": headers, "query": query}

    # One step, to a provider with another protocol: translated both ways.
    status, headers, body = gateway.post("/v1/default/default", [step("ant/b")])
    assert status == 200 and json.loads(body)["object"] == "chat.completion" and headers["cf-aig-provider"] == "ant"
    assert fake.requests[-1].path.endswith("/v1/messages") and json.loads(fake.requests[-1].body)["model"] == "b"
    assert "of-the-step" in str(fake.requests[-1].headers)
    assert gateway.record(headers["cf-aig-log-id"]).path == "chat/completions"
    payload = gateway.payload(headers["cf-aig-log-id"])
    assert payload is not None and json.loads(payload.request) == step("ant/b")["query"]

    # The second of two steps, streamed.
    fake.script = ["500", "500"]
    status, headers, body = gateway.post(
        "/v1/default/default", [step("oai/a", stream=True), step("ant/b", stream=True)]
    )
    assert status == 200 and headers["cf-aig-step"] == "1" and body.rstrip().endswith(b"data: [DONE]")
    assert json.loads(fake.requests[-1].body)["model"] == "b"

    for bad in (step("gpt-4"), step(""), {**step("oai/a"), "endpoint": "audio/speech"}):
        assert gateway.post("/v1/default/default", [bad])[0] == 400
    status, _, body = gateway.post("/v1/default/default", [step("dynamic/x"), step("oai/a")])
    assert status == 400 and b"only step" in body
    status, _, body = gateway.post("/v1/default/default", [step("dynamic/not-there")])
    assert status == 404 and b"does not exist" in body


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/chat/completions", b"{", 400, "invalid_value"),
        ("/v1/chat/completions", b"[]", 400, "invalid_value"),
        ("/v1/chat/completions", b'{"messages":[]}', 400, "invalid_value"),
        ("/v1/responses", b'{"model":5,"messages":[]}', 400, "invalid_value"),
        ("/v1/nothing", b"{}", 404, "not_found"),
        ("/v1/default/other/oai/chat/completions", b"{}", 404, "gateway_not_found"),
        ("/v1/default/default/unknown/chat/completions", b"{}", 404, "provider_not_found"),
        ("/v1/default/default/compat/chat/completions", b'{"model":"m"}', 400, "invalid_value"),
    ],
)
def test_invalid_requests_are_rejected(gateway: LocalGateway, path: str, body: bytes, status: int, code: str) -> None:
    got, _, error_body = gateway.post(path, body)
    assert got == status and json.loads(error_body)["error"]["code"] == code and gateway.fakes["fake"].count == 0


@pytest.mark.parametrize(
    "headers", [{"cf-aig-max-attempts": "9"}, {"cf-aig-metadata": "[]"}, {"cf-aig-backoff": "odd"}]
)
def test_invalid_options_are_rejected(gateway: LocalGateway, headers: dict[str, str]) -> None:
    status, _, body = gateway.post("/v1/messages", {"model": ANTHROPIC}, headers)
    error_body = json.loads(body)
    assert status == 400 and error_body["type"] == "error" and next(iter(headers)) in error_body["error"]["message"]


def test_log_record_of_a_call(gateway: LocalGateway) -> None:
    sent_request = {
        "cf-aig-metadata": '{"team": "red", "n": 3}',
        "cf-aig-event-id": "mine",
        "cf-aig-custom-cost": '{"total_cost": 0.25}',
        "authorization": f"Bearer {KEY}",
    }
    _, headers, body = gateway.post("/v1/chat/completions", {"model": OPENAI, "messages": HELLO}, sent_request)
    row = gateway.record(headers["cf-aig-log-id"])
    assert headers["cf-aig-event-id"] == row.event_id == "mine" and headers["cf-aig-cache-status"] == "MISS"
    assert (row.provider, row.model, row.path, row.dialect) == ("oai", "some-model", "chat/completions", "openai-chat")
    assert row.success and row.micros == 250_000 and row.custom_cost and row.metadata == {"team": "red", "n": 3}
    assert row.response_content_type == row.request_content_type == "application/json"
    assert row.key_id == "configured-0" and row.usage.output == 8 and row.attempts == 1 and row.duration_ms >= 0
    payload = gateway.payload(headers["cf-aig-log-id"])
    assert payload is not None and payload.response == body and json.loads(payload.request)["model"] == OPENAI


def test_logging_can_be_disabled_per_request(gateway: LocalGateway) -> None:
    body = {"model": OPENAI, "messages": HELLO}
    _, headers, _ = gateway.post("/v1/chat/completions", body, {"cf-aig-collect-log": "false"})
    _, private, _ = gateway.post("/v1/chat/completions", body, {"cf-aig-zdr": "true"})
    assert gateway.record(private["cf-aig-log-id"]).success and gateway.payload(private["cf-aig-log-id"]) is None
    assert gateway.has_no_record(headers["cf-aig-log-id"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_client_disconnect_stops_the_provider(gateway: LocalGateway, path: str) -> None:
    """The provider's stream is closed at once, and what was sent is billed."""
    fake = gateway.fakes["fake"]
    fake.pace = 0.05
    model = OPENAI if "chat" in path else ANTHROPIC
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=30)
    body = {"model": model, "messages": HELLO, "max_tokens": 1000, "stream": True}
    prices = {"cf-aig-custom-cost": '{"per_token_in": 0.000001, "per_token_out": 0.000001}'}
    prices["cf-aig-authorization"] = f"Bearer {KEY}"
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **prices})
    reply = connection.getresponse()
    assert reply.status == 200
    while b"word3" not in reply.read1():
        pass
    reply.close()
    connection.close()
    until(lambda: fake.gone == 1 and fake.running == 0, 5)
    row = gateway.record(reply.headers["cf-aig-log-id"])
    assert row.ended == "left" and not row.success and row.estimated
    assert 4 <= row.usage.output < 100 and row.micros == row.usage.input + row.usage.output


def test_client_disconnect_before_the_reply(gateway: LocalGateway) -> None:
    fake = gateway.fakes["fake"]
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=30)
    body = {"model": "oai/silent", "messages": HELLO, "user": "early"}
    given = {"content-type": "application/json", "cf-aig-event-id": "early"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), given)
    until(lambda: fake.running == 1, 5)
    connection.close()
    until(lambda: fake.gone == 1 and fake.running == 0, 5)
    row = until(lambda: (newest := gateway.newest()) and newest.event_id == "early" and newest, 5)
    assert row.ended == "left" and row.status == 499 and not row.success


def test_client_that_does_not_read_is_dropped_at_the_deadline(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The gateway does not wait for it beyond the deadline."""
    short = {**TIMEOUTS, "total": 5.0}
    made = LocalGateway(
        tmp_path_factory.mktemp("slow"), ("fake",), provider_settings, default_provider="oai", timeouts=short
    )
    client = socket.socket()
    try:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(made.url.rpartition(":")[2])))
        body = json.dumps({"model": OPENAI, "messages": HELLO, "max_tokens": 800_000}).encode()  # about 9 MB
        kind = b"content-type: application/json"
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n%b\r\ncontent-length: %d\r\n\r\n" % (kind, len(body))
        client.sendall(head + body)
        until(lambda: made.fakes["fake"].count == 1, 5)
        row = until(made.newest, 30)
        assert (row.status, row.ended, row.success, row.usage.output) == (200, "left", False, 800_000)
    finally:
        client.close()
        made.close()


def test_retry_after_is_honoured(gateway: LocalGateway) -> None:
    fake = gateway.fakes["fake"]
    fake.script, fake.retry_after = ["503"], "1"
    began = time.monotonic()
    assert gateway.post("/v1/chat/completions", {"model": OPENAI, "messages": HELLO})[0] == 200
    assert fake.count == 2 and time.monotonic() - began >= 1.0


def test_failing_provider_is_skipped_for_a_while(gateway: LocalGateway) -> None:
    """It is tried again after a pause."""
    fake = gateway.fakes["fake"]
    fake.script = ["500"] * 5
    body = {"model": "res/m", "input": "hello"}
    once = {"cf-aig-max-attempts": "1"}
    assert [gateway.post("/v1/responses", body, once)[0] for _ in range(6)] == [500] * 5 + [503]
    assert fake.count == 5
    until(lambda: gateway.post("/v1/responses", body, once)[0] == 200)
    assert fake.count == 6


def test_health_and_metrics(gateway: LocalGateway, oai: openai.OpenAI) -> None:
    oai.chat.completions.create(model=OPENAI, messages=HELLO)
    with urllib.request.urlopen(f"{gateway.url}/health") as reply:
        assert json.load(reply)["status"] == "live"
    text = metrics(gateway)
    assert 'gateway_requests_total{provider="oai",model="some-model",status="200",ended="complete"}' in text
    assert "gateway_open_requests 0" in text
