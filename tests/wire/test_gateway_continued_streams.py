"""Broken streams that another provider continues, as real clients receive them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from local_gateway import TIMEOUTS, LocalGateway
from routers import until

from emberline.gateway.streams.continuation import CONTINUE_INSTRUCTION

TEXT = "".join(f"word{i} " for i in range(8))
MAX_TOKENS = 10  # tokens; five are left after the estimate for three words
HELLO: Any = [{"role": "user", "content": "hello"}]
CONTINUE_HEADER = {"x-emberline-continue": "true"}
TO = {
    "chat": "b-chat/well",
    "ant": "b-ant/well",
    "res": "b-res/well",
    "gem": "google-ai-studio/gemini-2.5-flash",
    "own": "emberline/well",
    "claude": "anthropic/claude-3-5-haiku",
    "mistral": "mistral/well",
    "vllm": "b-vllm/well",
}


def provider_settings(urls: dict[str, str]) -> dict[str, Any]:
    speaks = {"chat": "openai-chat", "ant": "anthropic", "res": "openai-responses"}
    first = {
        f"a-{name}-{to}": {"base_url": urls["a"], "speaks": [d]} for name, d in speaks.items() for to in (*TO, "none")
    }
    second = {f"b-{name}": {"base_url": urls["b"], "speaks": [dialect]} for name, dialect in speaks.items()}
    named = {name: {"base_url": urls["b"], "key": "k"} for name in ("google-ai-studio", "anthropic", "emberline")}
    more = {
        "mistral": {"base_url": urls["b"] + "/v1", "key": "k"},
        "b-vllm": {"base_url": urls["b"], "prefill": "flag"},
    }
    return {**first, **second, **named, **more}


def start_gateways(home: Path, timeouts: dict[str, float] = TIMEOUTS) -> LocalGateway:
    fallbacks = [{"model": f"a-{name}-{to}/*", "to": [TO[to]]} for name in ("chat", "ant", "res") for to in TO]
    return LocalGateway(home, ("a", "b"), provider_settings, fallbacks=fallbacks, timeouts=timeouts)


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    with start_gateways(tmp_path_factory.mktemp("continued")) as started:
        yield started


@pytest.fixture
def oai(gateway: LocalGateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="sk", max_retries=0, default_headers=CONTINUE_HEADER)


def messages_client(gateway: LocalGateway) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.url, api_key="sk", max_retries=0, default_headers=CONTINUE_HEADER)


def continuation_request(gateway: LocalGateway) -> dict[str, Any]:
    """Return the request that the continuing provider received."""
    return gateway.fakes["b"].requests[-1].json


@pytest.mark.parametrize("to", ["chat", "ant", "res", "gem"])
@pytest.mark.parametrize("source", ["chat", "res"])
@pytest.mark.parametrize("fault", ["cut", "error-event"])
def test_chat_client_gets_continued_stream(
    gateway: LocalGateway, oai: openai.OpenAI, source: str, to: str, fault: str
) -> None:
    with oai.chat.completions.stream(
        model=f"a-{source}-{to}/{fault}@3",
        messages=HELLO,
        max_tokens=MAX_TOKENS,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        whole = stream.get_final_completion()
    assert whole.choices[0].message.content == TEXT and whole.choices[0].finish_reason == "stop"
    assert len({(chunk.id, chunk.model, chunk.created) for chunk in chunks}) == 1
    assert sum(bool(chunk.choices and chunk.choices[0].finish_reason) for chunk in chunks) == 1
    assert whole.usage is not None and whole.usage.prompt_tokens > 11 and whole.usage.completion_tokens > 8 - 3
    assert gateway.fakes["b"].count == 1 and CONTINUE_INSTRUCTION in json.dumps(continuation_request(gateway))


@pytest.mark.parametrize("to", ["chat", "ant", "gem"])
@pytest.mark.parametrize("fault", ["bad-event", "stall-later"])
def test_messages_client_gets_continued_stream(
    gateway: LocalGateway, short_timeouts: LocalGateway, to: str, fault: str
) -> None:
    ant = messages_client(short_timeouts if fault == "stall-later" else gateway)
    with ant.messages.stream(model=f"a-ant-{to}/{fault}@3", messages=HELLO, max_tokens=MAX_TOKENS) as stream:
        kinds = [event.type for event in stream]
        whole = stream.get_final_message()
    assert [block.type for block in whole.content] == ["text"] and stream.get_final_text() == TEXT
    assert kinds.count("message_start") == kinds.count("message_stop") == kinds.count("content_block_stop") == 1
    assert whole.usage.input_tokens == 22 and whole.stop_reason == "end_turn"


@pytest.mark.parametrize("to", ["res", "ant"])
def test_responses_client_gets_continued_stream(oai: openai.OpenAI, to: str) -> None:
    with oai.responses.stream(model=f"a-res-{to}/cut@3", input="hello", max_output_tokens=MAX_TOKENS) as stream:
        numbers = [event.sequence_number for event in stream]
        whole = stream.get_final_response()
    assert whole.output_text == TEXT and whole.status == "completed" and len(whole.output) == 1
    assert numbers == list(range(len(numbers))), "sequence numbers have no gaps"


def test_gemini_stream_is_continued(gateway: LocalGateway) -> None:
    gateway.fakes["b"].script = ["cut"]  # the second attempt at the same provider succeeds
    path = "/v1/default/default/google-ai-studio/v1beta/models/gemini-2.5-flash:streamGenerateContent?alt=sse"
    asked = {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}
    status, _, body = gateway.post(path, asked, CONTINUE_HEADER)
    rows = [json.loads(line[6:])["candidates"][0] for line in body.split(b"\n") if line.startswith(b"data: {")]
    assert status == 200 and "".join(row["content"]["parts"][0]["text"] for row in rows) == TEXT
    assert [row["finishReason"] for row in rows if "finishReason" in row] == ["STOP"]
    assert [turn["role"] for turn in continuation_request(gateway)["contents"]] == ["user", "model", "user"]


@pytest.mark.parametrize(("to", "echo"), [("own", ""), ("vllm", ""), ("mistral", "word0 word1 word2 "), ("claude", "")])
def test_prefill_is_used_where_supported(gateway: LocalGateway, oai: openai.OpenAI, to: str, echo: str) -> None:
    gateway.fakes["b"].text = echo + "and on"
    with oai.chat.completions.stream(model=f"a-chat-{to}/cut@3", messages=HELLO) as stream:
        assert stream.get_final_completion().choices[0].message.content == "word0 word1 word2 and on"
    body = continuation_request(gateway)
    last = body["messages"][-1]
    assert (last["role"], CONTINUE_INSTRUCTION in json.dumps(body)) == ("assistant", False)
    assert last["content"] in ("word0 word1 word2", [{"type": "text", "text": "word0 word1 word2"}])
    assert body.get("continue_final_message", False) == (to in ("own", "vllm"))
    assert last.get("prefix", False) == (to == "mistral")


def test_repeated_text_is_sent_once(gateway: LocalGateway, oai: openai.OpenAI) -> None:
    gateway.fakes["b"].text = "word1 word2 and on"
    with oai.chat.completions.stream(model="a-chat-chat/cut@3", messages=HELLO) as stream:
        assert stream.get_final_completion().choices[0].message.content == "word0 word1 word2 and on"


def test_incomplete_tool_call_ends_with_error(gateway: LocalGateway) -> None:
    ant = messages_client(gateway)
    tools: Any = [{"name": "weather", "input_schema": {"type": "object"}}]
    with (
        pytest.raises(anthropic.APIError, match="closed the connection within a reply"),
        ant.messages.stream(model="a-ant-ant/cut@3", messages=HELLO, max_tokens=2, tools=tools) as stream,
    ):
        stream.until_done()
    assert gateway.fakes["b"].count == 0


def test_json_output_is_not_continued(gateway: LocalGateway, oai: openai.OpenAI) -> None:
    form: Any = {"type": "json_object"}
    stream = oai.chat.completions.create(model="a-chat-own/cut@3", messages=HELLO, response_format=form, stream=True)
    with pytest.raises(openai.APIError, match="closed the connection within a reply"):
        list(stream)
    assert gateway.fakes["b"].count == 0, "a grammar restarts with every request"


def test_fixed_price_is_charged_once(gateway: LocalGateway) -> None:
    cost = {"cf-aig-custom-cost": '{"total_cost": 0.5}', "cf-aig-authorization": "Bearer a-key-of-the-tests"}
    asked = {"model": "a-chat-chat/cut@3", "messages": HELLO, "stream": True}
    _, headers, body = gateway.post("/v1/chat/completions", asked, {**CONTINUE_HEADER, **cost})
    assert body.endswith(b"data: [DONE]\n\n") and gateway.record(headers["cf-aig-log-id"]).micros == 500_000


def test_without_header_stream_ends_with_error(gateway: LocalGateway) -> None:
    asked = {"model": "a-chat-chat/cut@3", "messages": HELLO, "stream": True}
    _, headers, body = gateway.post("/v1/chat/completions", asked)
    assert b'"error"' in body and gateway.fakes["b"].count == 0
    assert gateway.record(headers["cf-aig-log-id"]).ended == "cut"
    assert gateway.post("/v1/chat/completions", asked, {"x-emberline-continue": "maybe"})[0] == 400


def test_client_disconnect_stops_continuation(gateway: LocalGateway) -> None:
    gateway.fakes["b"].pace = 0.2
    body = {"model": "a-chat-chat/cut@3", "messages": HELLO, "stream": True}
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=10)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json", **CONTINUE_HEADER}
    )
    reply = connection.getresponse()
    log = reply.headers["cf-aig-log-id"]
    while b"word4" not in reply.readline():
        pass
    reply.close()
    connection.close()
    until(lambda: gateway.fakes["b"].gone == 1, 5)
    row = gateway.record(log)
    assert row.ended == "left" and row.metadata["continued"] == "b-chat/well" and row.usage.input > 11 and row.estimated
