"""Track: what one client has been told, whichever workers told it. It takes a tracked stream (`core/handoff.py`) as it
comes, gives out the events of whole groups, and keeps what these said, so that another worker can go on after them.

A stream without groups, as any other server writes it, passes between two events (`router/events.py`): it can be ended
with an error, but not moved."""

from __future__ import annotations

import msgspec

from emberline.core.handoff import Handoff, Said
from emberline.net.notjson import NOT_JSON
from emberline.router.chains import Link
from emberline.router.dialect import Garbled
from emberline.router.events import ENDINGS, Events, last_of

LARGEST = 32 << 20  # bytes of one group


class _Message(msgspec.Struct):
    id: str | None = None
    created_at: int | None = None


class _Opening(_Message):
    """How the reply began, in the protocols' several ways."""

    created: int | None = None
    message: _Message | None = None
    response: _Message | None = None


class Track:
    def __init__(self) -> None:
        self.count = 0  # events passed on
        self.ended = False  # the protocol's own ending has passed
        self.cached: int | None = None  # prompt tokens, as the client was or will be told
        self.link: Link | None = None  # where the prompt ends, in blocks
        self.first = self.last = b""  # what was passed on first and last, in one go
        self._said = bytearray()  # comments of the groups passed on, a line each: read only if it comes to a move
        self._kept: list[bytes] = []  # of a group that is not whole
        self._wanted = 0  # bytes until it may be
        self._plain: Events | None = None  # the stream has no groups

    @property
    def started(self) -> bool:
        return bool(self.first)

    @property
    def torn(self) -> bool:
        """Part of an event went out: nothing can follow it."""
        return self._plain is not None and self._plain.torn

    @property
    def movable(self) -> bool:
        return self._plain is None and not self.ended

    def push(self, data: bytes) -> bytes:
        """What may be sent on."""
        plain = self._plain
        if plain is None and (self._said or self._kept or data.startswith(b":")):
            out = self._groups(data)
        else:
            plain = self._plain = plain or Events()
            out = plain.push(data)
        if out:
            self.first = self.first or out
            self.last = out
            self.count += out.count(b"\n\n")
            self.ended = out.startswith(ENDINGS, last_of(out)) and not self.torn
        return out

    def rest(self) -> bytes:
        """At the end of the reply: what was kept of a stream without groups, whatever it is."""
        return b"" if self._plain is None else self._plain.rest()

    def moved(self) -> None:
        """Another worker goes on: what came only in part will come again."""
        assert self._plain is None
        self._kept.clear()
        self._wanted = 0

    def handoff(self) -> Handoff:
        """For who goes on."""
        try:
            said = tuple(Said.read(bytes(line)) for line in self._said.splitlines())
        except ValueError as e:
            raise Garbled(str(e)) from e
        return Handoff(said, self.started, self.cached)

    def named(self) -> tuple[str | None, int | None]:
        """The reply's id and when it was made, as its first event says."""
        for line in self.first.splitlines():
            if line.startswith(b"data: {"):
                try:
                    opening = msgspec.json.decode(line[6:], type=_Opening)
                except NOT_JSON:
                    break
                inner = opening.message or opening.response or opening
                return inner.id, opening.created or inner.created_at
        return None, None

    def _groups(self, data: bytes) -> bytes:
        if not self._said and b"\r" in data:  # groups have none, and JSON escapes them: another server's comments
            self._plain, kept = Events(), b"".join(self._kept)
            self._kept.clear()
            return self._plain.push(kept + data)
        if self._kept:
            self._kept.append(data)
            self._wanted -= len(data)
            if self._wanted > 0:
                return b""
            data = b"".join(self._kept)
            self._kept.clear()
        out: list[bytes] = []
        said = bytearray()
        at = done = 0  # [0, done) are whole groups, [done, at) comments before the next
        cached = told = self.cached
        self._wanted = 1
        while (end := data.find(b"\n\n", at) + 2) > 1:
            line = data[at : end - 1]
            if line.startswith(b": said "):
                begin, end = end, end + _number(line.split(b" ", 5), 4)
                if end > len(data):
                    self._wanted = end - len(data)
                    break
                out.append(data[begin:end])
                said += line
                told, done = cached, end
            elif line.startswith(b": cached "):
                cached = _number(line.split(b" "), 2)
            elif line.startswith(b": chain "):
                self.link = read_link(line[8:].decode("latin-1"))
            elif not line.startswith(b":"):
                if said or self._said:
                    raise Garbled(repr(data[at : at + 80]))
                self._plain = Events()  # it began with comments, as others write them to keep a connection alive
                return self._plain.push(data[at:])
            at = end
        if done < len(data):
            self._keep(data[done:])
        self._said += said  # only now: who raises has passed on nothing
        self.cached = told
        return b"".join(out)

    def _keep(self, rest: bytes) -> None:
        if len(rest) + self._wanted > LARGEST:
            raise Garbled(f"a group of more than {LARGEST} bytes")
        self._kept.append(rest)


def read_link(text: str) -> Link:
    try:
        return Link.read(text)
    except ValueError as e:
        raise Garbled(str(e)) from e


def _number(words: list[bytes], at: int) -> int:
    try:
        number = int(words[at])
    except (IndexError, ValueError) as e:
        raise Garbled(repr(words)) from e
    if not 0 <= number <= LARGEST:
        raise Garbled(repr(words))
    return number
