"""Speech: what a fake worker says. It follows from the request's seed alone, so who goes on with it says the same."""

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
    """What the client wants."""

    seed: int | None = None
    max_tokens: int | None = None
    stream: bool = False
    uneven: bool = False  # some tokens cause no event, some several
    untracked: bool = False  # as other servers do it


class Envelope(msgspec.Struct):
    """What a router wants: that it is prefilled, or goes on."""

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
        """Those that the token there causes."""
        text, last = self.text(at), at == self.length - 1
        if self._uneven and at % 5 == 3 and not last:
            text = ""  # held back
        elif self._uneven and at % 5 == 4:
            text = self.text(at - 1) + text
        pieces = [text[:3], text[3:]] if self._uneven and at % 7 == 5 else [text]
        said = b"".join(self._event(b'"content":"%b"' % piece.encode()) for piece in pieces if piece)
        return said + (self._event(b"", b'"stop"') if last else b"")

    def writes(self, prompt: int, after: int, tracked: bool) -> Iterator[bytes]:
        """All that comes after so many tokens."""
        for at in range(after, self.length):
            events = self.events(at)
            said = Said(0, (self.token(at),), "stop" if at == self.length - 1 else "")
            yield said.line(len(events)) + events if tracked else events
        ending = b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode({"choices": [], "usage": self._usage(prompt)})
        yield Said(0, ()).line(len(ending)) + ending if tracked else ending

    def whole(self, prompt: int) -> bytes:
        content = "".join(map(self.text, range(self.length)))
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        head = {"id": self.id, "object": "chat.completion", "created": 1, "model": "fake"}
        return msgspec.json.encode({**head, "choices": [choice], "usage": self._usage(prompt)})

    def said_before(self, envelope: Envelope) -> int:
        """How many tokens; they must be these, and who sends them must know how the reply began."""
        handoff = Handoff.parsed(envelope.handoff)
        said = [token for group in handoff.said for token in group.tokens]
        if said != [self.token(at) for at in range(len(said))]:
            raise InvalidRequest("that was said by nobody")
        if handoff.started != bool(said) or (said and (envelope.id, envelope.created) != (self.id, 1)):
            raise InvalidRequest("the reply did not begin like that")
        return len(said)

    def _usage(self, prompt: int) -> dict[str, int]:
        return {"prompt_tokens": prompt, "completion_tokens": self.length}

    def _event(self, delta: bytes, finish: bytes = b"null") -> bytes:
        return EVENT % (self.id.encode(), delta, finish)
