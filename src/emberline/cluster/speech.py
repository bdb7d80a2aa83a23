"""FakeCompletion: the reply of a fake worker.

It depends only on the request's seed, so that every worker which resumes it produces the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.core.handoff import Handoff, Said

EVENT = (
    b'data: {"id":"%b","object":"chat.completion.chunk","created":1,"model":"fake","choices":'
    b'[{"index":0,"delta":{%b},"finish_reason":%b}]}\n\n'
)


class Asked(msgspec.Struct):
    """The fields of a client's request that a fake worker uses."""

    seed: int | None = None
    max_tokens: int | None = None
    stream: bool = False
    uneven: bool = False  # some tokens cause no event, some several
    untracked: bool = False  # write a stream without groups, as other servers do


class Envelope(msgspec.Struct):
    """A router's request to prefill or to resume."""

    path: str
    body: msgspec.Raw
    seed: int
    timeout: float | None  # None: no deadline
    handoff: dict[str, Any]
    id: str | None = None
    created: int | None = None


class Speech:
    def __init__(self, seed: int, asked: Asked) -> None:
        self.length = asked.max_tokens or 16
        self.id = f"chatcmpl-{seed:x}"
        self._seed = seed
        self._uneven = asked.uneven

    def token(self, at: int) -> int:
        return int.from_bytes(blake2b(b"%d %d" % (self._seed, at), digest_size=2).digest(), "big")

    def text(self, at: int) -> str:
        return f" word{self.token(at)}"

    def events(self, at: int) -> bytes:
        """Return the events that the token at this position causes."""
        text, last = self.text(at), at == self.length - 1
        if self._uneven and at % 5 == 3 and not last:
            text = ""  # sent with the next token
        elif self._uneven and at % 5 == 4:
            text = self.text(at - 1) + text
        pieces = [text[:3], text[3:]] if self._uneven and at % 7 == 5 else [text]
        events = b"".join(self._event(b'"content":"%b"' % piece.encode()) for piece in pieces if piece)
        return events + (self._event(b"", b'"stop"') if last else b"")

    def writes(self, prompt: int, after: int, tracked: bool) -> Iterator[bytes]:
        """Yield the chunks of the stream after the first `after` tokens."""
        for at in range(after, self.length):
            events = self.events(at)
            group = Said(0, (self.token(at),), "stop" if at == self.length - 1 else "")
            yield group.line(len(events)) + events if tracked else events
        ending = b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode({"choices": [], "usage": self._usage(prompt)})
        yield Said(0, ()).line(len(ending)) + ending if tracked else ending

    def whole(self, prompt: int) -> bytes:
        content = "".join(map(self.text, range(self.length)))
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        fields = {"id": self.id, "object": "chat.completion", "created": 1, "model": "fake"}
        return msgspec.json.encode({**fields, "choices": [choice], "usage": self._usage(prompt)})

    def said_before(self, envelope: Envelope) -> int:
        """Return the number of tokens sent before; raise InvalidRequest if the handoff is wrong.

        The tokens must be this reply's, and the envelope must have the id and creation time of the reply."""
        handoff = Handoff.parsed(envelope.handoff)
        tokens = [token for group in handoff.said for token in group.tokens]
        if tokens != [self.token(at) for at in range(len(tokens))]:
            raise InvalidRequest("the handoff's tokens are not those of this request")
        if handoff.started != bool(tokens) or (tokens and (envelope.id, envelope.created) != (self.id, 1)):
            raise InvalidRequest("the handoff's id or creation time is not that of this reply")
        return len(tokens)

    def _usage(self, prompt: int) -> dict[str, int]:
        return {"prompt_tokens": prompt, "completion_tokens": self.length}

    def _event(self, delta: bytes, finish: bytes = b"null") -> bytes:
        return EVENT % (self.id.encode(), delta, finish)
