"""FakeCompletion: the reply of a fake worker.

Its tokens depend only on the request's seed, so that any fake worker can resume a stream that another fake worker
began."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import msgspec

from emberline.cluster.resumable_streams import ResumableStream
from emberline.core.errors import InvalidRequest
from emberline.core.handoff import Handoff, TokenGroup

CHUNK_TEMPLATE = (
    b'data: {"id":"%b","object":"chat.completion.chunk","created":1,"model":"fake","choices":'
    b'[{"index":0,"delta":{%b},"finish_reason":%b}]}\n\n'
)


class FakeRequest(msgspec.Struct):
    """The fields of a client's request that a fake worker uses."""

    seed: int | None = None
    max_tokens: int | None = None
    stream: bool = False
    uneven: bool = False  # some tokens cause no event, some several
    untracked: bool = False  # write a stream without token groups (core/handoff.py), as vLLM and SGLang do


class FakeForwardedRequest(msgspec.Struct):
    """The body of a router's request to prefill a prompt or to resume a stream."""

    path: str
    body: msgspec.Raw
    seed: int
    timeout: float | None  # None: no deadline
    handoff: dict[str, Any]
    id: str | None = None
    created: int | None = None


class FakeCompletion:
    def __init__(self, seed: int, request: FakeRequest) -> None:
        self.length = request.max_tokens or 16
        self.id = f"chatcmpl-{seed:x}"
        self._seed = seed
        self._is_uneven = request.uneven

    def token_at(self, position: int) -> int:
        return int.from_bytes(blake2b(b"%d %d" % (self._seed, position), digest_size=2).digest(), "big")

    def text_at(self, position: int) -> str:
        return f" word{self.token_at(position)}"

    def events_for_token(self, position: int) -> bytes:
        """Return the server-sent events for the token at this position of the reply."""
        text, last = self.text_at(position), position == self.length - 1
        if self._is_uneven and position % 5 == 3 and not last:
            text = ""  # sent with the next token
        elif self._is_uneven and position % 5 == 4:
            text = self.text_at(position - 1) + text
        pieces = [text[:3], text[3:]] if self._is_uneven and position % 7 == 5 else [text]
        events = b"".join(self._format_event(b'"content":"%b"' % piece.encode()) for piece in pieces if piece)
        return events + (self._format_event(b"", b'"stop"') if last else b"")

    def stream_chunks(
        self, prompt_tokens: int, skipped_tokens: int, is_tracked: bool, stream: ResumableStream | None = None
    ) -> Iterator[bytes]:
        """Yield the chunks of the stream, without the first `skipped_tokens` tokens, which the client already has.

        `stream` adds ids to the events. None: the events have no ids."""
        replayed_events = self.events_for_token(skipped_tokens - 1) if skipped_tokens else b""
        for at in range(skipped_tokens, self.length):
            events = self.events_for_token(at)
            group = TokenGroup(0, (self.token_at(at),), "stop" if at == self.length - 1 else "")
            if stream is not None:
                events = stream.write_group(events, group, replayed_events)
            yield group.to_comment(len(events)) + events if is_tracked else events
        ending = b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(
            {"choices": [], "usage": self._build_usage(prompt_tokens)}
        )
        if stream is not None:
            ending = stream.write_group(ending, None, replayed_events)
        yield TokenGroup(0, ()).to_comment(len(ending)) + ending if is_tracked else ending

    def build_body(self, prompt_tokens: int) -> bytes:
        content = "".join(map(self.text_at, range(self.length)))
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        fields = {"id": self.id, "object": "chat.completion", "created": 1, "model": "fake"}
        return msgspec.json.encode({**fields, "choices": [choice], "usage": self._build_usage(prompt_tokens)})

    def count_resumed_tokens(self, forwarded: FakeForwardedRequest) -> int:
        """Return the number of tokens in the handoff of `forwarded`, which the client already has.

        Raises InvalidRequest if the tokens, the reply id or the creation time in `forwarded` differ from those of this
        completion."""
        handoff = Handoff.parse(forwarded.handoff)
        tokens = [token for group in handoff.groups for token in group.tokens]
        if tokens != [self.token_at(at) for at in range(len(tokens))]:
            raise InvalidRequest("the tokens in the handoff must equal the first tokens of this fake's reply")
        if handoff.started != bool(tokens) or (tokens and (forwarded.id, forwarded.created) != (self.id, 1)):
            raise InvalidRequest("the id and creation time of the handoff must be those of this reply")
        return len(tokens)

    def _build_usage(self, prompt_tokens: int) -> dict[str, int]:
        return {"prompt_tokens": prompt_tokens, "completion_tokens": self.length}

    def _format_event(self, delta_json: bytes, finish_reason_json: bytes = b"null") -> bytes:
        return CHUNK_TEMPLATE % (self.id.encode(), delta_json, finish_reason_json)
