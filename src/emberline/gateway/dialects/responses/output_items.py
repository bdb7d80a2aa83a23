"""The output items of a streamed response. Each item collects its text and returns its stream events."""

from __future__ import annotations

from typing import ClassVar

from emberline.gateway.dialects.canonical import Json
from emberline.gateway.dialects.responses.reply import render_text_part
from emberline.wire import sse
from emberline.wire.citations import render_responses_citation
from emberline.wire.deltas import Citation

_DELTA_EVENT_HEAD = (
    b'event: response.%b.delta\ndata: {"type":"response.%b.delta","item_id":%b,"output_index":%d%b,"delta":'
)


class StreamedItem:
    event_kind: ClassVar[str]  # name of the delta events, without "response." and ".delta"
    part_location: ClassVar[Json]  # index field of the part in its events

    def __init__(self, id: str, index: int) -> None:
        self.id = id
        self.status = "in_progress"
        self.encrypted_content = ""
        self.pieces: list[str] = []
        self.location: Json = {"item_id": id, "output_index": index}
        kind = self.event_kind.encode()
        part = b"".join(b',"%b":%d' % (name.encode(), value) for name, value in self.part_location.items())
        self._head = _DELTA_EVENT_HEAD % (kind, kind, sse.dumps(id), index, part)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def encode_delta_event(self, text: bytes, logprobs: list[Json] | None, sequence_number: int) -> bytes:
        return b'%b%b,"sequence_number":%d}\n\n' % (self._head, text, sequence_number)

    def to_json(self) -> Json:
        raise NotImplementedError

    def make_open_events(self) -> list[Json]:
        return [self._make_item_event("added")]

    def make_close_events(self, status: str) -> list[Json]:
        self.status = status
        return [self._make_item_event("done")]

    def _make_item_event(self, event_suffix: str) -> Json:
        return {
            "type": f"response.output_item.{event_suffix}",
            "output_index": self.location["output_index"],
            "item": self.to_json(),
        }

    def _make_done_event(self, **final_fields: object) -> Json:
        return {"type": f"response.{self.event_kind}.done", **self.location, **self.part_location, **final_fields}


class StreamedFunctionCall(StreamedItem):
    event_kind = "function_call_arguments"
    part_location: ClassVar[Json] = {}

    def __init__(self, id: str, index: int, slot: int, call_id: str, tool_name: Json) -> None:
        super().__init__(id, index)
        self.slot = slot
        self._names = {"call_id": call_id, **tool_name}

    def to_json(self) -> Json:
        head = {"id": self.id, "type": "function_call", "status": self.status}
        return {**head, **self._names, "arguments": self.text}

    def make_close_events(self, status: str) -> list[Json]:
        return [
            self._make_done_event(name=self._names["name"], arguments=self.text),
            *super().make_close_events(status),
        ]


class StreamedMessage(StreamedItem):
    """A message item with one content part.

    Order of events: item added, part added, deltas, text done, part done, item done.
    """

    event_kind = "output_text"
    part_location: ClassVar[Json] = {"content_index": 0}

    def __init__(self, id: str, index: int) -> None:
        super().__init__(id, index)
        self._logprobs: list[Json] = []
        self._annotations: list[Json] = []
        self._part_is_open = False

    def encode_delta_event(self, text: bytes, logprobs: list[Json] | None, sequence_number: int) -> bytes:
        self._logprobs += logprobs or ()
        return b'%b%b,"logprobs":%b,"sequence_number":%d}\n\n' % (
            self._head,
            text,
            sse.dumps(logprobs or []),
            sequence_number,
        )

    def add_annotation(self, citation: Citation) -> Json:
        self._annotations.append(render_responses_citation(citation))
        annotation = {"annotation_index": len(self._annotations) - 1, "annotation": self._annotations[-1]}
        return {"type": "response.output_text.annotation.added", **self.location, **self.part_location, **annotation}

    def part_json(self) -> Json:
        return render_text_part(self.text, list(self._logprobs), list(self._annotations))

    def to_json(self) -> Json:
        content = [self.part_json()] if self._part_is_open else []
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": content}

    def make_open_events(self) -> list[Json]:
        events = super().make_open_events()
        self._part_is_open = True
        return [
            *events,
            {"type": "response.content_part.added", **self.location, **self.part_location, "part": self.part_json()},
        ]

    def final_content(self) -> Json:
        return {"text": self.text, "logprobs": list(self._logprobs)}

    def make_close_events(self, status: str) -> list[Json]:
        part_done = {
            "type": "response.content_part.done",
            **self.location,
            **self.part_location,
            "part": self.part_json(),
        }
        return [self._make_done_event(**self.final_content()), part_done, *super().make_close_events(status)]


class StreamedRefusal(StreamedMessage):
    event_kind = "refusal"

    def encode_delta_event(self, text: bytes, logprobs: list[Json] | None, sequence_number: int) -> bytes:
        return StreamedItem.encode_delta_event(self, text, logprobs, sequence_number)

    def part_json(self) -> Json:
        return {"type": "refusal", "refusal": self.text}

    def final_content(self) -> Json:
        return {"refusal": self.text}


class StreamedReasoning(StreamedItem):
    """A reasoning item: a summary with one part, or only encrypted content if `has_summary` is False."""

    event_kind = "reasoning_summary_text"
    part_location: ClassVar[Json] = {"summary_index": 0}

    def __init__(self, id: str, index: int, *, has_summary: bool = True) -> None:
        super().__init__(id, index)
        self._has_summary = has_summary
        self._part_is_open = False

    def to_json(self) -> Json:
        summary = [self._part_json()] if self._part_is_open else []
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": summary,
            "encrypted_content": self.encrypted_content or None,
        }

    def make_open_events(self) -> list[Json]:
        events = super().make_open_events()
        self._part_is_open = self._has_summary
        return [*events, *self._make_part_events("added")]

    def make_close_events(self, status: str) -> list[Json]:
        text_done = [self._make_done_event(text=self.text)] if self._has_summary else []
        return [*text_done, *self._make_part_events("done"), *super().make_close_events(status)]

    def _part_json(self) -> Json:
        return {"type": "summary_text", "text": self.text}

    def _make_part_events(self, event_suffix: str) -> list[Json]:
        if not self._has_summary:
            return []
        kind = f"response.reasoning_summary_part.{event_suffix}"
        return [{"type": kind, **self.location, **self.part_location, "part": self._part_json()}]
