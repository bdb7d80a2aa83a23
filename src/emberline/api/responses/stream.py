"""Renders a reply of the Responses API, as stream events or as one JSON reply.

The last event of a stream contains the whole response. The events are

response.created, response.in_progress, { output_item.added, ..., output_item.done } ..., response.completed
"""

from __future__ import annotations

from emberline.api.responses.output import Json, OutputFunctionCall, OutputItem, OutputMessage, OutputReasoning
from emberline.api.responses.request import ResponsesCall
from emberline.wire import deltas, sse
from emberline.wire.errors import render_openai_error
from emberline.wire.usage import Usage
from emberline.wire.usage_objects import render_responses_usage

_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # the protocol's codes; any other: server_error


class ResponsesReplyWriter:
    def __init__(self, call: ResponsesCall, id: str, created: int, fingerprint: str) -> None:
        """`fingerprint` is unused; it is a parameter of every protocol's writer."""
        self._call = call
        self._id = id
        self._head = {"id": id, "object": "response", "created_at": created}
        self._output: list[OutputItem] = []
        self._is_open = False  # whether the last item is open
        self._slot = -1  # number of the tool call that is being written
        self._finish: deltas.Finish | None = None
        self._usage: Usage | None = None
        self._error: Json | None = None
        self._num_sent = 0

    def write(self, delta: deltas.Delta) -> bytes:
        return self._encode_events(self._make_events(delta))

    def write_error(self, error: Exception) -> bytes:
        reply = render_openai_error(error)
        code = _ERROR_CODES.get(reply.status, "server_error")
        self._error = {"code": code, "message": reply.body["error"]["message"]}
        if self._is_open:
            self._output[-1].status = "incomplete"
        return self._encode_events([{"type": "response.failed", "response": self.body()}])

    def body(self) -> Json:
        return {
            **self._head,
            **self._call.echoed_fields,
            "model": self._call.common.model,
            "store": self._call.is_stored,
            "temperature": self._call.params.temperature,
            "top_p": self._call.params.top_p,
            "status": self._response_status(),
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self._finish_reason() == "length" else None,
            "output": [item.to_json() for item in self._output],
            "usage": None if self._usage is None else render_responses_usage(self._usage),
        }

    def _make_events(self, delta: deltas.Delta) -> list[Json]:
        # Not `match`: isinstance is slow if the object is of a different Struct type.
        if type(delta) is deltas.TextDelta:
            return self._append_text(OutputMessage, delta)
        if type(delta) is deltas.ReasoningDelta:
            return self._append_text(OutputReasoning, delta)
        match delta:
            case deltas.ToolCallStart():
                self._slot = delta.slot
                namespace, name = self._call.names_in_namespaces.get(delta.name, (None, delta.name))
                item_id = self._make_item_id("fc")
                return self._begin_item(OutputFunctionCall(item_id, len(self._output), delta.id, name, namespace))
            case deltas.ToolCallArguments():
                assert self._is_open and self._slot == delta.slot, "tool calls must not overlap"
                return [self._output[-1].append_text(delta.text)] if delta.text else []
            case deltas.Finish():
                self._finish = delta
                return self._close_item()
            case deltas.UsageUpdate():
                self._usage = delta.usage
                return []
            case deltas.ReplyStart():
                return []
            case deltas.StreamStart():
                names = ("response.created", "response.in_progress")
                return [{"type": name, "response": self.body()} for name in names]
            case deltas.StreamEnd():
                assert self._finish is not None, "StreamEnd requires a Finish"
                return [{"type": f"response.{self._response_status()}", "response": self.body()}]
            case _:
                raise AssertionError(f"a response cannot contain a {type(delta).__name__}")

    def _append_text(
        self, kind: type[OutputMessage] | type[OutputReasoning], delta: deltas.TextDelta | deltas.ReasoningDelta
    ) -> list[Json]:
        if not delta.text and not delta.tokens:
            return []
        events = []
        if not (self._is_open and isinstance(self._output[-1], kind)):
            events = self._begin_item(self._make_item(kind))
        return [*events, self._output[-1].append_text(delta.text, delta.tokens)]

    def _make_item(self, kind: type[OutputMessage] | type[OutputReasoning]) -> OutputItem:
        if kind is OutputMessage:
            return OutputMessage(self._make_item_id("msg"), len(self._output))
        return OutputReasoning(
            self._make_item_id("rs"), len(self._output), includes_encrypted=self._call.includes_encrypted_reasoning
        )

    def _make_item_id(self, kind: str) -> str:
        return f"{kind}_{self._id.removeprefix('resp_')}_{len(self._output)}"

    def _begin_item(self, item: OutputItem) -> list[Json]:
        events = self._close_item()
        self._output.append(item)
        self._is_open = True
        return [*events, *item.make_begin_events()]

    def _close_item(self) -> list[Json]:
        if not self._is_open:
            return []
        self._is_open = False
        return self._output[-1].make_close_events(
            "incomplete" if self._finish_reason() in ("length", "abort") else "completed"
        )

    def _finish_reason(self) -> str | None:
        return self._finish.reason if self._finish else None

    def _response_status(self) -> str:
        if self._error:
            return "failed"
        if self._finish is None:
            return "in_progress"
        return "incomplete" if self._finish_reason() in ("length", "abort") else "completed"

    def _encode_events(self, events: list[Json]) -> bytes:
        if not self._call.stream:
            return b""
        numbered = [{**event, "sequence_number": self._num_sent + i} for i, event in enumerate(events)]
        self._num_sent += len(events)
        return b"".join([sse.encode_named_event(event["type"], event) for event in numbered])
