"""Fake replies of APIs that are none of the gateway's dialects: Cohere, Bedrock, Replicate, Google tokens."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from typing import Any

from emberline.api import sse
from emberline.gateway.fakes.reply import ARGUMENTS, FakeReply, dialect_at
from emberline.gateway.streams.eventstream import KIND, message

Json = dict[str, Any]


class FakeCohere(FakeReply):
    def _usage(self) -> Json:
        units = {"input_tokens": self._input, "output_tokens": self.words}
        return {"billed_units": units, "tokens": {"input_tokens": self._input + 60, "output_tokens": self.words}}

    def _call(self, arguments: str) -> Json:
        return {"id": "call_1", "type": "function", "function": {"name": self._tool, "arguments": arguments}}

    def _finish(self) -> str:
        return "TOOL_CALL" if self._tool else "COMPLETE"

    def whole(self) -> bytes:
        message: Json = {"role": "assistant", "content": [{"type": "text", "text": self.text}]}
        if self._tool:
            message = {"role": "assistant", "tool_plan": self.text, "tool_calls": [self._call(ARGUMENTS)]}
        return sse.dumps({"id": "c", "finish_reason": self._finish(), "message": message, "usage": self._usage()})

    def events(self) -> Iterator[tuple[bytes, bool]]:
        def event(kind: str, message: Json, **more: Any) -> bytes:
            return sse.event(kind, {"type": kind, "delta": {"message": message}, **more})

        yield event("message-start", {"role": "assistant", "content": []}), False
        for piece in self._pieces():
            if self._tool:
                yield event("tool-plan-delta", {"tool_plan": piece}), True
            else:
                yield event("content-delta", {"content": {"text": piece}}, index=0), True
        if self._tool:
            yield event("tool-call-start", {"tool_calls": self._call("")}, index=0), True
            yield event("tool-call-delta", {"tool_calls": {"function": {"arguments": ARGUMENTS}}}, index=0), True
            yield sse.event("tool-call-end", {"type": "tool-call-end", "index": 0}), False
        end = {"finish_reason": self._finish(), "usage": self._usage()}
        yield sse.event("message-end", {"type": "message-end", "delta": end}), False

    def error(self, status: int) -> bytes:
        return sse.dumps({"message": "injected error"})

    def error_event(self) -> bytes:
        return sse.event(
            "message-end", {"type": "message-end", "delta": {"finish_reason": "ERROR", "error": "injected error"}}
        )


class FakeInvoked(FakeReply):
    """Claude through Bedrock's InvokeModel API."""

    def __init__(self, path: str, asked: Json, words: int) -> None:
        super().__init__("anthropic", path, asked, words)
        self.stream = path.endswith("-stream")
        self.kind = KIND if self.stream else "application/json"

    def events(self) -> Iterator[tuple[bytes, bool]]:
        for event, content in super().events():
            payload = event.partition(b"data: ")[2].strip()
            yield _wrapped("chunk", {"bytes": base64.b64encode(payload).decode(), "p": "abcd"}), content

    def error(self, status: int) -> bytes:
        return sse.dumps({"message": "injected error"})

    def error_event(self) -> bytes:
        return _exception()


class FakeConversed(FakeInvoked):
    """Bedrock's Converse API."""

    def __init__(self, path: str, asked: Json, words: int) -> None:
        super().__init__(path, asked, words)
        self.words = (asked.get("inferenceConfig") or {}).get("maxTokens") or words
        tools = (asked.get("toolConfig") or {}).get("tools")
        self._tool = tools[0]["toolSpec"]["name"] if tools else ""

    def _usage(self) -> Json:
        return {"inputTokens": self._input, "outputTokens": self.words, "totalTokens": self._input + self.words}

    def _use(self, **more: Any) -> Json:
        return {"toolUse": {"toolUseId": "tooluse_1", "name": self._tool, **more}}

    def whole(self) -> bytes:
        content: list[Json] = [{"text": self.text}]
        if self._tool:
            content.append(self._use(input={"city": "Paris"}))
        output = {"message": {"role": "assistant", "content": content}}
        return sse.dumps({"output": output, "stopReason": self._stop(), "usage": self._usage(), "metrics": {}})

    def events(self) -> Iterator[tuple[bytes, bool]]:
        yield _wrapped("messageStart", {"role": "assistant"}), False
        for piece in self._pieces():
            yield _wrapped("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": piece}}), True
        yield _wrapped("contentBlockStop", {"contentBlockIndex": 0}), False
        if self._tool:
            yield _wrapped("contentBlockStart", {"contentBlockIndex": 1, "start": self._use()}), True
            delta = {"toolUse": {"input": ARGUMENTS}}
            yield _wrapped("contentBlockDelta", {"contentBlockIndex": 1, "delta": delta}), True
            yield _wrapped("contentBlockStop", {"contentBlockIndex": 1}), False
        stop = _wrapped("messageStop", {"stopReason": self._stop()})
        yield stop + _wrapped("metadata", {"usage": self._usage(), "metrics": {}}), False


