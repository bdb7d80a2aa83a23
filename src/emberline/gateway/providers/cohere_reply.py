"""Decodes Cohere's replies into OpenAI's wire formats."""

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
        data = decoded_object(body)
        message = data.get("message")
        if not isinstance(message, dict):
            raise Broken("Cohere's reply has no message")
        result: Json = {"role": "assistant", "content": _text(message, "text") or message.get("tool_plan")}
        if thoughts := _text(message, "thinking"):
            result["reasoning_content"] = thoughts
        if message.get("tool_calls"):
            result["tool_calls"] = message["tool_calls"]
        choice = {"message": result, "finish_reason": _reason(data.get("finish_reason")), "logprobs": None}
        return self.reply(choice, {"usage": _usage(data.get("usage"))})

    def event(self, name: bytes, payload: bytes) -> bytes:
        return b"" if payload in (b"", b"[DONE]") else self._told(decoded_object(payload))

    def _told(self, data: Json) -> bytes:
        message = (data.get("delta") or {}).get("message") or {}
        match data.get("type"):
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
                return self._ended(data.get("delta") or {})
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
        data = decoded_object(body)
        embeddings = data.get("embeddings") or {}
        vectors = embeddings.get("float") or embeddings.get("base64") if isinstance(embeddings, dict) else embeddings
        if not vectors:
            raise Broken("Cohere's reply has no embeddings")
        rows = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)]
        used = ((data.get("meta") or {}).get("billed_units") or {}).get("input_tokens", 0)
        usage = {"prompt_tokens": used, "total_tokens": used}
        return sse.dumps({"object": "list", "data": rows, "model": self._model, "usage": usage})


def _text(message: Json, kind: str) -> str:
    content = message.get("content") or []
    if isinstance(content, str):
        return content if kind == "text" else ""
    return "".join(str(part.get(kind) or "") for part in content if part.get("type") == kind)


def _reason(reason: Any) -> str:
    if reason not in _REASONS:
        raise Broken(f"Cohere's reply has an unexpected finish_reason: {str(reason)[:80]!r}")
    return _REASONS[reason]


def _usage(reported: Any) -> Json | None:
    if not isinstance(reported, dict):
        return None
    counts = reported.get("billed_units") or reported.get("tokens") or {}
    input_tokens, request = int(counts.get("input_tokens") or 0), int(counts.get("output_tokens") or 0)
    usage: Json = {"prompt_tokens": input_tokens, "completion_tokens": request, "total_tokens": input_tokens + request}
    if reported.get("cached_tokens"):
        usage["prompt_tokens_details"] = {"cached_tokens": int(reported["cached_tokens"])}
    return usage
