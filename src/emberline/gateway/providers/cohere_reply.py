"""What Cohere replies, as OpenAI would."""

from __future__ import annotations

from typing import Any

from emberline.api import sse
from emberline.gateway.errors import Broken
from emberline.gateway.providers.chunked import Chunked, failed
from emberline.gateway.upstream.decoder import Decoder, decoded_object

Json = dict[str, Any]
_REASONS = {
    "COMPLETE": "stop",
    "STOP_SEQUENCE": "stop",
    "MAX_TOKENS": "length",
    "TOOL_CALL": "tool_calls",
    "ERROR_TOXIC": "content_filter",
}


class Chatted(Chunked):
    def __init__(self, model: str, id: str) -> None:
        super().__init__(model, id)
        self._calls = -1

    def whole(self, body: bytes) -> bytes:
        found = decoded_object(body)
        message = found.get("message")
        if not isinstance(message, dict):
            raise Broken("the reply has no message")
        made: Json = {"role": "assistant", "content": _text(message, "text") or message.get("tool_plan")}
        if thoughts := _text(message, "thinking"):
            made["reasoning_content"] = thoughts
        if message.get("tool_calls"):
            made["tool_calls"] = message["tool_calls"]
        choice = {"message": made, "finish_reason": _reason(found.get("finish_reason")), "logprobs": None}
        return self.reply(choice, {"usage": _usage(found.get("usage"))})

    def event(self, name: bytes, payload: bytes) -> bytes:
        return b"" if payload in (b"", b"[DONE]") else self._told(decoded_object(payload))

    def _told(self, found: Json) -> bytes:
        message = (found.get("delta") or {}).get("message") or {}
        match found.get("type"):
            case "message-start":
                return self.chunk({"role": "assistant", "content": ""})
            case "content-start" | "content-delta":
                return self._content(message.get("content") or {})
            case "tool-plan-delta":
                return self.chunk({"content": message.get("tool_plan") or ""})
            case "tool-call-start":
                self._calls += 1
                return self.chunk({"tool_calls": [{"index": self._calls, **(message.get("tool_calls") or {})}]})
            case "tool-call-delta":
                function = (message.get("tool_calls") or {}).get("function") or {}
                return self.chunk({"tool_calls": [{"index": max(0, self._calls), "function": function}]})
            case "message-end":
                return self._ended(found.get("delta") or {})
        return b""

    def _content(self, content: Json) -> bytes:
        if thoughts := content.get("thinking"):
            return self.chunk({"reasoning_content": thoughts})
        return self.chunk({"content": content["text"]}) if content.get("text") else b""

    def _ended(self, delta: Json) -> bytes:
        if delta.get("error"):
            return failed(str(delta["error"]))
        last = self.chunk({}, _reason(delta.get("finish_reason")))
        return last + self.chunks([], usage=_usage(delta.get("usage"))) + sse.DONE


class Embedded(Decoder):
    def __init__(self, model: str) -> None:
        self._model = model

    def whole(self, body: bytes) -> bytes:
        found = decoded_object(body)
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
