"""Renders deltas as the events of a streamed response: items one after the other, each with one part."""

from __future__ import annotations

from collections.abc import Iterable

from emberline.api import sse
from emberline.gateway.costs.usage import Usage
from emberline.gateway.dialects import deltas, seals
from emberline.gateway.dialects.asked import Asked
from emberline.gateway.dialects.finish import TO_RESPONSES
from emberline.gateway.dialects.inner import Citation, Json
from emberline.gateway.dialects.problems import error_body
from emberline.gateway.dialects.responses.growing import Call, Growing, Refused, Said, Thought
from emberline.gateway.dialects.responses.reply import item_id, response
from emberline.gateway.errors import Broken

_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}  # HTTP status -> code; all others: server_error


class Writer:
    def __init__(self, context: Asked) -> None:
        self._asked = context
        self._opened: deltas.Opened | None = None
        self._items: list[Growing] = []
        self._open: Growing | None = None  # the last item, None after it was closed
        self._finished: deltas.Finished | None = None
        self._usage: Usage | None = None
        self._sent = 0

    def push(self, delta: deltas.Delta) -> bytes:
        match delta:
            case deltas.TextPiece():
                return self._grow(Said, delta.text, delta.logprobs)
            case deltas.ToolPiece():
                if not isinstance(self._open, Call) or self._open.slot != delta.slot:
                    raise Broken("the stream interleaves the arguments of several tool calls")
                return self._piece(self._open, delta.text)
            case deltas.ThinkingPiece():
                return self._grow(Thought, delta.text)
            case deltas.RefusalPiece():
                return self._grow(Refused, delta.text)
            case deltas.ToolOpened():
                return self._begin(Call(*self._place(), delta.slot, delta.id, delta.name))
            case deltas.Cited():
                return self._cite(delta.citation)
            case deltas.Sealed():
                return b"" if delta.redacted else self._seal(delta)
            case deltas.Opened():
                self._open_as(delta)
                identity = ("response.created", "response.in_progress")
                return self._events({"type": name, "response": self._response("in_progress")} for name in identity)
            case deltas.Counted():
                self._usage = delta.usage
            case deltas.Finished():
                self._finished = delta
                return self._close()
            case deltas.Ended():
                return self._end()
        return b""

    def fail(self, error: Exception) -> bytes:
        if self._opened is None:
            self._open_as(deltas.Opened("", ""))
        if self._open is not None:
            self._open.status = "incomplete"
        code = _ERROR_CODES.get(getattr(error, "status", 500), "server_error")
        rendered = {"code": code, "message": error_body(error, "openai-responses")["error"]["message"]}
        return self._events([{"type": "response.failed", "response": self._response("failed", error=rendered)}])

    def _open_as(self, opened: deltas.Opened) -> None:
        assert self._opened is None, "a stream has one start"
        self._asked.name(opened)
        self._opened = opened

    def _grow(self, kind: type[Said | Thought | Refused], text: str, logprobs: list[Json] | None = None) -> bytes:
        before = b""
        if type(self._open) is not kind or self._open.sealed:
            before = self._begin(kind(*self._place()))
        assert self._open is not None
        return before + self._piece(self._open, text, logprobs)

    def _piece(self, item: Growing, text: str, logprobs: list[Json] | None = None) -> bytes:
        item.pieces.append(text)
        event = item.piece(sse.dumps(text), logprobs, self._sent)
        self._sent += 1
        return event

    def _seal(self, sealed: deltas.Sealed) -> bytes:
        """Add the signature to the open reasoning item, or open one without text for it."""
        before = b""
        if not isinstance(self._open, Thought) or self._open.sealed:
            before = self._begin(Thought(*self._place(), has_summary=False))
        assert isinstance(self._open, Thought)
        self._open.sealed = seals.shown(sealed.seal, sealed.family, "openai-responses")
        return before

    def _cite(self, citation: Citation) -> bytes:
        """Annotate the text item in which the citation starts, even if that item is already closed."""
        texts = [item for item in self._items if type(item) is Said]
        for item in texts:
            if citation.start < len(item.text) or item is texts[-1]:
                return self._events([item.cite(citation)])
            citation = citation.moved(-len(item.text))
        return b""

    def _place(self) -> tuple[str, int]:
        assert self._opened is not None, "a stream starts before its first content"
        return item_id(self._opened.id, len(self._items)), len(self._items)

    def _begin(self, item: Growing) -> bytes:
        before = self._close()
        self._items.append(item)
        self._open = item
        return before + self._events(item.begin())

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        item, self._open = self._open, None
        return self._events(item.close("incomplete" if self._why() else "completed"))

    def _why(self) -> str | None:
        return TO_RESPONSES[self._finished.reason] if self._finished else None

    def _end(self) -> bytes:
        assert self._finished is not None and self._open is None, "a finish reason precedes the end of the stream"
        kind = "response.incomplete" if self._why() else "response.completed"
        return self._events([{"type": kind, "response": self._response(None)}])

    def _response(self, status: str | None, error: Json | None = None) -> Json:
        assert self._opened is not None
        items = [item.show() for item in self._items]
        return response(
            self._opened,
            self._asked,
            items,
            status=status,
            incomplete_reason=self._why(),
            usage=self._usage,
            error=error,
        )

    def _events(self, events: Iterable[Json]) -> bytes:
        encoded = []
        for event in events:
            encoded.append(sse.event(event["type"], {**event, "sequence_number": self._sent}))
            self._sent += 1
        return b"".join(encoded)
