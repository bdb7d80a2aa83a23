"""Checks the order of the deltas in a provider's stream. The event writers rely on a valid order."""

from __future__ import annotations

from emberline.gateway.core.errors import UpstreamBroken
from emberline.wire import deltas
from emberline.wire.deltas import ReasoningDelta, TextDelta, ToolCallArguments


class DeltaOrderChecker:
    def __init__(self, *, single_choice: bool) -> None:
        self._single_choice = single_choice  # the client's wire format allows one choice per reply
        self._has_started = False
        self._open_choices: set[int] = set()  # choices that have started and not finished
        self._finished_choices: set[int] = set()
        self._call_counts: dict[int, int] = {}  # choice -> number of tool calls

    def check(self, delta: deltas.ProviderDelta) -> None:
        # Fast path for nearly all deltas; not `match`: isinstance is slow if the object is of a different Struct type.
        if (type(delta) is TextDelta or type(delta) is ReasoningDelta) and delta.choice in self._open_choices:
            return
        if type(delta) is ToolCallArguments and delta.choice in self._open_choices:
            self._check_arguments(delta)
            return
        match delta:
            case deltas.UsageUpdate():
                return
            case deltas.StreamStart():
                if self._has_started:
                    raise UpstreamBroken("the stream has two start events")
                self._has_started = True
            case deltas.StreamEnd():
                if self._open_choices or not self._finished_choices:
                    raise UpstreamBroken("the stream ended before all choices had a finish reason")
            case _:
                if delta.choice not in self._open_choices:
                    self._start_choice(delta.choice)
                self._check_choice_delta(delta)

    def _start_choice(self, choice: int) -> None:
        if not self._has_started:
            raise UpstreamBroken("the stream has content before its start event")
        if choice in self._finished_choices:
            raise UpstreamBroken(f"the stream has content for choice {choice} after its finish reason")
        if choice and self._single_choice:
            raise UpstreamBroken(f"the stream has content for choice {choice}, but only one choice was requested")
        self._open_choices.add(choice)

    def _check_choice_delta(self, delta: deltas.ProviderDelta) -> None:
        match delta:
            case ToolCallArguments():
                self._check_arguments(delta)
            case deltas.ToolCallStart():
                assert delta.slot == self._call_counts.get(delta.choice, 0), (
                    "tool calls are numbered in order of arrival"
                )
                self._call_counts[delta.choice] = delta.slot + 1
            case deltas.Finish():
                self._open_choices.discard(delta.choice)
                self._finished_choices.add(delta.choice)

    def _check_arguments(self, delta: ToolCallArguments) -> None:
        if delta.slot >= self._call_counts.get(delta.choice, 0):
            raise UpstreamBroken(f"the stream has arguments for tool call {delta.slot}, which was not started")
