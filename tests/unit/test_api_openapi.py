"""The OpenAPI document is correct: references resolve, and requests and replies match their schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from emberline.api import openapi, replies, tokenize
from emberline.api.anthropic import reply as anthropic_reply
from emberline.api.anthropic import request as anthropic
from emberline.api.ollama import embed as ollama_embed
from emberline.api.ollama import models as ollama_models
from emberline.api.ollama import replies as ollama_replies
from emberline.api.ollama import reply as ollama_reply
from emberline.api.ollama import request as ollama
from emberline.api.openai import chat as openai_chat
from emberline.api.openai import chat_reply
from emberline.api.openai import completions as openai_completions
from emberline.api.openai import completions_stream as completions_stream
from emberline.api.openai import embeddings as openai_embeddings
from emberline.api.openai import models as openai_models
from emberline.api.responses import request as responses
from emberline.api.responses import stream as responses_stream
from emberline.core.errors import InvalidRequest
from emberline.wire.deltas import (
    Delta,
    Finish,
    PromptDelta,
    ReasoningDelta,
    ReplyStart,
    StreamStart,
    TextDelta,
    TokenInfo,
    UsageUpdate,
)
from emberline.wire.deltas import ToolCallArguments as Arguments
from emberline.wire.deltas import ToolCallStart as Call
from emberline.wire.errors import render_anthropic_error, render_ollama_error, render_openai_error
from emberline.wire.usage import EngineUsage, Usage

DOCUMENT = openapi.build_document("1.2.3")
USER = {"role": "user", "content": "hi"}
TOKEN = TokenInfo(1, "a", b"a", -0.5, [TokenInfo(2, "b", b"b", -1.0)])
DELTAS: list[Delta] = [
    ReplyStart(3),
    ReasoningDelta("r", 0, [TOKEN]),
    TextDelta("a", 0, [TOKEN]),
    Call(0, "call_1", "f"),
    Arguments(0, "{}"),
    Finish("tool_calls"),
    UsageUpdate(EngineUsage(input=3, output=4, accepted_drafts=2, rejected_drafts=1)),
]
TEXT_DELTAS: list[Delta] = [
    ReplyStart(3),
    PromptDelta(0, "p", [TOKEN]),
    TextDelta("a", 0, [TOKEN]),
    Finish("length"),
    UsageUpdate(Usage(input=3, output=4)),
]


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nodes(inner)


def test_references_resolve() -> None:
    found = [node["$ref"] for node in nodes(DOCUMENT) if "$ref" in node]
    assert found
    for ref in found:
        assert ref.removeprefix("#/components/schemas/") in DOCUMENT["components"]["schemas"], ref


def test_document_is_json_with_every_endpoint_once() -> None:
    json.dumps(DOCUMENT)
    operations = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]
    assert len(operations) == len(openapi.ENDPOINTS)
    ids = [method["operationId"] for methods in DOCUMENT["paths"].values() for method in methods.values()]
    assert len(set(ids)) == len(ids)


def test_document_allows_unknown_fields() -> None:
    closed = [name for name, schema in DOCUMENT["components"]["schemas"].items() if "additionalProperties" in schema]
    assert closed == []


def test_every_request_detects_unknown_fields() -> None:
    """`decode_request` looks for fields to remove only if the decoder has found an unknown one."""
    requests = {endpoint.request for endpoint in openapi.ENDPOINTS if endpoint.request is not None}
    _, schemas = msgspec.json.schema_components(requests, ref_template="{name}")
    assert [name for name, schema in schemas.items() if schema.get("additionalProperties", False)] == []
    assert [name for name, schema in schemas.items() if "additionalProperties" not in schema] == []


def lone_tags(kind: Any, path: str, seen: set[Any]) -> Iterator[str]:
    """Find tagged structs outside unions: msgspec lets them omit the tag, but the document says it is required."""
    match kind:
        case msgspec.inspect.UnionType():
            structs = [inner for inner in kind.types if isinstance(inner, msgspec.inspect.StructType)]
            alone = len(structs) == 1
            for inner in kind.types:
                yield from (
                    _fields(inner, path, seen) if inner in structs and not alone else lone_tags(inner, path, seen)
                )
        case msgspec.inspect.ListType():
            yield from lone_tags(kind.item_type, path, seen)
        case msgspec.inspect.Metadata():
            yield from lone_tags(kind.type, path, seen)
        case msgspec.inspect.StructType():
            if kind.tag is not None:
                yield f"{path}: {kind.cls.__name__}"
            yield from _fields(kind, path, seen)


def _fields(kind: msgspec.inspect.StructType, path: str, seen: set[Any]) -> Iterator[str]:
    if kind.cls in seen:
        return
    seen.add(kind.cls)
    for field in kind.fields:
        yield from lone_tags(field.type, f"{path}.{field.name}", seen)


@pytest.mark.parametrize("endpoint", [e for e in openapi.ENDPOINTS if e.request is not None], ids=lambda e: e.path)
def test_required_tags_are_required(endpoint: openapi.ApiEndpoint) -> None:
    assert [*lone_tags(msgspec.inspect.type_info(endpoint.request), endpoint.path, set())] == []


def check_schema(reply: Any, shape: type) -> None:
    msgspec.convert(msgspec.json.decode(msgspec.json.encode(reply)), shape)


def play(writer: Any, deltas: list[Delta]) -> Any:
    for delta in (StreamStart(), *deltas):
        writer.write(delta)
    return writer.body()


def test_replies_match_their_schemas() -> None:
    chat: dict[str, Any] = {"model": "m", "messages": [USER]}
    function = {"name": "f", "parameters": {}}
    for extra in ({"logprobs": True, "metadata": {"a": "b"}}, {"functions": [function]}):
        call = openai_chat.parse(json.dumps({**chat, **extra}).encode())
        check_schema(play(chat_reply.make_writer(call, "id", 1, "fp"), DELTAS), replies.ChatCompletion)
    of_text: list[dict[str, Any]] = [{}, {"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}]
    for extra in of_text:
        completion = openai_completions.parse(json.dumps({"model": "m", "prompt": "p", **extra}).encode())
        check_schema(
            play(completions_stream.CompletionReplyWriter(completion, "id", 1, "fp"), TEXT_DELTAS),
            replies.TextCompletion,
        )
    message = anthropic.parse(json.dumps({**chat, "max_tokens": 9}).encode())
    check_schema(play(anthropic_reply.make_writer(message, "id", 1, "fp"), DELTAS), replies.AnthropicMessage)
    response = responses.parse(b'{"model":"m","input":"hi"}')
    check_schema(play(responses_stream.ResponsesReplyWriter(response, "id", 1, "fp"), DELTAS), replies.Response)


def test_ollama_replies_match_their_schemas() -> None:
    body = json.dumps({"model": "m", "messages": [USER], "logprobs": True, "stream": False}).encode()
    chat = ollama_reply.make_chat_writer(ollama.parse_chat(body), "id", 1, "fp")
    check_schema(play(chat, DELTAS), ollama_replies.OllamaChatReply)
    generate = ollama_reply.make_generate_writer(ollama.parse_generate(b'{"prompt":"p","stream":false}'), "id", 1, "fp")
    check_schema(play(generate, [ReplyStart(3), TextDelta("a"), Finish("stop")]), ollama_replies.OllamaGenerateReply)
    for is_chat, shape in ((True, ollama_replies.OllamaChatReply), (False, ollama_replies.OllamaGenerateReply)):
        check_schema(ollama_reply.render_loaded(ollama.LoadRequest("m"), "m", 0.0, is_chat=is_chat), shape)
    call = ollama_embed.parse_embed(b'{"input":"p"}')
    check_schema(ollama_embed.render_embed(call, [[0.5]], 3, "m", 1), ollama_replies.OllamaEmbedReply)
    check_schema(ollama_embed.render_embeddings([[0.5]]), ollama_replies.OllamaEmbeddingsReply)
    model = ollama_models.OllamaModel("m", 1, "llama", 2048, 100)
    check_schema(ollama_models.list_models([model]), ollama_replies.OllamaModelList)
    check_schema(ollama_models.list_loaded_models([model]), ollama_replies.OllamaModelList)
    check_schema(ollama_models.render_description(model), ollama_replies.OllamaModelDescription)
    check_schema(render_ollama_error(InvalidRequest("x")).body, ollama_replies.OllamaError)


def test_small_replies_match_their_schemas() -> None:
    for form in (b"float", b"base64"):
        call = openai_embeddings.parse(b'{"model":"m","input":"p","encoding_format":"%b"}' % form)
        check_schema(openai_embeddings.render(call, [[0.5]], 3, "m"), replies.EmbeddingList)
    served = [openai_models.ServedModel("m", 1, 2)]
    check_schema(openai_models.list_models(served), replies.ModelListing)
    check_schema(openai_models.retrieve_model(served, "m"), replies.ModelEntry)
    check_schema(tokenize.render(tokenize.parse(b'{"prompt":"a"}'), [1], ["a"], 9), replies.TokenizeReply)
    for body in (b'{"tokens":[1]}', b'{"tokens":[1],"model":"m"}'):
        check_schema(tokenize.render_detokenized(tokenize.parse_detokenize(body), "a"), replies.DetokenizeReply)
    check_schema(anthropic.render_token_count(3), replies.TokenCount)
    check_schema(render_openai_error(InvalidRequest("x")).body, replies.OpenAIError)
    check_schema(render_anthropic_error(InvalidRequest("x")).body, replies.AnthropicError)
