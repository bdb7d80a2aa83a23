"""ResumableStreams: the streams of a worker that any router can continue when the client reconnects.

Each event of such a stream has an id. A client whose connection broke, for example because its router died, sends its
request again to any router, with the id of the last event that it received in the header Last-Event-ID. That router
asks the worker in the id for the stream's tokens, and has the stream continued after that event. The worker keeps only
tokens: the events of a group of tokens can be written again from them. KV blocks are released as for any other request.
A stream is kept while it runs and for RESUME_WINDOW_S after its end, also if it was complete: the client may not have
received the end."""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, Any, NamedTuple

import msgspec

from emberline.core.errors import InvalidRequest, StreamNotResumable
from emberline.core.handoff import NO_DRAFTS, DraftCounts, Handoff, TokenGroup

RESUME_WINDOW_S = 60.0  # seconds after the end of a stream, or after the loss of its router
MAX_ENDED_STREAMS = 4096
MAX_ENDED_BYTES = 64 << 20  # bytes of the tokens of ended streams; the oldest are forgotten first
RECLAIM_PATH = "/cluster/reclaim"

_ID_PATTERN = re.compile(r"([!-~]{1,128})\.([0-9a-f]{16})\.(\d{1,9})\.(\d{1,9})")


class EventPosition(NamedTuple):
    """The position of an event in a stream: the numbers of complete groups and further events up to it."""

    incarnation: str  # id of the run of the worker's process
    stream: str
    group: int  # number of complete groups up to the event
    event: int  # number of events of the following group up to the event

    @staticmethod
    def parse(text: str) -> EventPosition:
        if (found := _ID_PATTERN.fullmatch(text)) is None:
            raise InvalidRequest(
                f"the header Last-Event-ID is {text[:80]!r}, which is no event id of this service",
                param="last-event-id",
                hint="send the id of the last event that was received, or no such header",
            )
        return EventPosition(found[1], found[2], int(found[3]), int(found[4]))


class ReclaimRequest(msgspec.Struct):
    """A router's request for the tokens of a stream, up to an event."""

    stream: str
    group: Annotated[int, msgspec.Meta(ge=0)]
    event: Annotated[int, msgspec.Meta(ge=0)]
    request_digest: str  # the request must be the one that began the stream


class StreamContinuation(msgspec.Struct):
    """What a router needs to have a stream continued."""

    handoff: dict[str, Any]
    seed: int | None
    id: str  # id of the reply
    created: int
    is_complete: bool = False  # the client has received the whole stream


@dataclass(slots=True, eq=False)
class ResumableStream:
    event_id_prefix: bytes
    tenant: str
    request_digest: str
    reply_id: str
    created: int
    seed: int | None
    resends_last_group: bool = False  # the field of Handoff, until the first group is sent
    skip_events: int = 0
    group_count: int = 0
    # As in Handoff, each with the number of the group from which on it is true.
    cached_tokens: list[tuple[int, int | None]] = field(default_factory=list)
    drafts: list[tuple[int, DraftCounts]] = field(default_factory=list)
    last_group_events: int | None = None  # events of the group that ends the stream; None before that
    is_taken_over: bool = False  # another router continues it
    ended_at: float = 0.0
    comments: bytearray = field(default_factory=bytearray)  # comment lines, one for each group

    def write_group(self, events: bytes, group: TokenGroup | None, replayed_events: bytes = b"") -> bytes:
        """Record a group, and return its events with ids, without those that the client already has.

        `group` is None for the events that end the stream. `replayed_events`: the events of the previous group. Those
        that the client lacks are sent too if its earlier connection broke in the middle of that group. Raises
        StreamNotResumable if another router continues the stream."""
        if self.is_taken_over and group is not None:
            raise StreamNotResumable("the client has continued this stream over another connection")
        numbered = self._number_events(events, self.group_count)
        if self.resends_last_group:
            numbered = self._number_events(replayed_events, self.group_count - 1) + numbered
        if self.skip_events:
            numbered = drop_events(numbered, self.skip_events)
        self.resends_last_group, self.skip_events = False, 0
        if group is None:
            self.last_group_events = events.count(b"\n\n")
        else:
            self.add_group(group)
        return numbered

    def _number_events(self, events: bytes, group: int) -> bytes:
        numbered, prefix = bytearray(), b"id: %b%d." % (self.event_id_prefix, group)
        for i, event in enumerate(events.split(b"\n\n")[:-1]):
            numbered += b"%b\n%b%d\n\n" % (event, prefix, i + 1)
        return bytes(numbered)

    def add_group(self, group: TokenGroup) -> None:
        self.comments += group.to_comment(0)[:-1]
        self.group_count += 1

    def build_handoff(self, position: ReclaimRequest) -> Handoff:
        """Return the handoff that continues the stream after an event."""
        is_partial = position.event > 0 and position.group < self.group_count
        lines = self.comments.splitlines()[: position.group + is_partial]
        groups = tuple(TokenGroup.from_comment(bytes(line)) for line in lines)
        return Handoff(
            groups,
            bool(groups),
            next((cached for group, cached in reversed(self.cached_tokens) if group < len(groups)), None),
            drafts=next((drafts for group, drafts in reversed(self.drafts) if group < len(groups)), NO_DRAFTS),
            skip_events=position.event,
            resends_last_group=is_partial,
        )


