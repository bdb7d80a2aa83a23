"""Renders deltas as the events of a streamed Gemini reply.

Gemini sends a tool call's arguments as one object, so their fragments are collected until the call is complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from emberline.api import sse
from emberline.gateway.costs.usage import Usage
from emberline.gateway.dialects import counts, deltas
from emberline.gateway.dialects.asked import Asked
from emberline.gateway.dialects.finish import TO_GEMINI
from emberline.gateway.dialects.gemini.citations import render as render_citations
from emberline.gateway.dialects.gemini.content import render_parts, shown_seal
from emberline.gateway.dialects.gemini.reply import logprobs_result
from emberline.gateway.dialects.inner import Citation, Json, Part, Text, Thinking, ToolCall
from emberline.gateway.dialects.problems import error_body
from emberline.gateway.errors import Broken

_TEXT = b'data: {"candidates":[{"content":{"parts":[{"text":%b%b}],"role":"model"},"index":%d}]%b'

_Rare: TypeAlias = (
    deltas.TextPiece | deltas.Cited | deltas.RefusalPiece | deltas.Sealed | deltas.ToolOpened | deltas.Finished
)


@dataclass(slots=True)
class _Candidate:
    calls: dict[int, tuple[deltas.ToolOpened, list[str]]] = field(
        default_factory=dict
    )  # slot -> an incomplete call and its argument fragments
    seals: dict[int, str] = field(default_factory=dict)  # slot -> signature of the call
    seal: str = ""  # signature of the next call
    text: list[str] = field(default_factory=list)
    cited: list[Citation] = field(default_factory=list)  # sent with the last event
    refused: bool = False
    finished: deltas.Finished | None = None


class Writer:
    def __init__(self, context: Asked) -> None:
        self._asked = context
        self._tail = b""  # end of every event: model and id
        self._candidates: dict[int, _Candidate] = {}
        self._usage: Usage | None = None

    def push(self, delta: deltas.Delta) -> bytes:
        match delta:
            case deltas.TextPiece(logprobs=None):
                self._of(delta.choice).text.append(delta.text)
                return self._flush(delta.choice) + _TEXT % (sse.dumps(delta.text), b"", delta.choice, self._tail)
            case deltas.ThinkingPiece():
                text = sse.dumps(delta.text)
                return self._flush(delta.choice) + _TEXT % (text, b',"thought":true', delta.choice, self._tail)
            case deltas.ToolPiece():
                if delta.slot not in self._of(delta.choice).calls:
                    raise Broken("the stream has tool call arguments after other content")
                self._of(delta.choice).calls[delta.slot][1].append(delta.text)
            case deltas.Opened():
                assert not self._tail, "a stream has one start"
                self._asked.name(delta)
                identity = {"modelVersion": delta.model, "responseId": delta.id}
                self._tail = b"," + sse.dumps(identity)[1:] + b"\n\n"
            case deltas.Counted():
                self._usage = delta.usage
            case deltas.Ended():
                return self._end()
            case _:
                return self._rare(delta, self._of(delta.choice))
        return b""

    def fail(self, error: Exception) -> bytes:
        return sse.data(error_body(error, "gemini"))

    def _rare(self, delta: _Rare, candidate: _Candidate) -> bytes:
        match delta:
            case deltas.TextPiece():
                candidate.text.append(delta.text)
                more = {"logprobsResult": logprobs_result(delta.logprobs or [])}
                return self._flush(delta.choice) + self._event(delta.choice, [{"text": delta.text}], more)
            case deltas.RefusalPiece():
                candidate.refused = True
                return self._flush(delta.choice) + self._event(delta.choice, [{"text": delta.text}])
            case deltas.Cited():
                candidate.cited.append(delta.citation)
            case deltas.Sealed() if delta.family == "gemini":
                candidate.seal = delta.seal
            case deltas.Sealed() if not delta.redacted:
                thought = {"text": "", "thought": True, "thoughtSignature": shown_seal(delta.seal, delta.family)}
                return self._flush(delta.choice) + self._event(delta.choice, [thought])
            case deltas.ToolOpened():
                candidate.calls[delta.slot] = (delta, [])
                candidate.seals[delta.slot], candidate.seal = candidate.seal, ""
            case deltas.Finished():
                candidate.finished = delta
                return self._flush(delta.choice)
        return b""

    def _of(self, choice: int) -> _Candidate:
        if (candidate := self._candidates.get(choice)) is None:
            candidate = self._candidates[choice] = _Candidate()
        return candidate

    def _flush(self, choice: int) -> bytes:
        """Write the collected tool calls: they are complete as soon as other content follows."""
        candidate = self._of(choice)
        if not candidate.calls:
            return b""
        parts: list[Part] = []
        for slot, (call, pieces) in candidate.calls.items():
            if candidate.seals[slot]:
                parts.append(Thinking("", "gemini", candidate.seals[slot]))
            parts.append(ToolCall(call.id, call.name, "".join(pieces)))
        candidate.calls = {}
        return self._event(choice, render_parts(parts, {}))

    def _event(self, choice: int, parts: list[Json], more: Json | None = None) -> bytes:
        row = {"content": {"parts": parts, "role": "model"}, "index": choice} | (more or {})
        return b'data: {"candidates":[%b]%b' % (sse.dumps(row), self._tail)

    def _end(self) -> bytes:
        """Write the last event, with the finish reasons, citations and usage."""
        rows: list[Json] = []
        for choice, candidate in sorted(self._candidates.items()):
            assert candidate.finished is not None and not candidate.calls, (
                "a finish reason precedes the end of the stream"
            )
            reason = "SAFETY" if candidate.refused else TO_GEMINI[candidate.finished.reason]
            content = {"parts": [{"text": ""}], "role": "model"}
            cited = render_citations([(0, Text("".join(candidate.text), citations=candidate.cited))])
            rows.append({"content": content, "finishReason": reason, "index": choice, **cited})
        usage = {} if self._usage is None else {"usageMetadata": counts.gemini(self._usage)}
        return b"data: " + sse.dumps({"candidates": rows} | usage)[:-1] + self._tail
