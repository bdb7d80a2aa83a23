"""Parses the events of a streamed Gemini reply into deltas.

Gemini has no end event: a stream is complete if it has a finishReason when the connection ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from emberline.gateway.dialects.canonical import Json, TextContent
from emberline.gateway.dialects.errors import make_stream_error
from emberline.gateway.dialects.event_reader import EventDecoder
from emberline.gateway.dialects.gemini.citations import GroundingCollector
from emberline.gateway.dialects.gemini.content import GENERATED_ID_PREFIX
from emberline.gateway.dialects.gemini.reply import parse_finish_reason, parse_logprobs, read_block_message
from emberline.wire import deltas
from emberline.wire.usage import Usage


class _Call(msgspec.Struct):
    name: str
    id: str | None = None
    args: Json | None = None


class _Part(msgspec.Struct, rename="camel"):
    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: _Call | None = None


class _Content(msgspec.Struct):
    parts: list[_Part] | None = None


class _Candidate(msgspec.Struct, rename="camel"):
    content: _Content | None = None
    finish_reason: str | None = None
    index: int | None = None
    logprobs_result: Json | None = None
    grounding_metadata: Any = None
    citation_metadata: Any = None


class _Event(msgspec.Struct, rename="camel"):
    candidates: list[_Candidate] | None = None
    prompt_feedback: Json | None = None
    usage_metadata: Json | None = None
    model_version: str | None = None
    response_id: str | None = None
    error: Any = None


_DECODER = EventDecoder(_Event, "Gemini's generateContent")


class GeminiEventReader:
    def __init__(self) -> None:
        self._id = ""
        self._has_started = False
        self._call_counts: dict[int, int] = {}  # choice -> number of tool calls
        self._finished_choices: set[int] = set()
        self._texts: dict[int, list[str]] = {}  # choice -> its text deltas
        self._groundings: dict[int, GroundingCollector] = {}
        self._usage: Usage | None = None

    def read(self, event: bytes) -> Iterator[deltas.ProviderDelta]:
        decoded = _DECODER.decode(event)
        if decoded.error is not None:
            raise make_stream_error({"error": decoded.error})
        if not self._has_started:
            self._has_started = True
            self._id = decoded.response_id or ""
            yield deltas.StreamStart(self._id, decoded.model_version or "")
        for row in decoded.candidates or ():
            yield from self._read_candidate(row, row.index or 0)
        if not decoded.candidates and (decoded.prompt_feedback or {}).get("blockReason"):
            yield deltas.RefusalDelta(read_block_message(decoded.prompt_feedback or {}))
            self._finished_choices.add(0)
            yield deltas.Finish("filter")
        if (usage := Usage.parse("gemini", decoded.usage_metadata)) is not None:
            self._usage = usage if self._usage is None else self._usage.merge_later(usage)

    def end(self) -> Iterator[deltas.ProviderDelta]:
        if self._finished_choices:
            if self._usage is not None:
                yield deltas.UsageUpdate(self._usage)
            yield deltas.StreamEnd()

    def _read_candidate(self, row: _Candidate, choice: int) -> Iterator[deltas.ProviderDelta]:
        logprobs = parse_logprobs(row.logprobs_result)
        for part in (row.content.parts if row.content else None) or ():
            if part.function_call is not None:
                yield from self._read_call(part.function_call, part.thought_signature, choice)
            elif part.thought:
                yield deltas.ReasoningDelta(part.text or "", choice)
                if part.thought_signature:
                    yield deltas.SignatureDelta(part.thought_signature, "gemini", choice=choice)
            elif part.text:
                self._texts.setdefault(choice, []).append(part.text)
                yield deltas.TextDelta(part.text, choice, logprobs=logprobs)
                logprobs = None
        if row.grounding_metadata or row.citation_metadata:
            grounding = self._groundings.setdefault(choice, GroundingCollector())
            grounding.add(row.grounding_metadata, row.citation_metadata)
        if row.finish_reason and choice not in self._finished_choices:
            self._finished_choices.add(choice)
            reason = parse_finish_reason(row.finish_reason)
            if reason == "stop" and self._call_counts.get(choice):
                reason = "tool_calls"  # Gemini has no reason for tool calls
            yield from self._read_citations(choice)
            yield deltas.Finish(reason, choice=choice)

    def _read_citations(self, choice: int) -> Iterator[deltas.ProviderDelta]:
        """Yield all citations; called at the stream's end, because their offsets refer to the whole text."""
        if choice in self._groundings:
            text = TextContent("".join(self._texts.get(choice, ())))
            yield from (
                deltas.CitationDelta(citation, choice) for citation in self._groundings[choice].build_citations([text])
            )

    def _read_call(self, call: _Call, signature: str | None, choice: int) -> Iterator[deltas.ProviderDelta]:
        slot = self._call_counts.get(choice, 0)
        self._call_counts[choice] = slot + 1
        if signature:
            yield deltas.SignatureDelta(signature, "gemini", choice=choice)
        id = call.id or f"{GENERATED_ID_PREFIX}{self._id + '-' if self._id else ''}{slot}"
        yield deltas.ToolCallStart(slot, id, call.name, choice)
        yield deltas.ToolCallArguments(slot, msgspec.json.encode(call.args or {}).decode(), choice)
