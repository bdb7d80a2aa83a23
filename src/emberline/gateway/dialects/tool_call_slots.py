"""Numbers a stream's tool calls in order, from the block or item indexes in the provider's events."""

from __future__ import annotations

from emberline.gateway.core.errors import UpstreamBroken
from emberline.wire import deltas


class ToolCallSlots:
    """Maps the provider's index of each tool call to its slot: 0 for the first tool call, then 1, 2, ...

    A tool call for which the provider sent no arguments gets the arguments `{}`.
    """

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._without_arguments: set[int] = set()  # indices of calls that have no arguments yet

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, index: int) -> bool:
        return index in self._slots

    def open(self, index: int, id: str, name: str) -> deltas.ToolCallStart:
        assert index not in self._slots, "a tool call is opened once"
        self._without_arguments.add(index)
        slot = self._slots[index] = len(self._slots)
        return deltas.ToolCallStart(slot, id, name)

    def add_arguments(self, index: int, text: str) -> deltas.ToolCallArguments:
        if index not in self._slots:
            raise UpstreamBroken(f"the stream has tool call arguments for index {index}, where no tool call is open")
        self._without_arguments.discard(index)
        return deltas.ToolCallArguments(self._slots[index], text)

    def close(self, index: int, default_arguments: str = "{}") -> tuple[deltas.ToolCallArguments, ...]:
        """End the call. If no arguments were streamed, return a delta with `default_arguments`, else ()."""
        if index in self._slots and index not in self._without_arguments:
            return ()
        return (self.add_arguments(index, default_arguments),)