class ResumableStreams:
    def __init__(self, incarnation: str, now: Callable[[], float]) -> None:
        self._incarnation = incarnation
        self._now = now
        self._running: dict[str, ResumableStream] = {}
        self._ended: OrderedDict[str, ResumableStream] = OrderedDict()  # the oldest first
        self._ended_bytes = 0

    def open(
        self, handoff: Handoff, *, tenant: str, request_digest: str, reply_id: str, created: int, seed: int | None
    ) -> ResumableStream:
        """Return a new running stream, which begins with the groups of `handoff`. The caller must `close` it."""
        self._forget_expired()
        name = secrets.token_hex(8)
        prefix = f"{self._incarnation}.{name}.".encode()
        skipping = (handoff.resends_last_group, handoff.skip_events)
        stream = ResumableStream(prefix, tenant, request_digest, reply_id, created, seed, *skipping)
        for group in handoff.groups:
            stream.add_group(group)
        stream.cached_tokens, stream.drafts = [(-1, handoff.cached_tokens)], [(-1, handoff.drafts)]
        self._running[name] = stream
        return stream

    def close(self, stream: ResumableStream, *, is_resumable: bool) -> None:
        """Record that a stream has ended. `is_resumable` is False if it ended with an error event for the client."""
        name = stream.event_id_prefix.split(b".")[-2].decode()
        del self._running[name]
        if is_resumable or stream.is_taken_over:  # the connection that continues it may break before its first event
            stream.ended_at = self._now()
            self._ended[name] = stream
            self._ended_bytes += len(stream.comments)
        self._forget_expired()

    def reclaim(self, position: ReclaimRequest, tenant: str) -> StreamContinuation:
        """Return how to continue a stream after an event. If the stream is still running, it ends here.

        Raises StreamNotResumable if the stream is unknown or forgotten, or belongs to another request or tenant, and
        InvalidRequest if the event is beyond the end of the stream."""
        self._forget_expired()
        stream = self._running.get(position.stream) or self._ended.get(position.stream)
        if stream is None or stream.tenant != tenant or stream.request_digest != position.request_digest:
            raise StreamNotResumable(
                "no stream with this event id and this request is known",
                hint="send the request again, without Last-Event-ID",
            )
        is_in_last_group = position.group == stream.group_count and position.event > 0
        if position.group > stream.group_count or (is_in_last_group and stream.last_group_events is None):
            raise InvalidRequest(
                "the event id is beyond the end of the stream",
                param="last-event-id",
                hint="send the id of the last event that was received",
            )
        if position.stream in self._running:
            stream.is_taken_over = True
        is_complete = (
            stream.last_group_events is not None
            and position.group == stream.group_count
            and position.event >= stream.last_group_events
        )
        handoff = stream.build_handoff(position).as_dict()
        return StreamContinuation(handoff, stream.seed, stream.reply_id, stream.created, is_complete)

    def _forget_expired(self) -> None:
        oldest = self._now() - RESUME_WINDOW_S
        while self._ended:
            stream = next(iter(self._ended.values()))
            is_kept = len(self._ended) <= MAX_ENDED_STREAMS and self._ended_bytes <= MAX_ENDED_BYTES
            if is_kept and stream.ended_at > oldest:
                return
            self._ended.popitem(last=False)
            self._ended_bytes -= len(stream.comments)


def drop_events(events: bytes, count: int) -> bytes:
    """Return the events without the first `count` of them."""
    start = 0
    for _ in range(count):  # a client may write any number into an event id
        if (end := events.find(b"\n\n", start)) < 0:
            return b""
        start = end + 2
    return events[start:]


def digest_request(path: str, body: bytes) -> str:
    return blake2b(body, key=path.encode()[:64], digest_size=16).hexdigest()
