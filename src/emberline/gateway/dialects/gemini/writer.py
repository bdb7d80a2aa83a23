"""Renders deltas as the events of a streamed Gemini reply.

Gemini sends a tool call's arguments as one object, so their fragments are collected until the call is complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.dialects.canonical import Json, Part, ReasoningContent, TextContent, ToolCallContent
from emberline.gateway.dialects.errors import render_error
from emberline.gateway.dialects.gemini.citations import render_grounding
from emberline.gateway.dialects.gemini.content import encode_gemini_signature, render_parts
from emberline.gateway.dialects.gemini.reply import render_logprobs
from emberline.wire import deltas, sse
from emberline.wire.deltas import Citation
from emberline.wire.finish_reasons import TO_GEMINI
from emberline.wire.reply_context import ReplyContext
from emberline.wire.usage import Usage
from emberline.wire.usage_objects import render_gemini_usage

_TEXT_EVENT = b'data: {"candidates":[{"content":{"parts":[{"text":%b%b}],"role":"model"},"index":%d}]%b'

_UncommonDelta: TypeAlias = (
    deltas.TextDelta
    | deltas.CitationDelta
    | deltas.RefusalDelta
    | deltas.SignatureDelta
    | deltas.ToolCallStart
    | deltas.Finish
)


@dataclass(slots=True)
class _Candidate:
    # slot -> an incomplete call and its argument fragments
    calls: dict[int, tuple[deltas.ToolCallStart, list[str]]] = field(default_factory=dict)
    signatures: dict[int, str] = field(default_factory=dict)  # slot -> signature of the call
    next_signature: str = ""  # signature of the next call
    text: list[str] = field(default_factory=list)
    citations: list[Citation] = field(default_factory=list)  # sent with the last event
    has_refusal: bool = False
    finish: deltas.Finish | None = None


class GeminiEventWriter:
    def __init__(self, context: ReplyContext) -> None:
        self._context = context
        self._tail = b""  # end of every event: model and id
        self._candidates: dict[int, _Candidate] = {}
        self._usage: Usage | None = None

    def write(self, delta: deltas.ProviderDelta) -> bytes:
        if type(delta) is deltas.TextDelta and delta.logprobs is None:  # not `match`: isinstance of a Struct is slow
            self._get_candidate(delta.choice).text.append(delta.text)
            return self._flush_calls(delta.choice) + _TEXT_EVENT % (
                sse.dumps(delta.text),
                b"",
                delta.choice,
                self._tail,
            )
        if type(delta) is deltas.ReasoningDelta:
            text = sse.dumps(delta.text)
            return self._flush_calls(delta.choice) + _TEXT_EVENT % (text, b',"thought":true', delta.choice, self._tail)
        if type(delta) is deltas.ToolCallArguments:
            calls = self._get_candidate(delta.choice).calls
            if delta.slot not in calls:
                raise UpstreamBroken("the stream has tool call arguments after other content")
            calls[delta.slot][1].append(delta.text)
            return b""
        match delta:
            case deltas.StreamStart():
                assert not self._tail, "a stream has one start"
                self._context.set_identity(delta)
                identity = {"modelVersion": delta.model, "responseId": delta.id}
                self._tail = b"," + sse.dumps(identity)[1:] + b"\n\n"
            case deltas.UsageUpdate():
                self._usage = delta.usage
            case deltas.StreamEnd():
                return self._end_stream()
            case _:
                return self._write_uncommon_delta(delta, self._get_candidate(delta.choice))
        return b""

    def write_error(self, error: Exception) -> bytes:
        return sse.encode_data_event(render_error(error, "gemini"))

    def _write_uncommon_delta(self, delta: _UncommonDelta, candidate: _Candidate) -> bytes:
        match delta:
            case deltas.TextDelta():
                candidate.text.append(delta.text)
                more = {"logprobsResult": render_logprobs(delta.logprobs or [])}
                return self._flush_calls(delta.choice) + self._encode_event(delta.choice, [{"text": delta.text}], more)
            case deltas.RefusalDelta():
                candidate.has_refusal = True
                return self._flush_calls(delta.choice) + self._encode_event(delta.choice, [{"text": delta.text}])
            case deltas.CitationDelta():
                candidate.citations.append(delta.citation)
            case deltas.SignatureDelta() if delta.origin == "gemini":
                candidate.next_signature = delta.signature
            case deltas.SignatureDelta() if not delta.redacted:
                thought = {
                    "text": "",
                    "thought": True,
                    "thoughtSignature": encode_gemini_signature(delta.signature, delta.origin),
                }
                return self._flush_calls(delta.choice) + self._encode_event(delta.choice, [thought])
            case deltas.ToolCallStart():
                candidate.calls[delta.slot] = (delta, [])
                candidate.signatures[delta.slot], candidate.next_signature = candidate.next_signature, ""
            case deltas.Finish():
                candidate.finish = delta
                return self._flush_calls(delta.choice)
        return b""

    def _get_candidate(self, choice: int) -> _Candidate:
        if (candidate := self._candidates.get(choice)) is None:
            candidate = self._candidates[choice] = _Candidate()
        return candidate

    def _flush_calls(self, choice: int) -> bytes:
        """Return an event with the collected tool calls, which are complete when other content follows them."""
        candidate = self._get_candidate(choice)
        if not candidate.calls:
            return b""
        parts: list[Part] = []
        for slot, (call, pieces) in candidate.calls.items():
            if candidate.signatures[slot]:
                parts.append(ReasoningContent("", "gemini", candidate.signatures[slot]))
            parts.append(ToolCallContent(call.id, call.name, "".join(pieces)))
        candidate.calls = {}
        return self._encode_event(choice, render_parts(parts, {}))

    def _encode_event(self, choice: int, parts: list[Json], extra_fields: Json | None = None) -> bytes:
        row = {"content": {"parts": parts, "role": "model"}, "index": choice} | (extra_fields or {})
        return b'data: {"candidates":[%b]%b' % (sse.dumps(row), self._tail)

    def _end_stream(self) -> bytes:
        """Return the last event, with the finish reasons, citations and usage."""
        rows: list[Json] = []
        for choice, candidate in sorted(self._candidates.items()):
            assert candidate.finish is not None and not candidate.calls, (
                "a finish reason precedes the end of the stream"
            )
            reason = "SAFETY" if candidate.has_refusal else TO_GEMINI[candidate.finish.reason]
            content = {"parts": [{"text": ""}], "role": "model"}
            cited = render_grounding([(0, TextContent("".join(candidate.text), citations=candidate.citations))])
            rows.append({"content": content, "finishReason": reason, "index": choice, **cited})
        usage = {} if self._usage is None else {"usageMetadata": render_gemini_usage(self._usage)}
        return b"data: " + sse.dumps({"candidates": rows} | usage)[:-1] + self._tail
