"""Fake replies in formats for which the gateway has no dialect (wire format).

They are the formats of Cohere, Bedrock, Replicate and Google's OAuth.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from typing import Any

from emberline.gateway.fakes.reply import ARGUMENTS, FakeReply, dialect_of_path
from emberline.gateway.streams.aws_eventstream import CONTENT_TYPE, encode_message
from emberline.wire import sse

Json = dict[str, Any]


class FakeCohereReply(FakeReply):
    def _usage(self) -> Json:
        units = {"input_tokens": self._input, "output_tokens": self.words}
        return {"billed_units": units, "tokens": {"input_tokens": self._input + 60, "output_tokens": self.words}}

    def _tool_call(self, arguments: str) -> Json:
        return {"id": "call_1", "type": "function", "function": {"name": self._tool, "arguments": arguments}}

    def _finish_reason(self) -> str:
        return "TOOL_CALL" if self._tool else "COMPLETE"

    def whole_body(self) -> bytes:
        message: Json = {"role": "assistant", "content": [{"type": "text", "text": self.text}]}
        if self._tool:
            message = {"role": "assistant", "tool_plan": self.text, "tool_calls": [self._tool_call(ARGUMENTS)]}
        return sse.dumps(
            {"id": "c", "finish_reason": self._finish_reason(), "message": message, "usage": self._usage()}
        )

    def events(self) -> Iterator[tuple[bytes, bool]]:
        def event(kind: str, message: Json, **fields: Any) -> bytes:
            return sse.encode_named_event(kind, {"type": kind, "delta": {"message": message}, **fields})

        yield event("message-start", {"role": "assistant", "content": []}), False
        for piece in self._reply_pieces():
            if self._tool:
                yield event("tool-plan-delta", {"tool_plan": piece}), True
            else:
                yield event("content-delta", {"content": {"text": piece}}, index=0), True
        if self._tool:
            yield event("tool-call-start", {"tool_calls": self._tool_call("")}, index=0), True
            yield event("tool-call-delta", {"tool_calls": {"function": {"arguments": ARGUMENTS}}}, index=0), True
            yield sse.encode_named_event("tool-call-end", {"type": "tool-call-end", "index": 0}), False
        end = {"finish_reason": self._finish_reason(), "usage": self._usage()}
        yield sse.encode_named_event("message-end", {"type": "message-end", "delta": end}), False

    def error_body(self, status: int) -> bytes:
        return sse.dumps({"message": "injected error"})

    def error_event(self) -> bytes:
        return sse.encode_named_event(
            "message-end", {"type": "message-end", "delta": {"finish_reason": "ERROR", "error": "injected error"}}
        )


class FakeBedrockInvokeReply(FakeReply):
    """A reply of Claude through Bedrock's InvokeModel API."""

    def __init__(self, path: str, request: Json, words: int) -> None:
        super().__init__("anthropic", path, request, words)
        self.stream = path.endswith("-stream")
        self.content_type = CONTENT_TYPE if self.stream else "application/json"

    def events(self) -> Iterator[tuple[bytes, bool]]:
        for event, content in super().events():
            payload = event.partition(b"data: ")[2].strip()
            yield _aws_event_message("chunk", {"bytes": base64.b64encode(payload).decode(), "p": "abcd"}), content

    def error_body(self, status: int) -> bytes:
        return sse.dumps({"message": "injected error"})

    def error_event(self) -> bytes:
        return _aws_exception_message()


class FakeBedrockConverseReply(FakeBedrockInvokeReply):
    """A reply of Bedrock's Converse API."""

    def __init__(self, path: str, request: Json, words: int) -> None:
        super().__init__(path, request, words)
        self.words = (request.get("inferenceConfig") or {}).get("maxTokens") or words
        tools = (request.get("toolConfig") or {}).get("tools")
        self._tool = tools[0]["toolSpec"]["name"] if tools else ""

    def _usage(self) -> Json:
        return {"inputTokens": self._input, "outputTokens": self.words, "totalTokens": self._input + self.words}

    def _tool_use(self, **fields: Any) -> Json:
        return {"toolUse": {"toolUseId": "tooluse_1", "name": self._tool, **fields}}

    def whole_body(self) -> bytes:
        content: list[Json] = [{"text": self.text}]
        if self._tool:
            content.append(self._tool_use(input={"city": "Paris"}))
        output = {"message": {"role": "assistant", "content": content}}
        return sse.dumps({"output": output, "stopReason": self._stop_reason(), "usage": self._usage(), "metrics": {}})

    def events(self) -> Iterator[tuple[bytes, bool]]:
        yield _aws_event_message("messageStart", {"role": "assistant"}), False
        for piece in self._reply_pieces():
            yield _aws_event_message("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": piece}}), True
        yield _aws_event_message("contentBlockStop", {"contentBlockIndex": 0}), False
        if self._tool:
            yield _aws_event_message("contentBlockStart", {"contentBlockIndex": 1, "start": self._tool_use()}), True
            delta = {"toolUse": {"input": ARGUMENTS}}
            yield _aws_event_message("contentBlockDelta", {"contentBlockIndex": 1, "delta": delta}), True
            yield _aws_event_message("contentBlockStop", {"contentBlockIndex": 1}), False
        stop = _aws_event_message("messageStop", {"stopReason": self._stop_reason()})
        yield stop + _aws_event_message("metadata", {"usage": self._usage(), "metrics": {}}), False


