"""Output items of a streamed response: each collects its text and returns the events for its changes."""

from __future__ import annotations

from typing import ClassVar

from emberline.api import sse
from emberline.gateway.dialects.inner import Citation, Json
from emberline.gateway.dialects.responses.citations import render
from emberline.gateway.dialects.responses.reply import text_part

_HEAD = b'event: response.%b.delta\ndata: {"type":"response.%b.delta","item_id":%b,"output_index":%d%b,"delta":'


class Growing:
    kind: ClassVar[str]  # name of the delta events, without "response." and ".delta"
    part_place: ClassVar[Json]  # index field of the part in its events

    def __init__(self, id: str, index: int) -> None:
        self.id = id
        self.status = "in_progress"
        self.sealed = ""
        self.pieces: list[str] = []
        self.place: Json = {"item_id": id, "output_index": index}
        kind = self.kind.encode()
        part = b"".join(b',"%b":%d' % (name.encode(), at) for name, at in self.part_place.items())
        self._head = _HEAD % (kind, kind, sse.dumps(id), index, part)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def piece(self, text: bytes, logprobs: list[Json] | None, number: int) -> bytes:
        return b'%b%b,"sequence_number":%d}\n\n' % (self._head, text, number)

    def show(self) -> Json:
        raise NotImplementedError

    def begin(self) -> list[Json]:
        return [self._item_event("added")]

    def close(self, status: str) -> list[Json]:
        self.status = status
        return [self._item_event("done")]

    def _item_event(self, change: str) -> Json:
        return {
            "type": f"response.output_item.{change}",
            "output_index": self.place["output_index"],
            "item": self.show(),
        }

    def _done(self, **whole: object) -> Json:
        return {"type": f"response.{self.kind}.done", **self.place, **self.part_place, **whole}


class Call(Growing):
    kind = "function_call_arguments"
    part_place: ClassVar[Json] = {}

    def __init__(self, id: str, index: int, slot: int, call_id: str, name: str) -> None:
        super().__init__(id, index)
        self.slot = slot
        self._names = {"call_id": call_id, "name": name}

    def show(self) -> Json:
        head = {"id": self.id, "type": "function_call", "status": self.status}
        return {**head, **self._names, "arguments": self.text}

    def close(self, status: str) -> list[Json]:
        return [self._done(name=self._names["name"], arguments=self.text), *super().close(status)]


class Said(Growing):
    """A message with one part, which opens directly after the item and closes directly before it."""

    kind = "output_text"
    part_place: ClassVar[Json] = {"content_index": 0}

    def __init__(self, id: str, index: int) -> None:
        super().__init__(id, index)
        self._logprobs: list[Json] = []
        self._annotations: list[Json] = []
        self._begun = False

    def piece(self, text: bytes, logprobs: list[Json] | None, number: int) -> bytes:
        self._logprobs += logprobs or ()
        return b'%b%b,"logprobs":%b,"sequence_number":%d}\n\n' % (self._head, text, sse.dumps(logprobs or []), number)

    def cite(self, citation: Citation) -> Json:
        self._annotations.append(render(citation))
        index = {"annotation_index": len(self._annotations) - 1, "annotation": self._annotations[-1]}
        return {"type": "response.output_text.annotation.added", **self.place, **self.part_place, **index}

    def part(self) -> Json:
        return text_part(self.text, list(self._logprobs), list(self._annotations))

    def show(self) -> Json:
        content = [self.part()] if self._begun else []
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": content}

    def begin(self) -> list[Json]:
        events = super().begin()
        self._begun = True
        return [*events, {"type": "response.content_part.added", **self.place, **self.part_place, "part": self.part()}]

    def whole(self) -> Json:
        return {"text": self.text, "logprobs": list(self._logprobs)}

    def close(self, status: str) -> list[Json]:
        part_done = {"type": "response.content_part.done", **self.place, **self.part_place, "part": self.part()}
        return [self._done(**self.whole()), part_done, *super().close(status)]


class Refused(Said):
    kind = "refusal"

    def piece(self, text: bytes, logprobs: list[Json] | None, number: int) -> bytes:
        return Growing.piece(self, text, logprobs, number)

    def part(self) -> Json:
        return {"type": "refusal", "refusal": self.text}

    def whole(self) -> Json:
        return {"refusal": self.text}


class Thought(Growing):
    """Reasoning: a summary with one part, or only encrypted content if `has_summary` is False."""

    kind = "reasoning_summary_text"
    part_place: ClassVar[Json] = {"summary_index": 0}

    def __init__(self, id: str, index: int, *, has_summary: bool = True) -> None:
        super().__init__(id, index)
        self._told = has_summary
        self._begun = False

    def show(self) -> Json:
        summary = [self._part()] if self._begun else []
        return {"id": self.id, "type": "reasoning", "summary": summary, "encrypted_content": self.sealed or None}

    def begin(self) -> list[Json]:
        events = super().begin()
        self._begun = self._told
        return [*events, *self._part_events("added")]

    def close(self, status: str) -> list[Json]:
        text_done = [self._done(text=self.text)] if self._told else []
        return [*text_done, *self._part_events("done"), *super().close(status)]

    def _part(self) -> Json:
        return {"type": "summary_text", "text": self.text}

    def _part_events(self, change: str) -> list[Json]:
        if not self._told:
            return []
        kind = f"response.reasoning_summary_part.{change}"
        return [{"type": kind, **self.place, **self.part_place, "part": self._part()}]
