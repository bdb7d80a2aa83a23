"""Calls: those of a stream whose events say where in it they belong."""

from __future__ import annotations

from emberline.gateway.dialects import deltas
from emberline.gateway.errors import Broken


class Calls:
    """By their places; slots are given as they come. In the end each has arguments, if only {}."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._bare: set[int] = set()  # places of those without arguments so far

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, place: int) -> bool:
        return place in self._slots

    def open(self, place: int, id: str, name: str) -> deltas.ToolOpened:
        assert place not in self._slots, "a call opens once"
        self._bare.add(place)
        slot = self._slots[place] = len(self._slots)
        return deltas.ToolOpened(slot, id, name)

    def piece(self, place: int, text: str) -> deltas.ToolPiece:
        if place not in self._slots:
            raise Broken("a piece of the stream belongs to no call")
        self._bare.discard(place)
        return deltas.ToolPiece(self._slots[place], text)

    def rest(self, place: int, whole: str = "{}") -> tuple[deltas.ToolPiece, ...]:
        """A call ends: `whole` are its arguments, if none were told by pieces."""
        if place in self._slots and place not in self._bare:
            return ()
        return (self.piece(place, whole),)
