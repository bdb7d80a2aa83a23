"""Order: what a stream's deltas may follow each other as. A provider that breaks it is Broken; Writers rely on it."""

from __future__ import annotations

from emberline.gateway.dialects.deltas import Counted, Delta, Ended, Finished, Opened, TextPiece, ToolOpened, ToolPiece
from emberline.gateway.errors import Broken


class Order:
    def __init__(self, *, single: bool) -> None:
        self._single = single  # the client's dialect has one answer a reply
        self._opened = False
        self._open: set[int] = set()  # choices that have begun
        self._finished: set[int] = set()
        self._calls: dict[int, int] = {}  # choice -> how many

    def check(self, delta: Delta) -> None:
        if type(delta) is TextPiece and delta.choice in self._open:  # nearly all are
            return
        match delta:
            case Counted():
                return
            case Opened():
                if self._opened:
                    raise Broken("the stream begins twice")
                self._opened = True
            case Ended():
                if self._open or not self._finished:
                    raise Broken("the stream ended before its answer did")
            case _:
                if delta.choice not in self._open:
                    self._begin(delta.choice)
                self._of_choice(delta)

    def _begin(self, choice: int) -> None:
        if not self._opened:
            raise Broken("the stream has content before its beginning")
        if choice in self._finished:
            raise Broken("the stream goes on after its answer was finished")
        if choice and self._single:
            raise Broken("the stream has several answers, and one was asked for")
        self._open.add(choice)

    def _of_choice(self, delta: Delta) -> None:
        match delta:
            case ToolPiece():
                if delta.slot >= self._calls.get(delta.choice, 0):
                    raise Broken("a piece of the stream belongs to no call")
            case ToolOpened():
                assert delta.slot == self._calls.get(delta.choice, 0), "calls are numbered as they come"
                self._calls[delta.choice] = delta.slot + 1
            case Finished():
                self._open.discard(delta.choice)
                self._finished.add(delta.choice)
