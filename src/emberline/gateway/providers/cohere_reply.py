"""Converts Cohere's replies to OpenAI's wire formats."""

from __future__ import annotations

from typing import Any

from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.providers.chat_chunk_decoder import ChatChunkDecoder, render_error_event
from emberline.gateway.upstream.reply_decoder import ReplyDecoder, decode_json_object
from emberline.wire import sse

Json = dict[str, Any]
_FINISH_REASONS = {
    "COMPLETE": "stop",
    "STOP_SEQUENCE": "stop",
    "MAX_TOKENS": "length",
    "TOOL_CALL": "tool_calls",
    "ERROR_TOXIC": "content_filter",
}


class CohereChatDecoder(ChatChunkDecoder):
    def __init__(self, model: str, id: str) -> None:
        super().__init__(model, id)
        self._last_call_index = -1

    def decode_body(self, body: bytes) -> bytes:
        data = decode_json_object(body)
        message = data.get("message")
        if not isinstance(message, dict):
            raise UpstreamBroken("Cohere's reply has no message")
        result: Json = {"role": "assistant", "content": _join_content(message, "text") or message.get("tool_plan")}
        if reasoning := _join_content(message, "thinking"):
            result["reasoning_content"] = reasoning
        if message.get("tool_calls"):
            result["tool_calls"] = message["tool_calls"]
        choice = {"message": result, "finish_reason": _parse_finish_reason(data.get("finish_reason")), "logprobs": None}
        return self.render_reply(choice, {"usage": _render_usage(data.get("usage"))})

    def decode_event(self, name: bytes, payload: bytes) -> bytes:
        return b"" if payload in (b"", b"[DONE]") else self._decode_object(decode_json_object(payload))

    def _decode_object(self, data: Json) -> bytes:
        message = (data.get("delta") or {}).get("message") or {}
        match data.get("type"):
            case "message-start":
                return self.render_delta({"role": "assistant", "content": ""})
            case "content-start" | "content-delta":
                return self._render_content(message.get("content") or {})
            case "tool-plan-delta":
                return self.render_delta({"content": message.get("tool_plan") or ""})
            case "tool-call-start":
                self._last_call_index += 1
                return self.render_delta(
                    {"tool_calls": [{"index": self._last_call_index, **(message.get("tool_calls") or {})}]}
                )
            case "tool-call-delta":
                function = (message.get("tool_calls") or {}).get("function") or {}
                return self.render_delta(
                    {"tool_calls": [{"index": max(0, self._last_call_index), "function": function}]}
                )
            case "message-end":
                return self._end_message(data.get("delta") or {})
        return b""

    def _render_content(self, content: Json) -> bytes:
        if reasoning := content.get("thinking"):
            return self.render_delta({"reasoning_content": reasoning})
        return self.render_delta({"content": content["text"]}) if content.get("text") else b""

    def _end_message(self, delta: Json) -> bytes:
        if delta.get("error"):
            return render_error_event(str(delta["error"]))
        last = self.render_delta({}, _parse_finish_reason(delta.get("finish_reason")))
        return last + self.render_chunk([], usage=_render_usage(delta.get("usage"))) + sse.DONE_EVENT


class CohereEmbeddingDecoder(ReplyDecoder):
    def __init__(self, model: str) -> None:
        self._model = model

    def decode_body(self, body: bytes) -> bytes:
        data = decode_json_object(body)
        embeddings = data.get("embeddings") or {}
        vectors = embeddings.get("float") or embeddings.get("base64") if isinstance(embeddings, dict) else embeddings
        if not vectors:
            raise UpstreamBroken("Cohere's reply has no embeddings")
        rows = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
        used = ((data.get("meta") or {}).get("billed_units") or {}).get("input_tokens", 0)
        usage = {"prompt_tokens": used, "total_tokens": used}
        return sse.dumps({"object": "list", "data": rows, "model": self._model, "usage": usage})


def _join_content(message: Json, kind: str) -> str:
    content = message.get("content") or []
    if isinstance(content, str):
        return content if kind == "text" else ""
    return "".join(str(part.get(kind) or "") for part in content if part.get("type") == kind)


def _parse_finish_reason(reason: Any) -> str:
    if reason not in _FINISH_REASONS:
        raise UpstreamBroken(f"Cohere's reply has an unexpected finish_reason: {str(reason)[:80]!r}")
    return _FINISH_REASONS[reason]


def _render_usage(reported: Any) -> Json | None:
    if not isinstance(reported, dict):
        return None
    counts = reported.get("billed_units") or reported.get("tokens") or {}
    input_tokens, output_tokens = int(counts.get("input_tokens") or 0), int(counts.get("output_tokens") or 0)
    usage: Json = {
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
    }
    if reported.get("cached_tokens"):
        usage["prompt_tokens_details"] = {"cached_tokens": int(reported["cached_tokens"])}
    return usage