class FakePredicted(FakeReply):
    """Replicate: creates a prediction, reports its status or streams it.

    The URLs of a prediction contain its word count.
    """

    def __init__(self, path: str, host: str, asked: Json, words: int) -> None:
        super().__init__("raw", path, asked, words)
        parameters = asked.get("input") if isinstance(asked.get("input"), dict) else {}
        last = path.rpartition("/")[2]
        self.words = int(last) if last.isdecimal() else (parameters or {}).get("max_tokens") or words
        self.stream = "/streams/" in path
        self.kind = "text/event-stream" if self.stream else "application/json"
        self._done = last.isdecimal()
        self._url = f"http://{host}/v1"

    def whole(self) -> bytes:
        urls = {"get": f"{self._url}/predictions/{self.words}", "stream": f"{self._url}/streams/{self.words}"}
        prediction: Json = {"id": str(self.words), "status": "starting", "output": None, "urls": urls}
        if self._done:
            metrics = {"input_token_count": self._input, "output_token_count": self.words}
            prediction |= {"status": "succeeded", "output": self._pieces(), "metrics": metrics}
        return sse.dumps(prediction)

    def events(self) -> Iterator[tuple[bytes, bool]]:
        for piece in self._pieces():
            yield b"event: output\nid: 1:0\ndata: %b\n\n" % piece.encode(), True
        yield b"event: done\nid: 1:1\ndata: {}\n\n", False

    def error(self, status: int) -> bytes:
        return sse.dumps({"title": "Error", "detail": "injected error", "status": status})

    def error_event(self) -> bytes:
        return b"event: error\ndata: injected error\n\n"


class FakeListed(FakeReply):
    """Gemini's stream without server-sent events: one JSON list."""

    def __init__(self, path: str, asked: Json, words: int) -> None:
        super().__init__("gemini", path, asked, words)
        self.stream, self.kind = False, "application/json"

    def whole(self) -> bytes:
        return b"[" + b",\r\n".join(event[6:].strip() for event, _ in self.events()) + b"]"


class FakeEmbedded(FakeReply):
    """Cohere's embeddings."""

    def __init__(self, asked: Json) -> None:
        super().__init__("raw", "", asked, 0)
        self._texts, self._types = asked.get("texts") or [], asked.get("embedding_types") or ["float"]

    def whole(self) -> bytes:
        encoded = base64.b64encode(struct.pack("<2f", 0.25, -0.5)).decode()
        one = {"float": [0.25, -0.5], "base64": encoded}
        embeddings = {kind: [one[kind] for _ in self._texts] for kind in self._types}
        return sse.dumps({"id": "e", "embeddings": embeddings, "meta": {"billed_units": {"input_tokens": self._input}}})


class FakeToken(FakeReply):
    """An access token of Google's OAuth endpoint."""

    def __init__(self) -> None:
        super().__init__("raw", "", {}, 0)

    def whole(self) -> bytes:
        return sse.dumps({"access_token": "ya29.a-token", "expires_in": 3599, "token_type": "Bearer"})


def reply_at(path: str, host: str, asked: Json, words: int) -> FakeReply:
    """Return the reply for a request path. `host` is the fake provider's own address."""
    bare = path.partition("?")[0]
    if bare.endswith("/v2/chat"):
        return FakeCohere("raw", path, asked, words)
    if "/invoke" in bare:
        return FakeInvoked(bare, asked, words)
    if "/converse" in bare:
        return FakeConversed(bare, asked, words)
    if bare.endswith("/v2/embed"):
        return FakeEmbedded(asked)
    if bare.endswith(":streamGenerateContent") and "alt=sse" not in path:
        return FakeListed(path, asked, words)
    if "/predictions" in bare or "/streams/" in bare:
        return FakePredicted(bare, host, asked, words)
    return FakeToken() if bare.endswith("/token") else FakeReply(dialect_at(path), path, asked, words)


def _wrapped(kind: str, said: Json) -> bytes:
    headers = {":event-type": kind, ":content-type": "application/json", ":message-type": "event"}
    return message(headers, sse.dumps(said))


def _exception() -> bytes:
    headers = {":exception-type": "modelStreamErrorException", ":message-type": "exception"}
    return message(headers, b'{"message":"injected error"}')
