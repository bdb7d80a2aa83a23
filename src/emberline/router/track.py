"""StreamTracker: the part of a streamed reply that one client has received.

It splits a tracked stream (`core/handoff.py`) into groups, passes on the events of complete groups only, and keeps the
groups' token comments, so that another worker can continue the stream after the last complete group.

A stream without groups, as other servers write it, is passed on in whole events (`router/sse_buffer.py`): an error
event can end it, but no other worker can continue it."""

from __future__ import annotations

import msgspec

from emberline.core.handoff import Handoff, Said
from emberline.net.notjson import NOT_JSON
from emberline.router.chains import Link
from emberline.router.dialect import Garbled
from emberline.router.events import ENDINGS, Events, last_of

LARGEST = 32 << 20


class _Message(msgspec.Struct):
    id: str | None = None
    created_at: int | None = None


class _Opening(_Message):
    """The fields of a reply's first event that identify the reply, in all API protocols."""

    created: int | None = None
    message: _Message | None = None
    response: _Message | None = None


class Track:
    def __init__(self) -> None:
        self.count = 0  # events passed on
        self.ended = False  # the protocol's final event was passed on
        self.cached: int | None = None  # cached prompt tokens, as the client's usage field shows them
        self.link: Link | None = None  # last block of the prompt
        self.first = self.last = b""  # first and last bytes passed on, each as one write
        self._said = bytearray()  # comments of the groups passed on, a line each; parsed only when the stream is moved
        self._kept: list[bytes] = []  # data of an incomplete group
        self._wanted = 0  # bytes that the incomplete group lacks at least
        self._plain: Events | None = None  # set if the stream has no groups

    @property
    def started(self) -> bool:
        return bool(self.first)

    @property
    def torn(self) -> bool:
        """Whether the output ended within an event, so that no error event can follow."""
        return self._plain is not None and self._plain.torn

    @property
    def movable(self) -> bool:
        return self._plain is None and not self.ended

    def push(self, data: bytes) -> bytes:
        """Return the bytes for the client that are complete now.

        Raises InvalidWorkerReply for a malformed group."""
        untracked = self._plain
        if untracked is None and (self._said or self._kept or data.startswith(b":")):
            output = self._groups(data)
        else:
            untracked = self._plain = untracked or Events()
            output = untracked.push(data)
        if output:
            self.first = self.first or output
            self.last = output
            self.count += output.count(b"\n\n")
            self.ended = output.startswith(ENDINGS, last_of(output)) and not self.torn
        return output

    def rest(self) -> bytes:
        """Return what is buffered at the end of a stream without groups, complete event or not."""
        return b"" if self._plain is None else self._plain.rest()

    def moved(self) -> None:
        """Drop the incomplete group: the worker that continues the stream sends it again."""
        assert self._plain is None
        self._kept.clear()
        self._wanted = 0

    def handoff(self) -> Handoff:
        """Return what the next worker needs to continue the stream."""
        try:
            groups = tuple(Said.read(bytes(line)) for line in self._said.splitlines())
        except ValueError as e:
            raise Garbled(str(e)) from e
        return Handoff(groups, self.started, self.cached)

    def named(self) -> tuple[str | None, int | None]:
        """Return the reply's id and creation time from its first event, or (None, None)."""
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
        if not self._said and b"\r" in data:  # groups never contain CR: the comments are another server's
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
        output: list[bytes] = []
        comments = bytearray()
        position = groups_end = 0  # [0, done) are complete groups, [done, at) comments before the next group
        cached = confirmed_cached = self.cached
        self._wanted = 1
        while (end := data.find(b"\n\n", position) + 2) > 1:
            line = data[position : end - 1]
            if line.startswith(b": said "):
                begin, end = end, end + _number(line.split(b" ", 5), 4)
                if end > len(data):
                    self._wanted = end - len(data)
                    break
                output.append(data[begin:end])
                comments += line
                confirmed_cached, groups_end = cached, end
            elif line.startswith(b": cached "):
                cached = _number(line.split(b" "), 2)
            elif line.startswith(b": chain "):
                self.link = read_link(line[8:].decode("latin-1"))
            elif not line.startswith(b":"):
                if comments or self._said:
                    raise Garbled(f"an event of the stream belongs to no group: {data[position : position + 80]!r}")
                self._plain = Events()  # the stream began with keep-alive comments of another server
                return self._plain.push(data[position:])
            position = end
        if groups_end < len(data):
            self._keep(data[groups_end:])
        self._said += comments  # not earlier: when an error is raised, nothing of this data was passed on
        self.cached = confirmed_cached
        return b"".join(output)

    def _keep(self, rest: bytes) -> None:
        if len(rest) + self._wanted > LARGEST:
            raise Garbled(f"a group of the stream exceeds {LARGEST} bytes")
        self._kept.append(rest)


def read_link(text: str) -> Link:
    try:
        return Link.read(text)
    except ValueError as e:
        raise Garbled(f"the block position {text[:100]!r} is invalid: {e}") from e


def _number(words: list[bytes], at: int) -> int:
    try:
        number = int(words[at])
    except (IndexError, ValueError) as e:
        raise Garbled(f"a group comment has no number in field {at}: {words!r}") from e
    if not 0 <= number <= LARGEST:
        raise Garbled(f"a number in a group comment is not between 0 and {LARGEST}: {words!r}")
    return number
