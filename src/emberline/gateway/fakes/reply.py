"""FakeReply: a reply of numbered words in any dialect (wire format), whole or as a stream of events.

The usage reports one output token for each word. If the request has tools, the reply calls the first tool. If the
request ends with an incomplete assistant message, the reply continues with the next word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from emberline.gateway.core.request import Dialect
from emberline.gateway.streams.continuation import CONTINUE_INSTRUCTION
from emberline.wire import sse

CREATED = 1_700_000_000
PIECE_CHARS = 5
STREAM_ENDPOINTS = ("streamGenerateContent", "streamRawPredict")
ARGUMENTS = '{"city": "Paris"}'


def dialect_of_path(path: str) -> Dialect:
    path = path.partition("?")[0]
    if "enerateContent" in path:
        return "gemini"
    if path.endswith(("rawPredict", "streamRawPredict")):
        return "anthropic"
    endpoints: dict[str, Dialect] = {"chat/completions": "openai-chat", "messages": "anthropic",
                                 "responses": "openai-responses", "embeddings": "openai-embeddings"}  # fmt: skip
    return next((dialect for end, dialect in endpoints.items() if path.endswith(end)), "raw")


class FakeReply:
    def __init__(self, dialect: Dialect, path: str, request: dict[str, Any], words: int) -> None:
        self._dialect = dialect
        self.stream: bool = request.get("stream") is True or path.partition("?")[0].endswith(STREAM_ENDPOINTS)
        path_model = path.rpartition("/")[2].partition(":")[0] if "enerateContent" in path else ""
        self._model = str(request.get("model") or path_model or "fake")
        limit = request.get("max_tokens") or request.get("max_completion_tokens") or request.get("max_output_tokens")
        limit = limit or request.get("generationConfig", {}).get("maxOutputTokens")
        self._first_word = _words_already_sent(request)
        self.words: int = limit or max(words - self._first_word, 0)
        self._text_pieces: list[str] = []
        self._tool = _first_tool_name(request.get("tools"))
        self._includes_usage = bool((request.get("stream_options") or {}).get("include_usage"))
        self.always_sends_usage = False
        self.response_id = "resp_fake"
        self.response_fields: dict[str, Any] = {}  # fields of the request that a response repeats
        self._input = 11
        self.content_type = "text/event-stream" if self.stream else "application/json"

    @property
    def text(self) -> str:
        return "".join(self._reply_pieces())

    def set_text(self, text: str) -> None:
        """Reply with this text, in pieces of a few letters, instead of numbered words.

        An empty text changes nothing.
        """
        self._text_pieces = [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]
        self.words = len(self._text_pieces) or self.words

    def _reply_pieces(self) -> list[str]:
        return self._text_pieces or [f"word{i} " for i in range(self._first_word, self._first_word + self.words)]

    # -- whole ---------------------------------------------------------------------------------------------------------

    def whole_body(self) -> bytes:
        match self._dialect:
            case "openai-chat":
                return sse.dumps(self._chat_completion())
            case "anthropic":
                content = [{"type": "text", "text": self.text}]
                if self._tool:
                    use = {"type": "tool_use", "id": "toolu_1", "name": self._tool, "input": {"city": "Paris"}}
                    content.append(use)  # type: ignore[arg-type]
                return sse.dumps({**self._anthropic_message(), "content": content, "stop_reason": self._stop_reason()})
            case "openai-responses":
                return sse.dumps(self._responses_object("completed"))
            case "openai-embeddings":
                row = {"object": "embedding", "index": 0, "embedding": [0.25, -0.5]}
                usage = {"prompt_tokens": self._input, "total_tokens": self._input}
                return sse.dumps({"object": "list", "data": [row], "model": self._model, "usage": usage})
            case "gemini":
                return sse.dumps(self._gemini_reply([{"text": self.text}, *self._function_call()], "STOP"))
        return sse.dumps({"echo": self._model})

    def _chat_completion(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self._tool:
            function = {"name": self._tool, "arguments": ARGUMENTS}
            message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if self._tool else "stop"}
        return {**self._completion_fields("chat.completion"), "choices": [choice], "usage": self._chat_usage()}

    def _completion_fields(self, kind: str) -> dict[str, Any]:
        return {"id": "chatcmpl-fake", "object": kind, "created": CREATED, "model": self._model}

    def _chat_usage(self) -> dict[str, Any]:
        total = self._input + self.words
        return {"prompt_tokens": self._input, "completion_tokens": self.words, "total_tokens": total}

    def _stop_reason(self) -> str:
        return "tool_use" if self._tool else "end_turn"

    def _anthropic_message(self, output_tokens: int | None = None) -> dict[str, Any]:
        usage = {"input_tokens": self._input, "output_tokens": self.words if output_tokens is None else output_tokens}
        head = {"id": "msg_fake", "type": "message", "role": "assistant", "model": self._model, "content": []}
        return {**head, "stop_reason": None, "stop_sequence": None, "usage": usage}

    def make_response_object(self) -> dict[str, Any]:
        """Return the complete response, as the Responses API stores it."""
        return self._responses_object("completed")

    def _responses_object(self, status: str) -> dict[str, Any]:
        done = status == "completed"
        part = {"type": "output_text", "text": self.text, "annotations": []}
        item = {"id": "msg_fake", "type": "message", "role": "assistant", "status": status, "content": [part]}
        total = self._input + self.words
        usage: dict[str, Any] = {"input_tokens": self._input, "output_tokens": self.words, "total_tokens": total}
        usage.update(input_tokens_details={"cached_tokens": 0}, output_tokens_details={"reasoning_tokens": 0})
        return {
            **self.response_fields,
            "id": self.response_id,
            "object": "response",
            "created_at": CREATED,
            "model": self._model,
            "status": status,
            "output": [item] if done else [],
            "usage": usage if done else None,
            "error": None,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }

    def _gemini_reply(self, parts: list[dict[str, Any]], finish_reason: str | None) -> dict[str, Any]:
        candidate = {"content": {"role": "model", "parts": parts}, "index": 0}
        if finish_reason:
            candidate["finishReason"] = finish_reason
        total = self._input + self.words
        usage = {"promptTokenCount": self._input, "candidatesTokenCount": self.words, "totalTokenCount": total}
        return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": self._model}

    def _function_call(self) -> list[dict[str, Any]]:
        return [{"functionCall": {"name": self._tool, "args": {"city": "Paris"}}}] if self._tool else []

    # -- events --------------------------------------------------------------------------------------------------------

    def events(self) -> Iterator[tuple[bytes, bool]]:
        """Yield each event of the stream, and whether the event has content."""
        match self._dialect:
            case "anthropic":
                return self._message_events()
            case "openai-responses":
                return self._response_events()
            case "gemini":
                return self._gemini_events()
        return self._chat_events()

    def last_event(self) -> bytes:
        """Return the event that ends a complete stream."""
        return list(self.events())[-1][0]

    def _chat_events(self) -> Iterator[tuple[bytes, bool]]:
        def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
            return sse.encode_data_event({**self._completion_fields("chat.completion.chunk"), "choices": [choice]})

        yield chunk({"role": "assistant", "content": ""}), False
        for piece in self._reply_pieces():
            yield chunk({"content": piece}), True
        if self._tool:
            function = {"name": self._tool, "arguments": ARGUMENTS}
            call = {"index": 0, "id": "call_1", "type": "function", "function": function}
            yield chunk({"tool_calls": [call]}), True
        finish = "tool_calls" if self._tool else "stop"
        if self.always_sends_usage:
            choice = {"index": 0, "delta": {}, "finish_reason": finish}
            last = {
                **self._completion_fields("chat.completion.chunk"),
                "choices": [choice],
                "usage": self._chat_usage(),
            }
            yield sse.encode_data_event(last), False
        else:
            yield chunk({}, finish), False
        if self._includes_usage:
            usage = {"choices": [], "usage": self._chat_usage()}
            yield sse.encode_data_event({**self._completion_fields("chat.completion.chunk"), **usage}), False
        yield sse.DONE_EVENT, False

    def _message_events(self) -> Iterator[tuple[bytes, bool]]:
        def event(kind: str, **fields: Any) -> bytes:
            return sse.encode_named_event(kind, {"type": kind, **fields})

        yield event("message_start", message=self._anthropic_message(1)), False
        yield event("content_block_start", index=0, content_block={"type": "text", "text": ""}), False
        yield event("ping"), False
        for piece in self._reply_pieces():
            yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece}), True
        yield event("content_block_stop", index=0), False
        if self._tool:
            block = {"type": "tool_use", "id": "toolu_1", "name": self._tool, "input": {}}
            yield event("content_block_start", index=1, content_block=block), True
            delta = {"type": "input_json_delta", "partial_json": ARGUMENTS}
            yield event("content_block_delta", index=1, delta=delta), True
            yield event("content_block_stop", index=1), False
        stop = {"stop_reason": self._stop_reason(), "stop_sequence": None}
        yield event("message_delta", delta=stop, usage={"output_tokens": self.words}), False
        yield event("message_stop"), False

    def _response_events(self) -> Iterator[tuple[bytes, bool]]:
        number = 0

        def event(kind: str, **fields: Any) -> bytes:
            nonlocal number
            number += 1
            return sse.encode_named_event(kind, {"type": kind, "sequence_number": number - 1, **fields})

        item = {"id": "msg_fake", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        at = {"item_id": "msg_fake", "output_index": 0, "content_index": 0}
        part = {"type": "output_text", "text": "", "annotations": []}
        yield event("response.created", response=self._responses_object("in_progress")), False
        yield event("response.in_progress", response=self._responses_object("in_progress")), False
        yield event("response.output_item.added", output_index=0, item=item), False
        yield event("response.content_part.added", **at, part=part), False
        for piece in self._reply_pieces():
            yield event("response.output_text.delta", **at, delta=piece, logprobs=[]), True
        yield event("response.output_text.done", **at, text=self.text, logprobs=[]), False
        yield event("response.content_part.done", **at, part={**part, "text": self.text}), False
        done = self._responses_object("completed")
        yield event("response.output_item.done", output_index=0, item=done["output"][0]), False
        yield event("response.completed", response=done), False

    def _gemini_events(self) -> Iterator[tuple[bytes, bool]]:
        for piece in self._reply_pieces():
            yield sse.encode_data_event(self._gemini_reply([{"text": piece}], None)).replace(b"\n\n", b"\r\n\r\n"), True
        if call := self._function_call():
            yield sse.encode_data_event(self._gemini_reply(call, None)).replace(b"\n\n", b"\r\n\r\n"), True
        yield sse.encode_data_event(self._gemini_reply([], "STOP")).replace(b"\n\n", b"\r\n\r\n"), False

    # -- errors --------------------------------------------------------------------------------------------------------

    def error_body(self, status: int) -> bytes:
        if self._dialect == "anthropic":
            kind = "rate_limit_error" if status == 429 else "api_error"
            return sse.dumps({"type": "error", "error": {"type": kind, "message": "injected error"}})
        if self._dialect == "gemini":
            return sse.dumps({"error": {"code": status, "message": "injected error", "status": "UNAVAILABLE"}})
        return sse.dumps({"error": {"message": "injected error", "type": "server_error", "param": None, "code": None}})

    def error_event(self) -> bytes:
        if self._dialect == "openai-responses":
            payload = {
                "type": "error",
                "code": "server_error",
                "message": "injected error",
                "param": None,
                "sequence_number": 9,
            }
            return sse.encode_named_event("error", payload)
        name = b"event: error\n" if self._dialect == "anthropic" else b""
        return name + b"data: " + self.error_body(500) + b"\n\n"


def _words_already_sent(request: dict[str, Any]) -> int:
    """Return the number of words in the assistant message that the reply must continue."""
    turns = request.get("messages") or request.get("contents") or request.get("input")
    earlier = [turn for turn in turns if CONTINUE_INSTRUCTION not in str(turn)] if isinstance(turns, list) else []
    last = earlier[-1] if earlier and isinstance(earlier[-1], dict) else {}
    return str(last).count("word") if last.get("role") in ("assistant", "model") else 0


def _first_tool_name(tools: Any) -> str:
    first = tools[0] if isinstance(tools, list) and tools else {}
    if isinstance(first, dict) and first.get("functionDeclarations"):
        first = first["functionDeclarations"][0]
    return str(first.get("function", first).get("name") or "") if isinstance(first, dict) else ""