class FakeReplicateReply(FakeReply):
    """A reply of Replicate: a created prediction, its status or its stream.

    The URLs in the reply contain the number of words, so that later requests for the prediction need no stored state.
    """

    def __init__(self, path: str, host: str, request: Json, words: int) -> None:
        super().__init__("raw", path, request, words)
        parameters = request.get("input") if isinstance(request.get("input"), dict) else {}
        last = path.rpartition("/")[2]
        self.words = int(last) if last.isdecimal() else (parameters or {}).get("max_tokens") or words
        self.stream = "/streams/" in path
        self.content_type = "text/event-stream" if self.stream else "application/json"
        self._is_done = last.isdecimal()
        self._url = f"http://{host}/v1"

    def whole_body(self) -> bytes:
        urls = {"get": f"{self._url}/predictions/{self.words}", "stream": f"{self._url}/streams/{self.words}"}
        prediction: Json = {"id": str(self.words), "status": "starting", "output": None, "urls": urls}
        if self._is_done:
            metrics = {"input_token_count": self._input, "output_token_count": self.words}
            prediction |= {"status": "succeeded", "output": self._reply_pieces(), "metrics": metrics}
        return sse.dumps(prediction)

    def events(self) -> Iterator[tuple[bytes, bool]]:
        for piece in self._reply_pieces():
            yield b"event: output\nid: 1:0\ndata: %b\n\n" % piece.encode(), True
        yield b"event: done\nid: 1:1\ndata: {}\n\n", False

    def error_body(self, status: int) -> bytes:
        return sse.dumps({"title": "Error", "detail": "injected error", "status": status})

    def error_event(self) -> bytes:
        return b"event: error\ndata: injected error\n\n"


class FakeGeminiListReply(FakeReply):
    """A streamed reply of Gemini without server-sent events: one JSON list."""

    def __init__(self, path: str, request: Json, words: int) -> None:
        super().__init__("gemini", path, request, words)
        self.stream, self.content_type = False, "application/json"

    def whole_body(self) -> bytes:
        return b"[" + b",\r\n".join(event[6:].strip() for event, _ in self.events()) + b"]"


class FakeCohereEmbeddingReply(FakeReply):
    """An embeddings reply of Cohere."""

    def __init__(self, request: Json) -> None:
        super().__init__("raw", "", request, 0)
        self._texts, self._types = request.get("texts") or [], request.get("embedding_types") or ["float"]

    def whole_body(self) -> bytes:
        encoded = base64.b64encode(struct.pack("<2f", 0.25, -0.5)).decode()
        one = {"float": [0.25, -0.5], "base64": encoded}
        embeddings = {kind: [one[kind] for _ in self._texts] for kind in self._types}
        return sse.dumps({"id": "e", "embeddings": embeddings, "meta": {"billed_units": {"input_tokens": self._input}}})


class FakeGoogleTokenReply(FakeReply):
    """A reply of Google's OAuth endpoint with an access token."""

    def __init__(self) -> None:
        super().__init__("raw", "", {}, 0)

    def whole_body(self) -> bytes:
        return sse.dumps({"access_token": "ya29.a-token", "expires_in": 3599, "token_type": "Bearer"})


def make_count_or_embeddings(path: str, request: Json) -> Json | None:
    """Return the reply of an endpoint that counts tokens or computes embeddings in Gemini's format, else None."""
    bare = path.partition("?")[0]
    vector = {"values": [0.25, -0.5]}
    if bare.endswith("/messages/count_tokens"):
        return {"input_tokens": 12}
    if bare.endswith(":countTokens"):
        return {"totalTokens": 13}
    if bare.endswith(":embedContent"):
        return {"embedding": vector}
    if bare.endswith(":batchEmbedContents"):
        return {"embeddings": [vector for _ in request["requests"]]}
    return None


def make_reply(path: str, host: str, request: Json, word_count: int) -> FakeReply:
    """Return the fake reply to a request at this path.

    `host` is the fake provider's own address. `word_count` is the number of words in the reply.
    """
    bare = path.partition("?")[0]
    if bare.endswith("/v2/chat"):
        return FakeCohereReply("raw", path, request, word_count)
    if "/invoke" in bare:
        return FakeBedrockInvokeReply(bare, request, word_count)
    if "/converse" in bare:
        return FakeBedrockConverseReply(bare, request, word_count)
    if bare.endswith("/v2/embed"):
        return FakeCohereEmbeddingReply(request)
    if bare.endswith(":streamGenerateContent") and "alt=sse" not in path:
        return FakeGeminiListReply(path, request, word_count)
    if "/predictions" in bare or "/streams/" in bare:
        return FakeReplicateReply(bare, host, request, word_count)
    return (
        FakeGoogleTokenReply()
        if bare.endswith("/token")
        else FakeReply(dialect_of_path(path), path, request, word_count)
    )


def _aws_event_message(kind: str, payload: Json) -> bytes:
    headers = {":event-type": kind, ":content-type": "application/json", ":message-type": "event"}
    return encode_message(headers, sse.dumps(payload))


def _aws_exception_message() -> bytes:
    headers = {":exception-type": "modelStreamErrorException", ":message-type": "exception"}
    return encode_message(headers, b'{"message":"injected error"}')
