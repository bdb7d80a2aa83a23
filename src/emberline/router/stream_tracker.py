"""StreamTracker: tracks the output that a client has received, so that a different worker can continue the stream.

An Emberline worker writes its stream in groups (`core/handoff.py`). A group is a comment that lists tokens, and the
events of these tokens. The tracker passes on the events of complete groups only, and stores the comments. With these
tokens, a different worker can continue the stream after the last complete group.

A vLLM or SGLang server writes no groups. Its stream is passed on in complete events (`router/sse_buffer.py`). An error
event can end such a stream, but no other worker can continue it."""

from __future__ import annotations

import msgspec

from emberline.core.handoff import NO_DRAFTS, DraftCounts, Handoff, TokenGroup
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.router.dialect import InvalidWorkerReply
from emberline.router.prefix_block_map import BlockPosition
from emberline.router.sse_buffer import FINAL_EVENT_PREFIXES, SSEBuffer, find_last_event_start

MAX_GROUP_BYTES = 32 << 20


class _ReplyHead(msgspec.Struct):
    id: str | None = None
    created_at: int | None = None


class _FirstEvent(_ReplyHead):
    """The fields of a stream's first event that identify the reply, for all API protocols."""

    created: int | None = None
    message: _ReplyHead | None = None
    response: _ReplyHead | None = None


