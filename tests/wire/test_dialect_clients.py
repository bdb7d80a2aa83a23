"""The vendors' own clients and types accept translated replies of every wire format.

The clients use a transport that translates the request, answers in the provider's format, and translates the answer
back in chunks of a few bytes; no server and no network are involved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from anthropic.types import Message, MessageCreateParams, RawMessageStreamEvent
from citation_cases import CITED, CITING, CITING_STREAMS, PAGE
from dialect_cases import ANTHROPIC, CHAT, DIALECTS, MODELS, PAIRS, REPLIES, REQUESTS, RESPONSES, STREAMS, data
from openai.types.chat import ChatCompletion, ChatCompletionChunk, CompletionCreateParams
from openai.types.responses import Response, ResponseCreateParams, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

from emberline.gateway.core.errors import UpstreamFailed
from emberline.gateway.dialects.translate import (
    StreamTranslator,
    TargetModel,
    read_reply_context,
    translate_error,
    translate_reply,
    translate_request,
)
from emberline.wire.deltas import ChatDialect

OTHERS = {client: [each for each in DIALECTS if each != client] for client in DIALECTS}
EVENTS: dict[ChatDialect, TypeAdapter[Any]] = {
    "openai-chat": TypeAdapter(ChatCompletionChunk),
    "openai-responses": TypeAdapter(ResponseStreamEvent),
    "anthropic": TypeAdapter(RawMessageStreamEvent),
}
BODIES: dict[ChatDialect, TypeAdapter[Any]] = {
    "openai-chat": TypeAdapter(ChatCompletion),
    "openai-responses": TypeAdapter(Response),
    "anthropic": TypeAdapter(Message),
}
PARAMS: dict[ChatDialect, TypeAdapter[Any]] = {
    "openai-chat": TypeAdapter(CompletionCreateParams),
    "openai-responses": TypeAdapter(ResponseCreateParams),
    "anthropic": TypeAdapter(MessageCreateParams),
}


class TranslatingTransport(httpx2.BaseTransport):
    """A provider of one wire format behind a client of another."""

    def __init__(
        self, client: ChatDialect, provider: ChatDialect, tail: bytes = b"", refused: int = 0, citing: bool = False
    ) -> None:
        self._client, self._provider = client, provider
        self._tail, self._refused = tail, refused
        self._replies, self._streams = (CITING, CITING_STREAMS) if citing else (REPLIES, STREAMS)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        body = request.read()
        target_model = TargetModel(MODELS[self._provider])
        sent, _ = translate_request(body, self._client, self._provider, target_model)
        context = read_reply_context(body, self._client, model="asked", created=1700000000, id="made-1")
        if self._refused:
            error = json.dumps({"error": {"message": "slow down", "type": "rate_limit_error"}}).encode()
            return httpx2.Response(self._refused, content=translate_error(error, self._refused, self._client))
        if not json.loads(body).get("stream"):
            plain = json.dumps(self._replies[self._provider]).encode()
            rendered, _ = translate_reply(plain, self._provider, self._client, context)
            return httpx2.Response(200, content=rendered, headers={"content-type": "application/json"})
        assert self._provider == "gemini" or json.loads(sent)["stream"] is True
        translator = StreamTranslator(self._provider, self._client, context)
        pieces = self._pieces(translator)
        return httpx2.Response(200, content=pieces, headers={"content-type": "text/event-stream"})

    def _pieces(self, translator: StreamTranslator) -> Iterator[bytes]:
        stream = self._streams[self._provider]
        if self._tail:  # the provider's stream breaks in the middle
            stream = b"\n\n".join(stream.split(b"\n\n")[:4]) + b"\n\n" + self._tail
        try:
            for at in range(0, len(stream), 7):
                yield translator.push(stream[at : at + 7])
            yield translator.end()
        except UpstreamFailed as error:
            yield translator.write_error(error)


def openai_client(client: ChatDialect, provider: ChatDialect, **more: Any) -> openai.OpenAI:
    http = httpx2.Client(transport=TranslatingTransport(client, provider, **more))
    return openai.OpenAI(api_key="none", base_url="http://test/v1", http_client=http, max_retries=0)


def anthropic_client(provider: ChatDialect, **more: Any) -> anthropic.Anthropic:
    http = httpx2.Client(transport=TranslatingTransport("anthropic", provider, **more))
    return anthropic.Anthropic(api_key="none", base_url="http://test", http_client=http, max_retries=0)


def without(request: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in request.items() if name not in names}


@pytest.mark.parametrize("provider", OTHERS["openai-chat"])
def test_chat_client(provider: ChatDialect) -> None:
    client = openai_client("openai-chat", provider)
    plain = client.chat.completions.create(**without(CHAT, "stream", "stream_options"))
    with client.chat.completions.stream(**without(CHAT, "stream")) as stream:
        final = stream.get_final_completion()
    for reply in (plain, final):
        choice = reply.choices[0]
        calls = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert calls == [("c1", "weather", '{"city":"Oslo"}'), ("c2", "now", "{}")]
        assert (choice.message.content, choice.finish_reason, reply.model) == ("Hé!", "tool_calls", "asked")
        assert reply.usage.prompt_tokens == 30 and reply.usage.prompt_tokens_details.cached_tokens == 10
        assert reply.usage.completion_tokens_details.reasoning_tokens == 5
    assert plain.choices[0].message.reasoning_content == "Hmm."  # type: ignore[attr-defined]


@pytest.mark.parametrize("provider", OTHERS["openai-responses"])
def test_responses_client(provider: ChatDialect) -> None:
    client = openai_client("openai-responses", provider)
    plain = client.responses.create(**without(RESPONSES, "stream"))
    with client.responses.stream(**without(RESPONSES, "stream")) as stream:
        final = stream.get_final_response()
    for reply in (plain, final):
        calls = [(item.call_id, item.name, item.arguments) for item in reply.output if item.type == "function_call"]
        assert calls == [("c1", "weather", '{"city":"Oslo"}'), ("c2", "now", "{}")]
        thoughts = [part.text for item in reply.output if item.type == "reasoning" for part in item.summary]
        assert reply.output_text == "Hé!" and "".join(thoughts) == "Hmm." and reply.status == "completed"
        assert reply.usage.input_tokens == 30 and reply.usage.input_tokens_details.cached_tokens == 10
        assert reply.tools[0].name == "weather" and reply.instructions == "Be brief."


@pytest.mark.parametrize("provider", OTHERS["anthropic"])
def test_messages_client(provider: ChatDialect) -> None:
    client = anthropic_client(provider)
    plain = client.messages.create(**without(ANTHROPIC, "stream"))
    with client.messages.stream(**without(ANTHROPIC, "stream")) as stream:
        final = stream.get_final_message()
    for reply in (plain, final):
        calls = [(block.id, block.name, block.input) for block in reply.content if block.type == "tool_use"]
        assert calls == [("c1", "weather", {"city": "Oslo"}), ("c2", "now", {})]
        texts = "".join(block.text for block in reply.content if block.type == "text")
        thoughts = "".join(block.thinking for block in reply.content if block.type == "thinking")
        assert (texts, thoughts, reply.stop_reason, reply.model) == ("Hé!", "Hmm.", "tool_use", "asked")
        usage = reply.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (20, 10, 20)


@pytest.mark.parametrize("provider", OTHERS["openai-chat"])
def test_chat_client_gets_citations(provider: ChatDialect) -> None:
    client = openai_client("openai-chat", provider, citing=True)
    plain = client.chat.completions.create(**without(CHAT, "stream", "stream_options"))
    with client.chat.completions.stream(**without(CHAT, "stream")) as stream:
        final = stream.get_final_completion()
    for reply in (plain, final):
        message = reply.choices[0].message
        cited = message.annotations[0].url_citation
        assert message.content[cited.start_index : cited.end_index] == CITED and cited.url == PAGE["url"]


@pytest.mark.parametrize("provider", OTHERS["openai-responses"])
def test_responses_client_gets_citations(provider: ChatDialect) -> None:
    client = openai_client("openai-responses", provider, citing=True)
    plain = client.responses.create(**without(RESPONSES, "stream"))
    with client.responses.stream(**without(RESPONSES, "stream")) as stream:
        final = stream.get_final_response()
    for reply in (plain, final):
        texts = [part for item in reply.output if item.type == "message" for part in item.content]
        cited = [(part.text[c.start_index : c.end_index], c.url) for part in texts for c in part.annotations]
        assert cited == [(CITED, PAGE["url"])]


@pytest.mark.parametrize("provider", OTHERS["anthropic"])
def test_messages_client_gets_citations(provider: ChatDialect) -> None:
    client = anthropic_client(provider, citing=True)
    plain = client.messages.create(**without(ANTHROPIC, "stream"))
    with client.messages.stream(**without(ANTHROPIC, "stream")) as stream:
        final = stream.get_final_message()
    for reply in (plain, final):
        blocks = [block for block in reply.content if block.type == "text" and block.citations]
        assert [cited.url for block in blocks for cited in block.citations] == [PAGE["url"]]
        assert blocks[0].text == CITED if reply is plain else CITED in blocks[0].text


@pytest.mark.parametrize(("replies", "streams"), [(REPLIES, STREAMS), (CITING, CITING_STREAMS)], ids=["calls", "cites"])
@pytest.mark.parametrize(("source", "target"), [pair for pair in PAIRS if pair[1] != "gemini"])
def test_vendor_types_accept_all_output(source: ChatDialect, target: ChatDialect, replies: Any, streams: Any) -> None:
    """The vendors' clients tolerate missing fields, their types do not."""
    translator = StreamTranslator(source, target)
    stream = translator.push(streams[source]) + translator.end()
    rows = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: ")]
    for row in rows[:-1] if target == "openai-chat" else rows:
        EVENTS[target].validate_json(row)
    body, _ = translate_reply(json.dumps(replies[source]).encode(), source, target)
    BODIES[target].validate_json(body)
    request, _ = translate_request(json.dumps(REQUESTS[source]).encode(), source, target, TargetModel(MODELS[target]))
    PARAMS[target].validate_json(request)


