"""Converts Bedrock's replies from InvokeModel and Converse to Anthropic's wire format."""

from __future__ import annotations

import base64
import binascii
import uuid
from typing import Any

from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.streams.aws_eventstream import CONTENT_TYPE, EventStreamMessage, EventStreamParser
from emberline.gateway.upstream.reply_decoder import ReplyDecoder, decode_json_object
from emberline.wire import sse

Json = dict[str, Any]
_STOP_REASONS = {"guardrail_intervened": "refusal", "content_filtered": "refusal"}  # all others are the same in both
_ERROR_TYPES = {
    "throttlingException": "rate_limit_error",
    "validationException": "invalid_request_error",
    "accessDeniedException": "permission_error",
    "serviceUnavailableException": "overloaded_error",
}


class InvokeReplyDecoder(ReplyDecoder):
    """Decodes InvokeModel replies: takes Claude's events out of AWS's binary event stream."""

    stream_content_type = CONTENT_TYPE

    def __init__(self) -> None:
        self._stream = EventStreamParser()

    def push(self, data: bytes) -> bytes:
        return b"".join(self._decode_message(message) for message in self._stream.push(data))

    def end(self) -> bytes:
        self._stream.end()
        return b""

    def _decode_message(self, message: EventStreamMessage) -> bytes:
        data = decode_json_object(message.payload or b"{}")
        if kind := message.exception_type:
            text = data.get("message") or data.get("Message") or message.headers.get(":error-message") or kind
            error = {"type": _ERROR_TYPES.get(kind, "api_error"), "message": str(text)}
            return sse.encode_named_event("error", {"type": "error", "error": error})
        return self.decode_event(message.event_type, data)

    def decode_event(self, kind: str, data: Json) -> bytes:
        if "bytes" not in data:
            return b""
        try:
            event_json = base64.b64decode(data["bytes"], validate=True)
        except (binascii.Error, TypeError, ValueError) as e:
            raise UpstreamBroken("an event of Bedrock's stream has bytes that are not valid base64") from e
        name = str(decode_json_object(event_json).get("type") or "")
        return b"event: %b\ndata: %b\n\n" % (name.encode(), event_json)


class ConverseReplyDecoder(InvokeReplyDecoder):
    """Decodes Converse replies to Anthropic's events.

    Converse reports the usage after the end of the message, and may omit the start event of a text block.
    """

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model
        self._id = f"msg_{uuid.uuid4().hex}"
        self._open_blocks: set[int] = set()
        self._stop_reason: str | None = None
        self._has_ended = False

    def decode_body(self, body: bytes) -> bytes:
        data = decode_json_object(body)
        message = (data.get("output") or {}).get("message")
        if not isinstance(message, dict):
            raise UpstreamBroken("Bedrock's Converse reply has no message")
        content = [block for part in message.get("content") or () if (block := _render_block(part)) is not None]
        return sse.dumps(
            self._render_message(content, _render_stop_reason(data.get("stopReason")), _render_usage(data.get("usage")))
        )

    def _render_message(self, content: list[Json], reason: str | None, usage: Json) -> Json:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}
        return {**head, "stop_reason": reason, "stop_sequence": None, "usage": usage}

    def decode_event(self, kind: str, data: Json) -> bytes:
        index = data.get("contentBlockIndex", 0)
        match kind:
            case "messageStart":
                return _render_event("message_start", message=self._render_message([], None, _render_usage({})))
            case "contentBlockStart":
                return self._start_block(index, _render_block(data.get("start") or {}) or {"type": "text", "text": ""})
            case "contentBlockDelta":
                return self._render_delta(index, data.get("delta") or {})
            case "contentBlockStop" if index in self._open_blocks:
                self._open_blocks.discard(index)
                return _render_event("content_block_stop", index=index)
            case "messageStop":
                self._stop_reason = _render_stop_reason(data.get("stopReason"))
            case "metadata" if self._stop_reason is not None:
                return self._end_message(_render_usage(data.get("usage")))
        return b""

    def end(self) -> bytes:
        super().end()
        return b"" if self._has_ended or self._stop_reason is None else self._end_message({"output_tokens": 0})

    def _end_message(self, usage: Json) -> bytes:
        self._has_ended = True
        stop = {"stop_reason": self._stop_reason, "stop_sequence": None}
        return _render_event("message_delta", delta=stop, usage=usage) + _render_event("message_stop")

    def _start_block(self, index: int, block: Json) -> bytes:
        self._open_blocks.add(index)
        return _render_event("content_block_start", index=index, content_block=block)

    def _render_delta(self, index: int, delta: Json) -> bytes:
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
                return self._start_block(index, {"type": "redacted_thinking", "data": data})
            case _:
                return b""
        if index not in self._open_blocks:
            start = self._start_block(index, empty)
        return start + _render_event("content_block_delta", index=index, delta=rendered)


def _render_block(part: Json) -> Json | None:
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


def _render_stop_reason(reason: Any) -> str:
    return _STOP_REASONS.get(str(reason), str(reason or "end_turn"))


def _render_usage(reported: Any) -> Json:
    reported = reported if isinstance(reported, dict) else {}
    return {
        "input_tokens": reported.get("inputTokens", 0),
        "cache_read_input_tokens": reported.get("cacheReadInputTokens", 0),
        "cache_creation_input_tokens": reported.get("cacheWriteInputTokens", 0),
        "output_tokens": reported.get("outputTokens", 0),
    }


def _render_event(kind: str, **fields: Any) -> bytes:
    return sse.encode_named_event(kind, {"type": kind, **fields})
