"""OutputParser: the base of the classes that split the streamed text of one choice into reasoning, text and tool calls.

The result does not depend on how the input is split, once adjacent deltas of the same kind are joined.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from itertools import groupby

import msgspec

from emberline.api.tool_styles.call_reader import CallEvent, CallStart
from emberline.wire.deltas import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart

Piece = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class OutputParser(ABC):
    def __init__(self, index: int, new_id: Callable[[], str]) -> None:
        """`index`: the index of the choice. `new_id` returns a new id of 24 letters or digits."""
        self.num_calls = 0
        self._index, self._new_id = index, new_id
        self._call_ids: set[str] = set()
        self._pieces: list[Piece] = []

    @property
    @abstractmethod
    def is_in_reasoning(self) -> bool:
        """Whether the text parsed until now ends inside the reasoning."""

    @abstractmethod
    def push(self, text: str) -> list[Piece]:
        """Parse more of the output and return the deltas that later output can no longer change."""

    @abstractmethod
    def flush(self, was_cut_off: bool = False) -> list[Piece]:
        """Return the deltas for text that `push` has not passed on yet; called after the end of the output.

        `was_cut_off`: max_tokens ended the output, not the model. Then a call that has no arguments yet is dropped.
        """

    def _take_deltas(self) -> list[Piece]:
        pieces, self._pieces = merge_adjacent_deltas(self._pieces), []
        return pieces

    def _emit_text(self, text: str) -> None:
        self._pieces.append(TextDelta(text, self._index))

    def _emit_reasoning(self, text: str) -> None:
        self._pieces.append(ReasoningDelta(text, self._index))

    def _emit_call_event(self, event: CallEvent) -> None:
        if isinstance(event, CallStart):
            self._pieces.append(ToolCallStart(self.num_calls, self._choose_call_id(event), event.name, self._index))
            self.num_calls += 1
        else:
            self._pieces.append(ToolCallArguments(self.num_calls - 1, event, self._index))

    def _choose_call_id(self, call: CallStart) -> str:
        """Return the id that the model wrote, or a new id if it wrote none or repeated the id of an earlier call."""
        id_ = call.id if call.id is not None and call.id not in self._call_ids else f"call_{self._new_id()}"
        self._call_ids.add(id_)
        return id_


def merge_adjacent_deltas(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the deltas with adjacent deltas of the same kind joined and empty deltas dropped."""
    merged: list[Piece] = []
    for _, group in groupby(pieces, type):
        first, *rest = group
        if isinstance(first, ToolCallStart):
            merged += [first, *rest]
        elif text := first.text + "".join(piece.text for piece in rest if not isinstance(piece, ToolCallStart)):
            merged.append(msgspec.structs.replace(first, text=text) if rest else first)
    return merged
