"""The heavy requests of `emberline bench event-loop`: one of each kind that takes a server long."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

CHAT = "/v1/chat/completions"
MESSAGE = b'{"role":"user","content":"a"}'
PROSE = b"the quick brown fox jumps over the lazy dog. "
MAX_BATCH_REQUESTS = 10 << 20  # bytes that /ai/run accepts


@dataclass(frozen=True, slots=True)
class HeavyRequest:
    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    socket: bool = False  # the body is one WebSocket message; `universal.done` or an error ends it


def chat(content: bytes, model: str, **more: object) -> bytes:
    """Return a chat request with one message; `content` is JSON text."""
    head = json.dumps({"model": model, "max_tokens": 1, **more})[:-1].encode()
    return head + b',"messages":[{"role":"user","content":"' + content + b'"}]}'


def list_request(item: bytes, size: int, name: str, model: str, **more: object) -> bytes:
    """Return a request with one field, a list of `item` repeated to about `size` bytes."""
    head = json.dumps({"model": model, "max_tokens": 1, **more})[:-1].encode()
    return head + b',"' + name.encode() + b'":[' + (item + b",") * (size // (len(item) + 1)) + item + b"]}"


def shared_inputs(model: str, size: int) -> dict[str, HeavyRequest]:
    """Return the inputs for every server: text, escapes, and JSON that becomes many small objects."""
    return {
        "prose": HeavyRequest(CHAT, chat(PROSE * (size // len(PROSE)), model)),
        "escapes": HeavyRequest(CHAT, chat(b"\\u00e9" * (size // 6), model)),
        "messages": HeavyRequest(CHAT, list_request(MESSAGE, size, "messages", model)),
        "lists": HeavyRequest(CHAT, list_request(b"[]", size, "messages", model)),
        "token_ids": HeavyRequest("/v1/completions", list_request(b"1", size, "prompt", model)),
    }


def gateway_inputs(size: int) -> dict[str, HeavyRequest]:
    def at(gateway: str, body: bytes, **headers: str) -> HeavyRequest:
        return HeavyRequest(f"/v1/default/{gateway}/compat/chat/completions", body, headers)

    text = PROSE * (size // len(PROSE))
    plain = shared_inputs("fake/bench", size)
    prose, messages = plain["prose"].body, plain["messages"].body
    return {
        "guarded_digits": at("guarded", chat(b"4 " * (size // 2), "fake/bench")),
        "guarded_prose": at("guarded", chat(PROSE * (size // 2 // len(PROSE)), "fake/bench")),
        **{name: at("default", request.body) for name, request in plain.items()},
        "cached_prose": at("cached", prose),
        "cached_messages": at("cached", messages),
        "translated_prose": at("default", chat(text, "anthropic/claude-x")),
        "continued_messages": at(
            "default",
            list_request(MESSAGE, size, "messages", "fake/bench", stream=True),
            **{"x-emberline-continue": "true"},
        ),
        "pool_prose": at("routed", chat(text, "pool/both")),
        "route_prose": at("routed", chat(text, "dynamic/by-text")),
        "universal_prose": HeavyRequest("/v1/default/default", steps(prose)),
        "universal_messages": HeavyRequest("/v1/default/default", steps(messages)),
        "run_messages": HeavyRequest("/accounts/default/ai/run/fake/bench", messages),
        "run_batch": HeavyRequest(
            "/accounts/default/ai/run/fake/bench?queueRequest=true", batch_request(min(size, MAX_BATCH_REQUESTS))
        ),
        "socket_prose": HeavyRequest("/v1/default/default", b"%b" % create_route_request(prose), socket=True),
        "socket_messages": HeavyRequest("/v1/default/default", create_route_request(messages), socket=True),
        "gzip_reply": HeavyRequest("/v1/default/default/heavy/bomb", b'{"model":"x"}'),
        "large_reply": at("default", chat(b"a", "heavy/whole")),
        "large_event": at("default", chat(b"a", "heavy/event", stream=True)),
        "large_event_translated": HeavyRequest(
            "/v1/default/default/compat/messages", chat(b"a", "heavy/event", stream=True)
        ),
        "large_event_guarded": at("guarded", chat(b"a", "heavy/event", stream=True)),
    }


def steps(query: bytes) -> bytes:
    """Return a universal request of one step."""
    return b'[{"provider":"fake","endpoint":"v1/chat/completions","query":' + query + b"}]"


def create_route_request(query: bytes) -> bytes:
    """Return the WebSocket message that requests one step."""
    return b'{"type":"universal.create","request":%b}' % steps(query)[1:-1]


def batch_request(size: int) -> bytes:
    item = b'{"prompt":"%b"}' % (b"a" * (size // 5000 - 14))
    return b'{"requests":[' + b",".join([item] * 5000) + b"]}"


def router_inputs(size: int) -> dict[str, HeavyRequest]:
    """Return the inputs for a router. `vllm` is a model of a foreign worker, which gets only OpenAI's fields."""
    foreign = shared_inputs("vllm", size)
    return {
        **shared_inputs("fake", size),
        "vllm_prose": foreign["prose"],
        "vllm_messages": foreign["messages"],
    }


def engine_inputs(model: str, size: int) -> dict[str, HeavyRequest]:
    tool = b'{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{}}}}'
    return {
        **shared_inputs(model, size),
        "tokenize": HeavyRequest("/tokenize", json.dumps({"model": model, "prompt": "word " * (200_000)}).encode()),
        "short_messages": HeavyRequest(CHAT, list_request(MESSAGE, 400_000, "messages", model)),
        "tools": HeavyRequest(CHAT, list_request(tool, size, "tools", model, messages=[json.loads(MESSAGE)])),
        "detokenize": HeavyRequest("/detokenize", fields(list_request(b"1", size, "tokens", model))),
        "tokenize_messages": HeavyRequest("/tokenize", fields(list_request(MESSAGE, size, "messages", model))),
        "count_tokens": HeavyRequest(
            "/v1/messages/count_tokens", fields(list_request(MESSAGE, size, "messages", model))
        ),
        "embeddings": HeavyRequest("/v1/embeddings", fields(list_request(b'"a"', size, "input", model))),
        "responses_prose": HeavyRequest(
            "/v1/responses", b'{"model":"%b","input":"%b"}' % (model.encode(), PROSE * (size // len(PROSE)))
        ),
        "responses_items": HeavyRequest("/v1/responses", fields(list_request(MESSAGE, size, "input", model))),
        "resume_messages": HeavyRequest("/cluster/resume", envelope(list_request(MESSAGE, size, "messages", model))),
    }


def fields(body: bytes) -> bytes:
    """Return fields for protocols without `max_tokens`."""
    return body.replace(b' "max_tokens": 1,', b"", 1).replace(b', "max_tokens": 1', b"", 1)


def envelope(body: bytes) -> bytes:
    """Return the request that a router sends to a worker that continues another's stream."""
    return b'{"path":"/v1/chat/completions","body":%b,"seed":1,"handoff":{}}' % body
