"""One reply of the Responses API: the events of a stream, and the response that the last of them holds.

response.created, response.in_progress, { output_item.added, ..., output_item.done } ..., response.completed
"""

from __future__ import annotations

from typing import Any

from emberline.api import sse
from emberline.api.deltas import (
    Delta,
    Finish,
    Progress,
    PromptDelta,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenIds,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from emberline.api.errors import openai_error
from emberline.api.responses.output import FunctionCall, Json, Message, OutputItem, Reasoning
from emberline.api.responses.request import Call

_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # of the protocol's own; all others: server_error


class Renderer:
    def __init__(self, call: Call, id: str, created: int, fingerprint: str) -> None:
        """`fingerprint` has no place in the protocol; all renderers are made alike."""
        self._call = call
        self._id = id
        self._head = {"id": id, "object": "response", "created_at": created}
        self._output: list[OutputItem] = []
        self._open = False  # whether the last item is
        self._slot = -1  # of the call that is being written
        self._finish: Finish | None = None
        self._usage: Usage | None = None
        self._error: Json | None = None
        self._sent = 0

    def start(self) -> list[bytes]:
        names = ("response.created", "response.in_progress")
        return self._send([{"type": name, "response": self.body()} for name in names])

    def push(self, delta: Delta) -> list[bytes]:
        return self._send(self._events(delta))

    def end(self) -> list[bytes]:
        assert self._finish is not None, "every reply finishes before it ends"
        return self._send([{"type": f"response.{self._status()}", "response": self.body()}])

    def fail(self, error: Exception) -> list[bytes]:
        reply = openai_error(error)
        code = _ERROR_CODES.get(reply.status, "server_error")
        self._error = {"code": code, "message": reply.body["error"]["message"]}
        if self._open:
            self._output[-1].status = "incomplete"
        return self._send([{"type": "response.failed", "response": self.body()}])

    def body(self) -> Json:
        return {
            **self._head,
            **self._call.echo,
            "model": self._call.caller.model,
            "store": self._call.kept,
            "temperature": self._call.params.temperature,
            "top_p": self._call.params.top_p,
            "status": self._status(),
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self._reason() == "length" else None,
            "output": [item.show() for item in self._output],
            "usage": None if self._usage is None else _usage(self._usage),
        }

    def _events(self, delta: Delta) -> list[Json]:
        match delta:
            case TextDelta():
                return self._grow(Message, delta)
            case ReasoningDelta():
                return self._grow(Reasoning, delta)
            case ToolCallStart():
                self._slot = delta.slot
                return self._begin(FunctionCall(self._item_id("fc"), len(self._output), delta.id, delta.name))
            case ToolCallArguments():
                assert self._open and self._slot == delta.slot, "calls come one after the other"
                return [self._output[-1].grow(delta.text)] if delta.text else []
            case Finish():
                self._finish = delta
                return self._close()
            case Usage():
                self._usage = delta
                return []
            case Started():
                return []
            case PromptDelta() | Progress() | TokenIds():
                raise AssertionError("the protocol has no way to ask for it")

    def _grow(self, kind: type[Message] | type[Reasoning], delta: TextDelta | ReasoningDelta) -> list[Json]:
        if not delta.text and not delta.tokens:
            return []
        events = []
        if not (self._open and isinstance(self._output[-1], kind)):
            events = self._begin(self._make(kind))
        return [*events, self._output[-1].grow(delta.text, delta.tokens)]

    def _make(self, kind: type[Message] | type[Reasoning]) -> OutputItem:
        if kind is Message:
            return Message(self._item_id("msg"), len(self._output))
        return Reasoning(self._item_id("rs"), len(self._output), sealed=self._call.seal_reasoning)

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self._id.removeprefix('resp_')}_{len(self._output)}"

    def _begin(self, item: OutputItem) -> list[Json]:
        events = self._close()
        self._output.append(item)
        self._open = True
        return [*events, *item.begin()]

    def _close(self) -> list[Json]:
        if not self._open:
            return []
        self._open = False
        return self._output[-1].close("incomplete" if self._reason() in ("length", "abort") else "completed")

    def _reason(self) -> str | None:
        return self._finish.reason if self._finish else None

    def _status(self) -> str:
        if self._error:
            return "failed"
        if self._finish is None:
            return "in_progress"
        return "incomplete" if self._reason() in ("length", "abort") else "completed"

    def _send(self, events: list[Json]) -> list[bytes]:
        if not self._call.stream:
            return []
        numbered = [{**event, "sequence_number": self._sent + at} for at, event in enumerate(events)]
        self._sent += len(events)
        return [sse.event(event["type"], event) for event in numbered]


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