def test_vendor_types_reject_invalid_output() -> None:
    with pytest.raises(ValidationError):
        EVENTS["anthropic"].validate_python({"type": "message_start", "message": {}})
    with pytest.raises(ValidationError):
        PARAMS["anthropic"].validate_python({"model": "m", "messages": []})


BROKEN = data({"error": {"message": "went away", "type": "api_error", "code": 500}, "type": "error"})


@pytest.mark.parametrize("tail", [BROKEN, b"data: {{{\n\n", b""], ids=["error", "malformed", "cut"])
@pytest.mark.parametrize("provider", DIALECTS)
def test_broken_stream_raises_in_client(provider: ChatDialect, tail: bytes) -> None:
    tail = tail or b": cut\n\n"
    if provider != "openai-chat":
        with (
            pytest.raises(openai.APIError),
            openai_client("openai-chat", provider, tail=tail).chat.completions.stream(
                **without(CHAT, "stream")
            ) as chat,
        ):
            chat.get_final_completion()
    if provider != "anthropic":
        with (
            pytest.raises(anthropic.APIError),
            anthropic_client(provider, tail=tail).messages.stream(**without(ANTHROPIC, "stream")) as message,
        ):
            message.get_final_message()
    if provider != "openai-responses":
        events = openai_client("openai-responses", provider, tail=tail).responses.create(**RESPONSES)
        last = list(events)[-1]
        assert last.type == "response.failed" and last.response.status == "failed" and last.response.error.message


def test_errors_have_format_of_client() -> None:
    for client in ("openai-chat", "openai-responses"):
        with pytest.raises(openai.RateLimitError, match="slow down"):
            context = openai_client(client, "anthropic", refused=429)  # type: ignore[arg-type]
            _ = (
                context.chat.completions.create(**CHAT)
                if client == "openai-chat"
                else context.responses.create(**RESPONSES)
            )
    with pytest.raises(anthropic.RateLimitError, match="slow down"):
        anthropic_client("gemini", refused=429).messages.create(**ANTHROPIC)
