"""Decodes Bedrock's replies, of InvokeModel and Converse, into Anthropic's wire format."""

from __future__ import annotations

import base64
import binascii
import uuid
from typing import Any

from emberline.api import sse
from emberline.gateway.errors import Broken
from emberline.gateway.streams.eventstream import KIND, EventStream, Message
from emberline.gateway.upstream.decoder import Decoder, decoded_object

Json = dict[str, Any]
_REASONS = {"guardrail_intervened": "refusal", "content_filtered": "refusal"}  # all others are the same in both
_KINDS = {
    "throttlingException": "rate_limit_error",
    "validationException": "invalid_request_error",
    "accessDeniedException": "permission_error",
    "serviceUnavailableException": "overloaded_error",
}


class Unwrapped(Decoder):
    """Decodes InvokeModel replies: unwraps Claude's events from the AWS event stream."""

    streams = KIND

    def __init__(self) -> None:
        self._stream = EventStream()

    def push(self, data: bytes) -> bytes:
        return b"".join(self._said(message) for message in self._stream.push(data))

    def end(self) -> bytes:
        self._stream.end()
        return b""

    def _said(self, message: Message) -> bytes:
        data = decoded_object(message.payload or b"{}")
        if kind := message.exception:
            text = data.get("message") or data.get("Message") or message.headers.get(":error-message") or kind
            error = {"type": _KINDS.get(kind, "api_error"), "message": str(text)}
            return sse.event("error", {"type": "error", "error": error})
        return self.event(message.event, data)

    def event(self, kind: str, data: Json) -> bytes:
        if "bytes" not in data:
            return b""
        try:
            event_json = base64.b64decode(data["bytes"], validate=True)
        except (binascii.Error, TypeError, ValueError) as e:
            raise Broken("an event of Bedrock's stream has bytes that are not valid base64") from e
        name = str(decoded_object(event_json).get("type") or "")
        return b"event: %b\ndata: %b\n\n" % (name.encode(), event_json)


class Conversed(Unwrapped):
    """Decodes Converse replies; the usage follows the end, and text blocks may lack a start event."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model
        self._id = f"msg_{uuid.uuid4().hex}"
        self._open: set[int] = set()
        self._reason: str | None = None
        self._over = False

    def whole(self, body: bytes) -> bytes:
        data = decoded_object(body)
        message = (data.get("output") or {}).get("message")
        if not isinstance(message, dict):
            raise Broken("Bedrock's Converse reply has no message")
        content = [block for part in message.get("content") or () if (block := _block(part)) is not None]
        return sse.dumps(self._message(content, _reason(data.get("stopReason")), _usage(data.get("usage"))))

    def _message(self, content: list[Json], reason: str | None, usage: Json) -> Json:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}
        return {**head, "stop_reason": reason, "stop_sequence": None, "usage": usage}

    def event(self, kind: str, data: Json) -> bytes:
        index = data.get("contentBlockIndex", 0)
        match kind:
            case "messageStart":
                return _event("message_start", message=self._message([], None, _usage({})))
            case "contentBlockStart":
                return self._opened(index, _block(data.get("start") or {}) or {"type": "text", "text": ""})
            case "contentBlockDelta":
                return self._delta(index, data.get("delta") or {})
            case "contentBlockStop" if index in self._open:
                self._open.discard(index)
                return _event("content_block_stop", index=index)
            case "messageStop":
                self._reason = _reason(data.get("stopReason"))
            case "metadata" if self._reason is not None:
                return self._ended(_usage(data.get("usage")))
        return b""

    def end(self) -> bytes:
        super().end()
        return b"" if self._over or self._reason is None else self._ended({"output_tokens": 0})

    def _ended(self, usage: Json) -> bytes:
        self._over = True
        stop = {"stop_reason": self._reason, "stop_sequence": None}
        return _event("message_delta", delta=stop, usage=usage) + _event("message_stop")

    def _opened(self, index: int, block: Json) -> bytes:
        self._open.add(index)
        return _event("content_block_start", index=index, content_block=block)

    def _delta(self, index: int, delta: Json) -> bytes:
        start, empty = b"", {"type": "text", "text": ""}
        match delta:
            case {"text": text}:
                rendered = {"type": "text_delta", "text": text}
            case {"toolUse": {"input": text}}:
                rendered = {"type": "input_json_delta", "partial_json": text}
            case {"reasoningContent": {"text": text}}:
                rendered = {"type": "thinking_delta", "thinking": text}
                empty = {"type": "thinking", "thinking": "", "signature": ""}
            case {"reasoningContent": {"signature": signature}}:
                rendered = {"type": "signature_delta", "signature": signature}
                empty = {"type": "thinking", "thinking": "", "signature": ""}
            case {"reasoningContent": {"redactedContent": data}}:
                return self._opened(index, {"type": "redacted_thinking", "data": data})
            case _:
                return b""
        if index not in self._open:
            start = self._opened(index, empty)
        return start + _event("content_block_delta", index=index, delta=rendered)


def _block(part: Json) -> Json | None:
    match part:
        case {"text": text}:
            return {"type": "text", "text": text}
        case {"toolUse": {"toolUseId": id, "name": name, **rest}}:
            return {"type": "tool_use", "id": id, "name": name, "input": rest.get("input") or {}}
        case {"reasoningContent": {"reasoningText": {"text": text, **rest}}}:
            return {"type": "thinking", "thinking": text, "signature": rest.get("signature") or ""}
        case {"reasoningContent": {"redactedContent": data}}:
            return {"type": "redacted_thinking", "data": data}
    return None


def _reason(reason: Any) -> str:
    return _REASONS.get(str(reason), str(reason or "end_turn"))


def _usage(reported: Any) -> Json:
    reported = reported if isinstance(reported, dict) else {}
    return {
        "input_tokens": reported.get("inputTokens", 0),
        "cache_read_input_tokens": reported.get("cacheReadInputTokens", 0),
        "cache_creation_input_tokens": reported.get("cacheWriteInputTokens", 0),
        "output_tokens": reported.get("outputTokens", 0),
    }


def _event(kind: str, **more: Any) -> bytes:
    return sse.event(kind, {"type": kind, **more})
