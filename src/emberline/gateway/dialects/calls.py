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

    def __contains__(self, index: int) -> bool:
        return index in self._slots

    def open(self, index: int, id: str, name: str) -> deltas.ToolOpened:
        assert index not in self._slots, "a call opens once"
        self._bare.add(index)
        slot = self._slots[index] = len(self._slots)
        return deltas.ToolOpened(slot, id, name)

    def piece(self, index: int, text: str) -> deltas.ToolPiece:
        if index not in self._slots:
            raise Broken("a piece of the stream belongs to no call")
        self._bare.discard(index)
        return deltas.ToolPiece(self._slots[index], text)

    def rest(self, index: int, default_arguments: str = "{}") -> tuple[deltas.ToolPiece, ...]:
        """A call ends: `whole` are its arguments, if none were told by pieces."""
        if index in self._slots and index not in self._bare:
            return ()
        return (self.piece(index, default_arguments),)
