"""Guardrails over HTTP in every dialect, whole and streamed: block, redact, flag and judges, with log and cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from local_gateway import LocalGateway

CARD = "4111 1111 1111 1111"
MAIL = "ada@example.com"
COST = {
    "cf-aig-custom-cost": '{"per_token_in": 0.000003, "per_token_out": 0.000007}',
    "cf-aig-authorization": "Bearer a-key-of-the-tests",
}
GUARDRAILS: dict[str, Any] = {
    "patterns": [
        {"name": "cards", "find": ["payment_card"], "action": "block"},
        {"name": "people", "find": ["email"], "action": "redact"},
        {"name": "places", "find": ["ipv4"], "action": "flag"},
    ],
    "judges": [
        {"name": "hazards", "provider": "judge", "model": "j", "prompt": {"S1": "block", "S6": "flag"}, "seconds": 10},
    ],
}  # fmt: skip
PATHS = {
    "openai-chat": "/v1/chat/completions",
    "anthropic": "/v1/messages",
    "openai-responses": "/v1/responses",
    "gemini": "/v1/default/default/google-ai-studio/v1beta/models/m:",
}


def provider_settings(urls: dict[str, str]) -> dict[str, Any]:
    return {
        "oai": {"base_url": urls["fake"], "speaks": ["openai-chat", "anthropic", "openai-responses"]},
        "google-ai-studio": {"base_url": urls["fake"], "key": "k"},
        "aws-bedrock": {"base_url": urls["fake"]},
        "judge": {"base_url": urls["judge"]},
        "strict": {"base_url": urls["judge"]},
    }


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    prices = {"judge/j": {"input": 1_000_000, "output": 1_000_000}}
    home = tmp_path_factory.mktemp("guarded")
    with LocalGateway(
        home, ("fake", "judge"), provider_settings, default_provider="oai", guardrails=GUARDRAILS, prices=prices
    ) as made:
        yield made


@pytest.fixture
def gateway(gateways: LocalGateway) -> LocalGateway:
    gateways.reset()
    gateways.fakes["judge"].text = "safe"
    return gateways


def request_for(dialect: str, text: str, stream: bool) -> tuple[str, dict[str, Any]]:
    path = PATHS[dialect]
    match dialect:
        case "gemini":
            path += "streamGenerateContent?alt=sse" if stream else "generateContent"
            return path, {"contents": [{"role": "user", "parts": [{"text": text}]}]}
        case "openai-responses":
            return path, {"model": "m", "input": text, "stream": stream}
    return path, {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": text}], "stream": stream}


def ask(
    gateway: LocalGateway, dialect: str, text: str = "hello", stream: bool = False
) -> tuple[int, dict[str, str], str, bool]:
    """Return status, headers, body, and whether the body ended regularly."""
    import http.client

    path, body = request_for(dialect, text, stream)
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=30)
    connection.request("POST", path, json.dumps(body), {**COST, "content-type": "application/json"})
    reply = connection.getresponse()
    try:
        data, whole = reply.read(), True
    except http.client.IncompleteRead as e:
        data, whole = e.partial, False
    connection.close()
    return reply.status, {name.lower(): value for name, value in reply.getheaders()}, data.decode(), whole


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", PATHS)
def test_blocked_prompt_is_not_sent(gateway: LocalGateway, dialect: str, stream: bool) -> None:
    status, headers, body, _ = ask(gateway, dialect, f"my card is {CARD}", stream)
    assert status == 400 and "2029" in body and CARD not in body
    assert gateway.fakes["fake"].count == 0
    findings_header = json.loads(headers["cf-aig-dlp"])
    assert findings_header["action"] == "BLOCK" and findings_header["findings"][0]["check"] == "REQUEST"
    assert findings_header["findings"][0]["profile"]["entry_ids"] == ["payment_card"]
    record = gateway.record(headers["cf-aig-log-id"])
    assert (record.status, record.success, record.error) == (400, False, "prompt_blocked")
    assert record.metadata["guardrails"] == "request:payment_card:block"


@pytest.mark.parametrize("dialect", PATHS)
def test_prompt_is_redacted_for_provider_and_log(gateway: LocalGateway, dialect: str) -> None:
    status, headers, _, _ = ask(gateway, dialect, f"write to {MAIL} now")
    sent = gateway.fakes["fake"].requests[-1].body.decode()
    assert status == 200 and "write to [email] now" in sent and MAIL not in sent
    gateway.record(headers["cf-aig-log-id"])
    payload = gateway.payload(headers["cf-aig-log-id"])
    assert payload is not None and b"[email]" in payload.request and MAIL.encode() not in payload.request
    assert json.loads(headers["cf-aig-dlp"])["action"] == "REDACT"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", PATHS)
def test_blocked_reply(gateway: LocalGateway, dialect: str, stream: bool) -> None:
    gateway.fakes["fake"].text = f"Of course: your card is {CARD}, as you know, and there is more to say."
    status, headers, body, whole = ask(gateway, dialect, stream=stream)
    assert "1111" not in body
    record = gateway.record(headers["cf-aig-log-id"])
    assert (record.success, record.error) == (False, "reply_blocked")
    assert record.metadata["guardrails"] == "response:payment_card:block"
    assert record.micros and record.micros > 0, "the provider answered and is billed"
    if stream:
        assert status == 200 and "urse" in body and "more" not in body and record.ended == "cut"
        assert whole == (dialect != "gemini"), "Gemini has no error events"
        assert ("was blocked" in body) == (dialect != "gemini")
    else:
        assert status == 400 and "2030" in body and "cf-aig-dlp" in headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", PATHS)
def test_reply_is_redacted_and_flagged(gateway: LocalGateway, dialect: str, stream: bool) -> None:
    gateway.fakes["fake"].text = f"Write to {MAIL} at 10.0.0.1, please."
    status, headers, body, whole = ask(gateway, dialect, stream=stream)
    assert status == 200 and whole and MAIL not in body and "example" not in body and "[email]" in body
    record = gateway.record(headers["cf-aig-log-id"])
    assert record.success and record.metadata["guardrails"] == "response:email:redact, response:ipv4:flag"
    payload = gateway.payload(headers["cf-aig-log-id"])
    assert payload is not None and b"example" not in payload.response
    if not stream:
        assert json.loads(headers["cf-aig-dlp"])["action"] == "REDACT"


@pytest.mark.parametrize("before", [b"", b" " * 100])
@pytest.mark.parametrize("card", [CARD.encode(), b"\\u0034" + CARD[1:].encode()])
@pytest.mark.parametrize("after", [b"", b"\xff"])
def test_unusual_json_does_not_evade_a_block(gateway: LocalGateway, before: bytes, card: bytes, after: bytes) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"my card: %b %b"}]}' % (card, after)
    status, _, error_body = gateway.post("/v1/chat/completions", before + body)
    assert status == 400 and b"2029" in error_body and gateway.fakes["fake"].count == 0


@pytest.mark.parametrize(
    "path",
    [
        "google-ai-studio/v1beta/models/m:streamGenerateContent",
        "aws-bedrock/bedrock-runtime/us-east-1/model/anthropic.claude-x/invoke-with-response-stream",
    ],
)
def test_uninspectable_stream_is_blocked(gateway: LocalGateway, path: str) -> None:
    """Streams without server-sent events: JSON lists and binary frames."""
    gateway.fakes["fake"].text = f"Of course: your card is {CARD}, as you know."
    headers = {"authorization": "Bearer k"}
    status, _, body = gateway.post(f"/v1/default/default/{path}", {"max_tokens": 9, "messages": []}, headers)
    assert status == 400 and b"1111" not in body and b"urse" not in body


def test_real_clients_handle_guardrails(gateway: LocalGateway) -> None:
    hello: Any = [{"role": "user", "content": "hello"}]
    gateway.fakes["fake"].text = f"Write to {MAIL}, please."
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0)
    chunks = client.chat.completions.create(model="m", messages=hello, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Write to [email], please."
    anthropic_client = anthropic.Anthropic(base_url=gateway.url, api_key="k", max_retries=0)
    with anthropic_client.messages.stream(model="m", messages=hello, max_tokens=64) as stream:
        assert stream.get_final_text() == "Write to [email], please."
    gateway.fakes["fake"].text = f"It is {CARD}."
    with pytest.raises(openai.APIError, match="blocked"):
        for _ in client.chat.completions.create(model="m", messages=hello, stream=True):
            pass
    with (
        pytest.raises(anthropic.APIStatusError, match="blocked"),
        anthropic_client.messages.stream(model="m", messages=hello, max_tokens=64) as stream,
    ):
        stream.get_final_text()
    with pytest.raises(openai.BadRequestError, match="blocked"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": CARD}])


def test_tool_results_and_arguments_are_inspected(gateway: LocalGateway) -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": json.dumps({"card": CARD})}
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"to": f"\n{MAIL}"})}}
    hello = {"role": "user", "content": "hello"}
    body = {"model": "m", "messages": [hello, {"role": "assistant", "tool_calls": [call]}, result]}
    assert gateway.post(PATHS["openai-chat"], body)[0] == 400
    body["messages"][-1] = {**result, "content": "done"}
    assert gateway.post(PATHS["openai-chat"], body)[0] == 200
    sent = gateway.fakes["fake"].requests[-1].json["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(sent) == {"to": "\n[email]"}


def test_every_universal_step_is_inspected(gateway: LocalGateway) -> None:
    def step(text: str) -> dict[str, Any]:
        query = {"model": "m", "messages": [{"role": "user", "content": text}]}
        return {"provider": "oai", "endpoint": "v1/chat/completions", "headers": {}, "query": query}

    assert gateway.post("/v1/default/default", [step("hello"), step(CARD)])[0] == 400
    assert gateway.post("/v1/default/default", [step(MAIL)])[0] == 200
    assert MAIL.encode() not in gateway.fakes["fake"].requests[-1].body


# -- judges ------------------------------------------------------------------------------------------------------------


def test_judge_is_called_and_billed(gateway: LocalGateway) -> None:
    status, headers, _, _ = ask(gateway, "openai-chat", "is this safe?")
    assert status == 200 and gateway.fakes["judge"].count == 1
    request_for = gateway.fakes["judge"].requests[0].json
    assert request_for["model"] == "j" and "is this safe?" in request_for["messages"][-1]["content"]
    assert "S13" in request_for["messages"][0]["content"]
    record = gateway.record(headers["cf-aig-log-id"])
    assert "guardrails" not in record.metadata
    assert record.usage.input == 11 and record.micros == 11 * 3 + 64 * 7 + 11 + 1


@pytest.mark.parametrize(
    ("says", "fault", "status", "found"),
    [
        ("unsafe\nS1", "", 400, "request:S1:block"),
        ("unsafe\nS6,S12", "", 200, "request:S6:flag"),
        ("unsafe\nS9", "", 200, None),
        ("I would rather not say", "", 400, "request:unchecked:block"),
        ("unsafe", "", 400, "request:unchecked:block"),
        ("safe", "500", 400, "request:unchecked:block"),
    ],
)
def test_judge_verdicts(gateway: LocalGateway, says: str, fault: str, status: int, found: str | None) -> None:
    gateway.fakes["judge"].text, gateway.fakes["judge"].fault = says, fault
    actual, headers, body, _ = ask(gateway, "openai-chat", "hm")
    assert actual == status and ("2016" in body) == (status == 400)
    assert gateway.record(headers["cf-aig-log-id"]).metadata.get("guardrails") == found


def test_judge_timeout_blocks(tmp_path: Path) -> None:
    short_timeout = {"judges": [{**GUARDRAILS["judges"][0], "seconds": 1.0}]}
    with LocalGateway(
        tmp_path, ("fake", "judge"), provider_settings, default_provider="oai", guardrails=short_timeout
    ) as gateway:
        gateway.fakes["judge"].fault = "silent"
        actual, headers, body, _ = ask(gateway, "openai-chat", "hm")
        assert actual == 400 and "2016" in body
        assert gateway.record(headers["cf-aig-log-id"]).metadata.get("guardrails") == "request:unchecked:block"
