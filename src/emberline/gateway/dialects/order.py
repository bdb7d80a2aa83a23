"""Checks the order of a stream's deltas, on which the event writers rely."""

from __future__ import annotations

from emberline.gateway.dialects.deltas import Counted, Delta, Ended, Finished, Opened, TextPiece, ToolOpened, ToolPiece
from emberline.gateway.errors import Broken


class Order:
    def __init__(self, *, single: bool) -> None:
        self._single = single  # the client's wire format allows one choice per reply
        self._opened = False
        self._open: set[int] = set()  # choices that have started and not finished
        self._finished: set[int] = set()
        self._calls: dict[int, int] = {}  # choice -> number of tool calls

    def check(self, delta: Delta) -> None:
        if type(delta) is TextPiece and delta.choice in self._open:  # fast path: nearly all deltas are
            return
        match delta:
            case Counted():
                return
            case Opened():
                if self._opened:
                    raise Broken("the stream has two start events")
                self._opened = True
            case Ended():
                if self._open or not self._finished:
                    raise Broken("the stream ended before all choices had a finish reason")
            case _:
                if delta.choice not in self._open:
                    self._begin(delta.choice)
                self._of_choice(delta)

    def _begin(self, choice: int) -> None:
        if not self._opened:
            raise Broken("the stream has content before its start event")
        if choice in self._finished:
            raise Broken(f"the stream has content for choice {choice} after its finish reason")
        if choice and self._single:
            raise Broken(f"the stream has a choice {choice}, but one choice was requested")
        self._open.add(choice)

    def _of_choice(self, delta: Delta) -> None:
        match delta:
            case ToolPiece():
                if delta.slot >= self._calls.get(delta.choice, 0):
                    raise Broken(f"the stream has arguments for tool call {delta.slot}, which was not started")
            case ToolOpened():
                assert delta.slot == self._calls.get(delta.choice, 0), "tool calls are numbered in order of arrival"
                self._calls[delta.choice] = delta.slot + 1
            case Finished():
                self._open.discard(delta.choice)
                self._finished.add(delta.choice)
