"""What Replicate replies, as OpenAI would."""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.api import sse
from emberline.gateway.errors import Broken
from emberline.gateway.ids import born
from emberline.gateway.providers.decoder import Decoder
from emberline.gateway.splitter import Splitter, payload_of

Json = dict[str, Any]


class _Prediction(msgspec.Struct):
    status: str
    output: Any = None
    error: Any = None
    metrics: dict[str, Any] = {}


class _Done(msgspec.Struct):
    reason: str = ""


class Predicted(Decoder):
    def __init__(self, model: str, id: str) -> None:
        self._head = {"id": f"chatcmpl-{id}", "created": born(id), "model": model}
        self._splitter = Splitter()

    def whole(self, body: bytes) -> bytes:
        try:
            found = msgspec.json.decode(body, type=_Prediction)
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise Broken(f"the reply is no prediction: {e}") from e
        if found.status != "succeeded":
            raise Broken(f"the prediction is {found.status}: {str(found.error or 'no reason given')[:300]}")
        text = "".join(map(str, found.output)) if isinstance(found.output, list) else str(found.output or "")
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        reply = {**self._head, "object": "chat.completion", "choices": [choice]}
        return sse.dumps(reply | _usage(found.metrics))

    def push(self, data: bytes) -> bytes:
        return b"".join(self._event(*payload_of(event)) for event in self._splitter.push(data))

    def end(self) -> bytes:
        if self._splitter.rest.strip():
            raise Broken("the stream ended within an event")
        return b""

    def _event(self, name: bytes, payload: bytes) -> bytes:
        match name:
            case b"output" if payload:
                return self._chunk({"content": payload.decode("utf-8", "replace")})
            case b"error":
                return _failed(payload.decode("utf-8", "replace"))
            case b"done":
                return self._done(payload)
        return b""

    def _done(self, payload: bytes) -> bytes:
        try:
            reason = msgspec.json.decode(payload or b"{}", type=_Done).reason
        except msgspec.MsgspecError:
            reason = ""
        return _failed(f"the prediction was ended: {reason}") if reason else self._chunk({}, "stop") + sse.DONE

    def _chunk(self, delta: Json, reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return sse.data({**self._head, "object": "chat.completion.chunk", "choices": [choice]})


def _failed(text: str) -> bytes:
    return sse.data({"error": {"message": text or "no reason given", "type": "server_error"}})


def _usage(metrics: Json) -> Json:
    into, out = metrics.get("input_token_count"), metrics.get("output_token_count")
    if not isinstance(into, int) or not isinstance(out, int):
        return {}
    return {"usage": {"prompt_tokens": into, "completion_tokens": out, "total_tokens": into + out}}
