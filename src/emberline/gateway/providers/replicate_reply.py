"""Decodes Replicate's predictions into OpenAI's chat."""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.api import sse
from emberline.gateway.errors import Broken
from emberline.gateway.providers.chunked import Chunked, failed
from emberline.net.notjson import NOT_JSON

Json = dict[str, Any]


class _Prediction(msgspec.Struct):
    status: str
    output: Any = None
    error: Any = None
    metrics: dict[str, Any] = {}


class _Done(msgspec.Struct):
    reason: str = ""


class Predicted(Chunked):
    def whole(self, body: bytes) -> bytes:
        try:
            prediction = msgspec.json.decode(body, type=_Prediction)
        except NOT_JSON as e:
            raise Broken(f"Replicate's reply is not a prediction: {e}") from e
        if prediction.status != "succeeded":
            reason = str(prediction.error or "the provider sent no error message")[:300]
            raise Broken(f"the Replicate prediction has status {prediction.status!r}: {reason}")
        text = (
            "".join(map(str, prediction.output))
            if isinstance(prediction.output, list)
            else str(prediction.output or "")
        )
        message = {"role": "assistant", "content": text}
        return self.reply({"message": message, "finish_reason": "stop"}, _usage(prediction.metrics))

    def event(self, name: bytes, payload: bytes) -> bytes:
        match name:
            case b"output" if payload:
                return self.chunk({"content": payload.decode("utf-8", "replace")})
            case b"error":
                return failed(payload.decode("utf-8", "replace"))
            case b"done":
                return self._done(payload)
        return b""

    def _done(self, payload: bytes) -> bytes:
        try:
            reason = msgspec.json.decode(payload or b"{}", type=_Done).reason
        except NOT_JSON:
            reason = ""
        return (
            failed(f"the Replicate prediction ended early: {reason}") if reason else self.chunk({}, "stop") + sse.DONE
        )


def _usage(metrics: Json) -> Json:
    input_tokens, request = metrics.get("input_token_count"), metrics.get("output_token_count")
    if not isinstance(input_tokens, int) or not isinstance(request, int):
        return {}
    return {
        "usage": {"prompt_tokens": input_tokens, "completion_tokens": request, "total_tokens": input_tokens + request}
    }
