"""The output items of a Responses reply. Each item collects its deltas and returns its stream events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from emberline.api.responses.items import Status, encode_reasoning
from emberline.wire.deltas import TokenInfo
from emberline.wire.logprobs import render_chat_logprobs

Json = dict[str, Any]


class OutputItem(ABC):
    event_kind: ClassVar[str]  # name of the growing content in the types of its events

    def __init__(self, id: str, index: int) -> None:
        self.id = id
        self.status: Status = "in_progress"
        self.location: Json = {"item_id": id, "output_index": index}  # fields that locate the item in each event
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @abstractmethod
    def to_json(self) -> Json: ...

    def make_begin_events(self) -> list[Json]:
        return [self._make_item_event("added")]

    def append_text(self, text: str, tokens: Sequence[TokenInfo] = ()) -> Json:
        self._pieces.append(text)
        return {"type": f"response.{self.event_kind}.delta", **self.location, "delta": text}

    def make_close_events(self, status: Status) -> list[Json]:
        self.status = status
        return [self._make_item_event("done")]

    def _make_item_event(self, event_suffix: str) -> Json:
        return {
            "type": f"response.output_item.{event_suffix}",
            "output_index": self.location["output_index"],
            "item": self.to_json(),
        }


class OutputFunctionCall(OutputItem):
    event_kind = "function_call_arguments"

    def __init__(self, id: str, index: int, call_id: str, name: str, namespace: str | None = None) -> None:
        super().__init__(id, index)
        self._call_id = call_id
        self._name = name
        self._namespace_field = {} if namespace is None else {"namespace": namespace}

    def to_json(self) -> Json:
        call = {"call_id": self._call_id, **self._namespace_field, "name": self._name, "arguments": self.text}
        return {"id": self.id, "type": "function_call", "status": self.status, **call}

    def make_close_events(self, status: Status) -> list[Json]:
        done = {"type": f"response.{self.event_kind}.done", **self.location, "name": self._name, "arguments": self.text}
        return [done, *super().make_close_events(status)]


class _TextItem(OutputItem):
    """An item with one content part.

    Order of events: item added, part added, deltas, text done, part done, item done.
    """

    def __init__(self, id: str, index: int) -> None:
        super().__init__(id, index)
        self._begun = False

    def content_json(self) -> list[Json]:
        return [self.part_json()] if self._begun else []

    def part_json(self) -> Json:
        return {"type": self.event_kind, "text": self.text, **self.extra_fields()}

    def extra_fields(self) -> Json:
        return {}

    def make_begin_events(self) -> list[Json]:
        events = super().make_begin_events()
        self._begun = True
        self.location["content_index"] = 0
        return [*events, {"type": "response.content_part.added", **self.location, "part": self.part_json()}]

    def make_close_events(self, status: Status) -> list[Json]:
        text_done = {
            "type": f"response.{self.event_kind}.done",
            **self.location,
            "text": self.text,
            **self.extra_fields(),
        }
        part_done = {"type": "response.content_part.done", **self.location, "part": self.part_json()}
        return [text_done, part_done, *super().make_close_events(status)]


class OutputMessage(_TextItem):
    event_kind = "output_text"

    def __init__(self, id: str, index: int) -> None:
        super().__init__(id, index)
        self._logprobs: list[Json] = []

    def extra_fields(self) -> Json:
        return {"logprobs": list(self._logprobs)}

    def part_json(self) -> Json:
        return {**super().part_json(), "annotations": []}

    def to_json(self) -> Json:
        head = {"id": self.id, "type": "message", "status": self.status}
        return {**head, "role": "assistant", "content": self.content_json()}

    def append_text(self, text: str, tokens: Sequence[TokenInfo] = ()) -> Json:
        logprobs = render_chat_logprobs(tokens)
        self._logprobs += logprobs
        return {**super().append_text(text), "logprobs": logprobs}


class OutputReasoning(_TextItem):
    event_kind = "reasoning_text"

    def __init__(self, id: str, index: int, *, includes_encrypted: bool) -> None:
        super().__init__(id, index)
        self._includes_encrypted = includes_encrypted

    def to_json(self) -> Json:
        is_ended = self.status != "in_progress"
        encrypted = {
            "encrypted_content": encode_reasoning(self.text) if self._includes_encrypted and is_ended else None
        }
        head = {"id": self.id, "type": "reasoning", "status": self.status, "summary": []}
        return {**head, "content": self.content_json(), **encrypted}
