"""Parses the chunks of a streamed chat completion into deltas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.dialects.canonical import Json
from emberline.gateway.dialects.chat import citations
from emberline.gateway.dialects.chat.content import read_mistral_reasoning
from emberline.gateway.dialects.citations import parse_citations
from emberline.gateway.dialects.errors import make_stream_error
from emberline.gateway.dialects.event_reader import EventDecoder
from emberline.wire import deltas
from emberline.wire.finish_reasons import FROM_CHAT
from emberline.wire.usage import Usage


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | list[Json] | None = None  # a list for Mistral's thinking
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None
    annotations: Any = None


class _Logprobs(msgspec.Struct):
    content: list[Json] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Chunk(msgspec.Struct):
    id: str | None = None
    model: str | None = None
    created: float | None = None
    choices: list[_Choice] | None = None
    usage: Json | None = None
    x_groq: Json | None = None
    error: Any = None


_DECODER = EventDecoder(_Chunk, "OpenAI's chat")


class ChatEventReader:
    def __init__(self) -> None:
        self._has_started = False
        self._call_slots: dict[int, list[tuple[int, str]]] = {}  # choice -> (index, id) of each slot
        self._finished_choices: set[int] = set()

    def read(self, event: bytes) -> Iterator[deltas.ProviderDelta]:
        if event == b"[DONE]":
            yield deltas.StreamEnd()
            return
        chunk = _DECODER.decode(event)
        if chunk.error is not None:
            raise make_stream_error({"error": chunk.error})
        if not self._has_started and (chunk.id or chunk.choices):  # Azure first sends a chunk with filter results
            self._has_started = True
            yield deltas.StreamStart(chunk.id or "", chunk.model or "", int(chunk.created or 0))
        for choice in chunk.choices or ():
            if choice.delta is not None:
                yield from self._read_delta(choice, choice.delta)
            if choice.finish_reason == "error":
                raise UpstreamBroken(f"the provider finished choice {choice.index} with finish_reason 'error'")
            if choice.finish_reason is not None and choice.index not in self._finished_choices:
                self._finished_choices.add(choice.index)
                reason = FROM_CHAT.get(choice.finish_reason, "stop")
                if reason == "stop" and self._call_slots.get(choice.index):
                    reason = "tool_calls"  # some providers send "stop"
                yield deltas.Finish(reason, choice=choice.index)
        usage_object = chunk.usage or (chunk.x_groq or {}).get("usage")
        if usage_object and (usage := Usage.parse("openai-chat", usage_object)):
            yield deltas.UsageUpdate(usage)

    def end(self) -> tuple[deltas.ProviderDelta, ...]:
        return ()

    def _read_delta(self, choice: _Choice, delta: _Delta) -> Iterator[deltas.ProviderDelta]:
        choice_index = choice.index
        if isinstance(delta.content, str):
            if delta.content:
                yield deltas.TextDelta(
                    delta.content, choice_index, logprobs=choice.logprobs.content if choice.logprobs else None
                )
        elif delta.content:
            for row in delta.content:
                if text := read_mistral_reasoning(row):
                    yield deltas.ReasoningDelta(text, choice_index)
                elif isinstance(content_text := row.get("text"), str):
                    yield deltas.TextDelta(content_text, choice_index)
        if reasoning := delta.reasoning_content or delta.reasoning:
            yield deltas.ReasoningDelta(reasoning, choice_index)
        if delta.refusal:
            yield deltas.RefusalDelta(delta.refusal, choice_index)
        for call in delta.tool_calls or ():
            yield from self._read_tool_call(choice_index, call)
        if delta.annotations and choice_index not in self._finished_choices:
            yield from (
                deltas.CitationDelta(citation, choice_index)
                for citation in parse_citations(delta.annotations, citations.parse_citation)
            )

    def _read_tool_call(self, choice: int, call: _ToolCall) -> Iterator[deltas.ProviderDelta]:
        slots = self._call_slots.setdefault(choice, [])
        function = call.function or _Function()
        slot = self._find_slot(slots, call)
        if slot is None:
            if not function.name:
                raise UpstreamBroken("a tool call of the stream has no function name")
            slot = len(slots)
            slots.append((slot if call.index is None else call.index, call.id or ""))
            yield deltas.ToolCallStart(slot, call.id or f"call_{choice}_{slot}", function.name, choice)
        if function.arguments:
            yield deltas.ToolCallArguments(slot, function.arguments, choice)

    @staticmethod
    def _find_slot(slots: list[tuple[int, str]], call: _ToolCall) -> int | None:
        """Return the slot (number) of the tool call that `call` continues, or None for a new tool call.

        Some providers send index 0 or no index for every tool call, and only the id differs.
        """
        for slot in reversed(range(len(slots))):
            index, id = slots[slot]
            if call.index is not None and call.index != index:
                continue
            return slot if not call.id or call.id == id else None
        return None
