"""SimRequest: a request of a simulated client. Its prompt is a list of segments, such as messages.

The tokens of a segment are derived from its key, so prompts that begin with the same segments share their KV blocks."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from hashlib import blake2b, shake_128
from typing import NamedTuple

from emberline.router.prefixmap import PromptPrefix
from emberline.router.request_summary import MAX_PREFIXES_PER_PROMPT, MIN_PREFIX_BYTES, RequestSummary

MODEL_NAME = "sim"
VOCAB_SIZE = 100_000
BYTES_PER_TOKEN = 4  # bytes of a token in a request's body


class PromptSegment(NamedTuple):
    """A message of a prompt, or another segment that prompts have in common."""

    key: str
    num_tokens: int

    def tokens(self) -> list[int]:
        words = array("I", shake_128(self.key.encode()).digest(4 * self.num_tokens))
        return [word % VOCAB_SIZE for word in words]


def chain_digest(previous: bytes, segment: PromptSegment) -> bytes:
    """Return the digest of a prompt that continues the prompt with the digest `previous` by this segment."""
    return blake2b(previous + f"{segment.key}/{segment.num_tokens}".encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class SimRequest:
    id: str
    segments: tuple[PromptSegment, ...]
    digests: tuple[bytes, ...]  # digests of the prompt up to the end of each segment
    num_prompt_tokens: int
    reply: PromptSegment
    summary: RequestSummary  # what the router knows about it
    num_resumed: int = 0  # tokens of the reply that are known when it arrives, with the KV blocks up to them

    @property
    def reply_digest(self) -> bytes:
        """The digest of the prompt and the whole reply, with which the next turn's prompt begins."""
        return chain_digest(self.digests[-1], self.reply)

    def with_session(self, session: str) -> SimRequest:
        """Return the same request with a session header."""
        return replace(self, summary=replace(self.summary, session=session))

    def prompt_tokens(self) -> list[int]:
        return [token for segment in self.segments for token in segment.tokens()]


@dataclass(slots=True)
class SimPromptBuilder:
    """Collects the segments of a conversation, and makes requests of them."""

    segments: list[PromptSegment] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    prefixes: list[PromptPrefix] = field(default_factory=list)  # where the router may find a known prefix
    num_tokens: int = 0

    def add(self, segment: PromptSegment) -> None:
        digest = chain_digest(self.digests[-1] if self.digests else b"", segment)
        self.segments.append(segment)
        self.digests.append(digest)
        self.num_tokens += segment.num_tokens
        if (length := self.num_tokens * BYTES_PER_TOKEN) >= MIN_PREFIX_BYTES:
            self.prefixes.append(PromptPrefix(digest, length))

    def build_request(self, request_id: str, reply: PromptSegment) -> SimRequest:
        prefixes, half = self.prefixes, MAX_PREFIXES_PER_PROMPT // 2
        if len(prefixes) > MAX_PREFIXES_PER_PROMPT:
            prefixes = prefixes[:half] + prefixes[-half:]
        summary = RequestSummary(
            MODEL_NAME,
            self.num_tokens * BYTES_PER_TOKEN,
            True,
            reply.num_tokens,
            digest=self.digests[-1],
            prefixes=tuple(prefixes),
            is_single_sequence=True,
        )
        return SimRequest(request_id, tuple(self.segments), tuple(self.digests), self.num_tokens, reply, summary)
