"""What Cohere replies, as OpenAI would."""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.api import sse
from emberline.gateway.errors import Broken
from emberline.gateway.ids import born
from emberline.gateway.providers.decoder import Decoder
from emberline.gateway.splitter import Splitter, payload_of

Json = dict[str, Any]
_REASONS = {
    "COMPLETE": "stop",
    "STOP_SEQUENCE": "stop",
    "MAX_TOKENS": "length",
    "TOOL_CALL": "tool_calls",
    "ERROR_TOXIC": "content_filter",
}


class Chatted(Decoder):
    def __init__(self, model: str, id: str) -> None:
        self._head = {"id": f"chatcmpl-{id}", "created": born(id), "model": model}
        self._splitter = Splitter()
        self._calls = -1

    def whole(self, body: bytes) -> bytes:
        found = _decoded(body)
        message = found.get("message")
        if not isinstance(message, dict):
            raise Broken("the reply has no message")
        made: Json = {"role": "assistant", "content": _text(message, "text") or message.get("tool_plan")}
        if thoughts := _text(message, "thinking"):
            made["reasoning_content"] = thoughts
        if message.get("tool_calls"):
            made["tool_calls"] = message["tool_calls"]
        choice = {"index": 0, "message": made, "finish_reason": _reason(found.get("finish_reason")), "logprobs": None}
        usage = _usage(found.get("usage"))
        return sse.dumps({**self._head, "object": "chat.completion", "choices": [choice], "usage": usage})

    def push(self, data: bytes) -> bytes:
        payloads = (payload_of(event)[1] for event in self._splitter.push(data))
        return b"".join(self._event(_decoded(payload)) for payload in payloads if payload not in (b"", b"[DONE]"))

    def end(self) -> bytes:
        if self._splitter.rest.strip():
            raise Broken("the stream ended within an event")
        return b""

    def _event(self, found: Json) -> bytes:
        message = (found.get("delta") or {}).get("message") or {}
        match found.get("type"):
            case "message-start":
                return self._chunk({"role": "assistant", "content": ""})
            case "content-start" | "content-delta":
                return self._content(message.get("content") or {})
            case "tool-plan-delta":
                return self._chunk({"content": message.get("tool_plan") or ""})
            case "tool-call-start":
                self._calls += 1
                return self._chunk({"tool_calls": [{"index": self._calls, **(message.get("tool_calls") or {})}]})
            case "tool-call-delta":
                function = (message.get("tool_calls") or {}).get("function") or {}
                return self._chunk({"tool_calls": [{"index": max(0, self._calls), "function": function}]})
            case "message-end":
                return self._ended(found.get("delta") or {})
        return b""

    def _content(self, content: Json) -> bytes:
        if thoughts := content.get("thinking"):
            return self._chunk({"reasoning_content": thoughts})
        return self._chunk({"content": content["text"]}) if content.get("text") else b""

    def _ended(self, delta: Json) -> bytes:
        if delta.get("error"):
            return sse.data({"error": {"message": str(delta["error"]), "type": "server_error"}})
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": _usage(delta.get("usage"))}
        return self._chunk({}, _reason(delta.get("finish_reason"))) + sse.data(chunk) + sse.DONE

    def _chunk(self, delta: Json, reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return sse.data({**self._head, "object": "chat.completion.chunk", "choices": [choice]})


class Embedded(Decoder):
    def __init__(self, model: str) -> None:
        self._model = model

    def whole(self, body: bytes) -> bytes:
        found = _decoded(body)
        said = found.get("embeddings") or {}
        vectors = said.get("float") or said.get("base64") if isinstance(said, dict) else said
        if not vectors:
            raise Broken("the reply has no embeddings")
        rows = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)]
        used = ((found.get("meta") or {}).get("billed_units") or {}).get("input_tokens", 0)
        usage = {"prompt_tokens": used, "total_tokens": used}
        return sse.dumps({"object": "list", "data": rows, "model": self._model, "usage": usage})


def _text(message: Json, kind: str) -> str:
    content = message.get("content") or []
    if isinstance(content, str):
        return content if kind == "text" else ""
    return "".join(str(part.get(kind) or "") for part in content if part.get("type") == kind)


def _reason(said: Any) -> str:
    if said not in _REASONS:
        raise Broken(f"the reply ended by {str(said)[:80]!r}")
    return _REASONS[said]


def _usage(said: Any) -> Json | None:
    if not isinstance(said, dict):
        return None
    counted = said.get("billed_units") or said.get("tokens") or {}
    into, out = int(counted.get("input_tokens") or 0), int(counted.get("output_tokens") or 0)
    usage: Json = {"prompt_tokens": into, "completion_tokens": out, "total_tokens": into + out}
    if said.get("cached_tokens"):
        usage["prompt_tokens_details"] = {"cached_tokens": int(said["cached_tokens"])}
    return usage


def _decoded(data: bytes) -> Json:
    try:
        found = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise Broken(f"what came is not JSON: {e}") from e
    if not isinstance(found, dict):
        raise Broken("what came is no object of JSON")
    return found
