"""Converts Replicate's predictions to replies of OpenAI's chat API."""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.providers.chat_chunk_decoder import ChatChunkDecoder, render_error_event
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.wire import sse

Json = dict[str, Any]


class _Prediction(msgspec.Struct):
    status: str
    output: Any = None
    error: Any = None
    metrics: dict[str, Any] = {}


class _DoneEvent(msgspec.Struct):
    reason: str = ""


class ReplicateReplyDecoder(ChatChunkDecoder):
    def decode_body(self, body: bytes) -> bytes:
        try:
            prediction = msgspec.json.decode(body, type=_Prediction)
        except JSON_DECODE_ERRORS as e:
            raise UpstreamBroken(f"Replicate's reply is not a prediction: {e}") from e
        if prediction.status != "succeeded":
            reason = str(prediction.error or "the provider sent no error message")[:300]
            raise UpstreamBroken(f"the Replicate prediction has status {prediction.status!r}: {reason}")
        text = (
            "".join(map(str, prediction.output))
            if isinstance(prediction.output, list)
            else str(prediction.output or "")
        )
        message = {"role": "assistant", "content": text}
        return self.render_reply({"message": message, "finish_reason": "stop"}, _render_usage(prediction.metrics))

    def decode_event(self, name: bytes, payload: bytes) -> bytes:
        match name:
            case b"output" if payload:
                return self.render_delta({"content": payload.decode("utf-8", "replace")})
            case b"error":
                return render_error_event(payload.decode("utf-8", "replace"))
            case b"done":
                return self._end_stream(payload)
        return b""

    def _end_stream(self, payload: bytes) -> bytes:
        try:
            reason = msgspec.json.decode(payload or b"{}", type=_DoneEvent).reason
        except JSON_DECODE_ERRORS:
            reason = ""
        return (
            render_error_event(f"the Replicate prediction ended early: {reason}")
            if reason
            else self.render_delta({}, "stop") + sse.DONE_EVENT
        )


def _render_usage(metrics: Json) -> Json:
    input_tokens, output_tokens = metrics.get("input_token_count"), metrics.get("output_token_count")
    if not isinstance(input_tokens, int) or not isinstance(output_tokens, int):
        return {}
    return {
        "usage": {
            "prompt_tokens": input_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": input_tokens + output_tokens,
        }
    }