class StreamTracker:
    def __init__(
        self,
        received: Handoff | None = None,
        reply_id: str | None = None,
        created: int | None = None,
    ) -> None:
        """`received`: the output that the client received over an earlier connection; None: a new stream.

        `reply_id` and `created`: the id and the creation time of the reply to which that output belongs."""
        self.event_count = 0  # events passed on
        self.has_ended = False  # the protocol's final event was passed on
        self.cached_tokens: int | None = None  # cached prompt tokens, as the client's usage field shows them
        self.drafts = NO_DRAFTS  # of the reply, as the worker counts them
        self.prompt_end: BlockPosition | None = None  # last block of the prompt
        self.first_chunk = self.last_chunk = b""  # first and last bytes passed on, each as one write
        # Comments of the groups passed on, a line each; parsed only when the stream is moved.
        self._group_comments = bytearray()
        self._reply_identity = reply_id, created
        if received is not None:
            self.cached_tokens, self.drafts = received.cached_tokens, received.drafts
            for group in received.groups:
                self._group_comments += group.to_comment(0)[:-1]
        self._partial_group: list[bytes] = []  # data of an incomplete group
        self._missing_bytes = 0  # bytes that the incomplete group lacks at least
        self._untracked_events: SSEBuffer | None = None  # set if the stream has no groups

    @property
    def has_output(self) -> bool:
        return bool(self.first_chunk)

    @property
    def is_mid_event(self) -> bool:
        """Whether the client has received only a part of the last event. Then no error event can be sent."""
        return self._untracked_events is not None and self._untracked_events.is_mid_event

    @property
    def is_movable(self) -> bool:
        return self._untracked_events is None and not self.has_ended

    def push(self, data: bytes) -> bytes:
        """Add received bytes, and return the events that can be sent to the client now.

        Raises InvalidWorkerReply for a malformed group."""
        untracked = self._untracked_events
        if untracked is None and (self._group_comments or self._partial_group or data.startswith(b":")):
            output = self._push_groups(data)
        else:
            untracked = self._untracked_events = untracked or SSEBuffer()
            output = untracked.push(data)
        if output:
            self.first_chunk = self.first_chunk or output
            self.last_chunk = output
            self.event_count += output.count(b"\n\n")
            self.has_ended = (
                output.startswith(FINAL_EVENT_PREFIXES, find_last_event_start(output)) and not self.is_mid_event
            )
        return output

    def take_remaining_bytes(self) -> bytes:
        """Return the bytes still buffered when the stream ends, even if the last event is incomplete.

        This is for streams without groups."""
        return b"" if self._untracked_events is None else self._untracked_events.take_remaining_bytes()

    def discard_partial_group(self) -> None:
        """Drop the bytes of an incomplete group. The worker that continues the stream generates that group again."""
        assert self._untracked_events is None
        self._partial_group.clear()
        self._missing_bytes = 0

    def build_handoff(self) -> Handoff:
        """Return the tokens that the client has received, with which the next worker continues the stream."""
        try:
            groups = tuple(TokenGroup.from_comment(bytes(line)) for line in self._group_comments.splitlines())
        except ValueError as e:
            raise InvalidWorkerReply(str(e)) from e
        return Handoff(
            groups, self.has_output or self._reply_identity[0] is not None, self.cached_tokens, drafts=self.drafts
        )

    def reply_id_and_created(self) -> tuple[str | None, int | None]:
        """Return the reply's id and creation time from its first event, or (None, None)."""
        if self._reply_identity[0] is not None:
            return self._reply_identity
        for line in self.first_chunk.splitlines():
            if line.startswith(b"data: {"):
                try:
                    opening = msgspec.json.decode(line[6:], type=_FirstEvent)
                except JSON_DECODE_ERRORS:
                    break
                inner = opening.message or opening.response or opening
                return inner.id, opening.created or inner.created_at
        return None, None

    def _push_groups(self, data: bytes) -> bytes:
        if not self._group_comments and b"\r" in data:  # groups never contain CR: the comments are another server's
            self._untracked_events, kept = SSEBuffer(), b"".join(self._partial_group)
            self._partial_group.clear()
            return self._untracked_events.push(kept + data)
        if self._partial_group:
            self._partial_group.append(data)
            self._missing_bytes -= len(data)
            if self._missing_bytes > 0:
                return b""
            data = b"".join(self._partial_group)
            self._partial_group.clear()
        output: list[bytes] = []
        comments = bytearray()
        position = groups_end = 0  # data[:groups_end]: complete groups; data[groups_end:position]: later comments
        cached = confirmed_cached = self.cached_tokens
        drafts = confirmed_drafts = self.drafts
        self._missing_bytes = 1
        while (end := data.find(b"\n\n", position) + 2) > 1:
            line = data[position : end - 1]
            if line.startswith(b": said "):
                begin, end = end, end + _parse_number_field(line.split(b" ", 5), 4)
                if end > len(data):
                    self._missing_bytes = end - len(data)
                    break
                output.append(data[begin:end])
                comments += line
                confirmed_cached, confirmed_drafts, groups_end = cached, drafts, end
            elif line.startswith(b": cached "):
                cached = _parse_number_field(line.split(b" "), 2)
            elif line.startswith(b": drafts "):
                fields = line.split(b" ")
                drafts = DraftCounts(_parse_number_field(fields, 2), _parse_number_field(fields, 3))
            elif line.startswith(b": chain "):
                self.prompt_end = parse_block_position(line[8:].decode("latin-1"))
            elif not line.startswith(b":"):
                if comments or self._group_comments:
                    raise InvalidWorkerReply(
                        "the worker's stream contains an event that belongs to no token group:"
                        f" {data[position : position + 80]!r}"
                    )
                self._untracked_events = SSEBuffer()  # the stream began with keep-alive comments of another server
                return self._untracked_events.push(data[position:])
            position = end
        if groups_end < len(data):
            self._store_partial_group(data[groups_end:])
        self._group_comments += comments  # not earlier: when an error is raised, nothing of this data was passed on
        self.cached_tokens, self.drafts = confirmed_cached, confirmed_drafts
        return b"".join(output)

    def _store_partial_group(self, data: bytes) -> None:
        if len(data) + self._missing_bytes > MAX_GROUP_BYTES:
            raise InvalidWorkerReply(
                f"a token group of the worker's stream exceeds the limit of {MAX_GROUP_BYTES} bytes"
            )
        self._partial_group.append(data)


def parse_block_position(text: str) -> BlockPosition:
    try:
        return BlockPosition.parse(text)
    except ValueError as e:
        raise InvalidWorkerReply(f"the block position {text[:100]!r} is invalid: {e}") from e


def _parse_number_field(comment_fields: list[bytes], index: int) -> int:
    try:
        number = int(comment_fields[index])
    except (IndexError, ValueError) as e:
        raise InvalidWorkerReply(
            f"field {index} in the comment of a token group must be a number: {comment_fields!r}"
        ) from e
    if not 0 <= number <= MAX_GROUP_BYTES:
        raise InvalidWorkerReply(
            f"a number in the comment of a token group must be between 0 and {MAX_GROUP_BYTES}: {comment_fields!r}"
        )
    return number
