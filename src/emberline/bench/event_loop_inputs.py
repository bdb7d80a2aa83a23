"""The large requests of `emberline bench event-loop`, one for each kind of slow request processing."""

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


def make_chat_body(message_json: bytes, model: str, **extra_fields: object) -> bytes:
    """Return the body of a chat request with one message. `message_json` is its text, already escaped for JSON."""
    head = json.dumps({"model": model, "max_tokens": 1, **extra_fields})[:-1].encode()
    return head + b',"messages":[{"role":"user","content":"' + message_json + b'"}]}'


def make_list_field_body(item: bytes, body_bytes: int, field_name: str, model: str, **extra_fields: object) -> bytes:
    """Return a request body in which the field `field_name` is a list of about `body_bytes` bytes.

    Every element of the list is `item`.
    """
    head = json.dumps({"model": model, "max_tokens": 1, **extra_fields})[:-1].encode()
    return head + b',"' + field_name.encode() + b'":[' + (item + b",") * (body_bytes // (len(item) + 1)) + item + b"]}"


def make_common_requests(model: str, body_bytes: int) -> dict[str, HeavyRequest]:
    """Return the large requests that every server gets: plain text, JSON escapes, and JSON with many small objects."""
    return {
        "prose": HeavyRequest(CHAT, make_chat_body(PROSE * (body_bytes // len(PROSE)), model)),
        "escapes": HeavyRequest(CHAT, make_chat_body(b"\\u00e9" * (body_bytes // 6), model)),
        "messages": HeavyRequest(CHAT, make_list_field_body(MESSAGE, body_bytes, "messages", model)),
        "lists": HeavyRequest(CHAT, make_list_field_body(b"[]", body_bytes, "messages", model)),
        "token_ids": HeavyRequest("/v1/completions", make_list_field_body(b"1", body_bytes, "prompt", model)),
    }


def make_gateway_requests(body_bytes: int) -> dict[str, HeavyRequest]:
    def for_gateway(gateway: str, body: bytes, **headers: str) -> HeavyRequest:
        return HeavyRequest(f"/v1/default/{gateway}/compat/chat/completions", body, headers)

    text = PROSE * (body_bytes // len(PROSE))
    plain = make_common_requests("fake/bench", body_bytes)
    prose, messages = plain["prose"].body, plain["messages"].body
    return {
        "guarded_digits": for_gateway("guarded", make_chat_body(b"4 " * (body_bytes // 2), "fake/bench")),
        "guarded_prose": for_gateway("guarded", make_chat_body(PROSE * (body_bytes // 2 // len(PROSE)), "fake/bench")),
        **{name: for_gateway("default", request.body) for name, request in plain.items()},
        "cached_prose": for_gateway("cached", prose),
        "cached_messages": for_gateway("cached", messages),
        "translated_prose": for_gateway("default", make_chat_body(text, "anthropic/claude-x")),
        "continued_messages": for_gateway(
            "default",
            make_list_field_body(MESSAGE, body_bytes, "messages", "fake/bench", stream=True),
            **{"x-emberline-continue": "true"},
        ),
        "pool_prose": for_gateway("routed", make_chat_body(text, "pool/both")),
        "route_prose": for_gateway("routed", make_chat_body(text, "dynamic/by-text")),
        "universal_prose": HeavyRequest("/v1/default/default", make_universal_body(prose)),
        "universal_messages": HeavyRequest("/v1/default/default", make_universal_body(messages)),
        "run_messages": HeavyRequest("/accounts/default/ai/run/fake/bench", messages),
        "run_batch": HeavyRequest(
            "/accounts/default/ai/run/fake/bench?queueRequest=true",
            make_batch_body(min(body_bytes, MAX_BATCH_REQUESTS)),
        ),
        "socket_prose": HeavyRequest(
            "/v1/default/default", b"%b" % make_universal_websocket_message(prose), socket=True
        ),
        "socket_messages": HeavyRequest("/v1/default/default", make_universal_websocket_message(messages), socket=True),
        "gzip_reply": HeavyRequest("/v1/default/default/heavy/bomb", b'{"model":"x"}'),
        "large_reply": for_gateway("default", make_chat_body(b"a", "heavy/whole")),
        "large_event": for_gateway("default", make_chat_body(b"a", "heavy/event", stream=True)),
        "large_event_translated": HeavyRequest(
            "/v1/default/default/compat/messages", make_chat_body(b"a", "heavy/event", stream=True)
        ),
        "large_event_guarded": for_gateway("guarded", make_chat_body(b"a", "heavy/event", stream=True)),
    }


def make_universal_body(chat_body_json: bytes) -> bytes:
    """Return a request body for the gateway's universal endpoint.

    The endpoint takes a list of providers to try in order. This list has one provider.
    """
    return b'[{"provider":"fake","endpoint":"v1/chat/completions","query":' + chat_body_json + b"}]"


def make_universal_websocket_message(chat_body_json: bytes) -> bytes:
    """Return a WebSocket message that sends the request of `make_universal_body` to the gateway."""
    return b'{"type":"universal.create","request":%b}' % make_universal_body(chat_body_json)[1:-1]


def make_batch_body(body_bytes: int) -> bytes:
    item = b'{"prompt":"%b"}' % (b"a" * (body_bytes // 5000 - 14))
    return b'{"requests":[' + b",".join([item] * 5000) + b"]}"


def make_router_requests(body_bytes: int) -> dict[str, HeavyRequest]:
    """Return the large requests for a router.

    The model `vllm` is served by a vLLM server behind the router, to which the router sends only OpenAI's fields.
    """
    foreign = make_common_requests("vllm", body_bytes)
    return {
        **make_common_requests("fake", body_bytes),
        "vllm_prose": foreign["prose"],
        "vllm_messages": foreign["messages"],
    }


def make_engine_requests(model: str, body_bytes: int) -> dict[str, HeavyRequest]:
    tool = b'{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{}}}}'
    return {
        **make_common_requests(model, body_bytes),
        "tokenize": HeavyRequest("/tokenize", json.dumps({"model": model, "prompt": "word " * (200_000)}).encode()),
        "short_messages": HeavyRequest(CHAT, make_list_field_body(MESSAGE, 400_000, "messages", model)),
        "tools": HeavyRequest(
            CHAT, make_list_field_body(tool, body_bytes, "tools", model, messages=[json.loads(MESSAGE)])
        ),
        "detokenize": HeavyRequest(
            "/detokenize", remove_max_tokens(make_list_field_body(b"1", body_bytes, "tokens", model))
        ),
        "tokenize_messages": HeavyRequest(
            "/tokenize", remove_max_tokens(make_list_field_body(MESSAGE, body_bytes, "messages", model))
        ),
        "count_tokens": HeavyRequest(
            "/v1/messages/count_tokens", remove_max_tokens(make_list_field_body(MESSAGE, body_bytes, "messages", model))
        ),
        "embeddings": HeavyRequest(
            "/v1/embeddings", remove_max_tokens(make_list_field_body(b'"a"', body_bytes, "input", model))
        ),
        "responses_prose": HeavyRequest(
            "/v1/responses", b'{"model":"%b","input":"%b"}' % (model.encode(), PROSE * (body_bytes // len(PROSE)))
        ),
        "responses_items": HeavyRequest(
            "/v1/responses", remove_max_tokens(make_list_field_body(MESSAGE, body_bytes, "input", model))
        ),
        "resume_messages": HeavyRequest(
            "/cluster/resume", make_resume_body(make_list_field_body(MESSAGE, body_bytes, "messages", model))
        ),
    }


def remove_max_tokens(body: bytes) -> bytes:
    """Return the request body without the field `max_tokens`, for endpoints that do not accept it."""
    return body.replace(b' "max_tokens": 1,', b"", 1).replace(b', "max_tokens": 1', b"", 1)


def make_resume_body(chat_body_json: bytes) -> bytes:
    """Return the request by which a router asks a worker to continue a stream that began at a different worker."""
    return b'{"path":"/v1/chat/completions","body":%b,"seed":1,"handoff":{}}' % chat_body_json
