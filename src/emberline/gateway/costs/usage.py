"""How many tokens a request used: one vector for every provider.

Providers disagree on what contains what. Here the parts are always subsets: `cached_read`, `cache_write`, `audio` and
`image` of `input`; `cache_write_long` (kept for an hour) of `cache_write`; `reasoning` of `output`. `Usage.read` makes
it so, whatever was said: a provider's contradiction is cut down, never billed twice, never raised.

In a stream several usages may come; each is cumulative, so `joined` takes the larger of every count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

MOST = 1 << 53  # tokens; a provider that tells more has told nothing


class Usage(msgspec.Struct, frozen=True):
    input: int = 0
    cached_read: int = 0
    cache_write: int = 0
    output: int = 0
    reasoning: int = 0
    audio: int = 0
    image: int = 0
    cache_write_long: int = 0

    def __post_init__(self) -> None:
        assert min(self.input, self.cached_read, self.cache_write) >= 0
        assert self.cached_read + self.cache_write <= self.input
        assert 0 <= self.cache_write_long <= self.cache_write
        assert 0 <= self.audio <= self.input and 0 <= self.image <= self.input
        assert 0 <= self.reasoning <= self.output

    @property
    def total(self) -> int:
        return self.input + self.output

    @staticmethod
    def read(dialect: str, said: object) -> Usage | None:
        """From the decoded usage object of a dialect; None if it says nothing about tokens."""
        return READERS[dialect](said) if isinstance(said, dict | Mapping) else None  # a dict is found out sooner

    @staticmethod
    def found(dialect: str, event: object) -> Usage | None:
        """From a whole decoded reply, or one decoded event of a stream, of a dialect."""
        if not isinstance(event, Mapping):
            return None
        for outer, name in PLACES[dialect]:
            place = event.get(outer) if outer else event
            if isinstance(place, Mapping) and (usage := Usage.read(dialect, place.get(name))):
                return usage
        return None

    def plus(self, other: Usage) -> Usage:
        """With what another request used."""
        return Usage(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))

    def joined(self, later: Usage) -> Usage:
        """With what a later event of the same stream said."""
        return _fitted(
            input=max(self.input, later.input),
            cached_read=max(self.cached_read, later.cached_read),
            cache_write=max(self.cache_write, later.cache_write),
            output=max(self.output, later.output),
            reasoning=max(self.reasoning, later.reasoning),
            audio=max(self.audio, later.audio),
            image=max(self.image, later.image),
            cache_write_long=max(self.cache_write_long, later.cache_write_long),
        )


def _fitted(
    *,
    input: int,
    output: int,
    cached_read: int = 0,
    cache_write: int = 0,
    cache_write_long: int = 0,
    reasoning: int = 0,
    audio: int = 0,
    image: int = 0,
) -> Usage:
    """The vector, with parts cut down to what they are parts of."""
    if not (cached_read or cache_write or reasoning or audio or image):  # as most
        return Usage(input=input, output=output)
    cached_read = min(cached_read, input)
    cache_write = min(cache_write, input - cached_read)
    return Usage(
        input=input,
        cached_read=cached_read,
        cache_write=cache_write,
        output=output,
        reasoning=min(reasoning, output),
        audio=min(audio, input),
        image=min(image, input),
        cache_write_long=min(cache_write_long, cache_write),
    )


def _count(said: Mapping[str, Any], *names: str) -> int:
    """The first of these that is a count; 0 if none is. Some providers write 12.0."""
    for name in names:
        value = said.get(name)
        if type(value) is int and 0 <= value <= MOST:  # True is none
            return value
        if type(value) is float and 0 <= value <= MOST and value.is_integer():
            return int(value)
    return 0


def _part(said: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = said.get(name)
    return part if isinstance(part, dict) else {}


def _chat(said: Mapping[str, Any]) -> Usage | None:
    if "prompt_tokens" not in said and "completion_tokens" not in said:
        return None
    input, output = _count(said, "prompt_tokens"), _count(said, "completion_tokens")
    into, out = _part(said, "prompt_tokens_details"), _part(said, "completion_tokens_details")
    # xAI and Gemini's compatible endpoint leave thoughts, which they bill, out of completion_tokens, not of the total.
    hidden = max(0, _count(said, "total_tokens") - input - output)
    cached = _count(said, "prompt_cache_hit_tokens", "cached_tokens")
    if not (into or out or hidden):
        return _fitted(input=input, cached_read=cached, output=output)
    return _fitted(
        input=input,
        cached_read=_count(into, "cached_tokens") or cached,
        cache_write=_count(into, "cache_write_tokens", "cache_creation_tokens"),
        output=output + hidden,
        reasoning=max(_count(out, "reasoning_tokens"), hidden),
        audio=_count(into, "audio_tokens"),
        image=_count(into, "image_tokens"),
    )


def _responses(said: Mapping[str, Any]) -> Usage | None:
    if "input_tokens" not in said and "output_tokens" not in said:
        return None
    into, out = _part(said, "input_tokens_details"), _part(said, "output_tokens_details")
    return _fitted(
        input=_count(said, "input_tokens"),
        cached_read=_count(into, "cached_tokens"),
        cache_write=_count(into, "cache_write_tokens"),
        output=_count(said, "output_tokens"),
        reasoning=_count(out, "reasoning_tokens"),
        audio=_count(into, "audio_tokens"),
        image=_count(into, "image_tokens"),
    )


def _anthropic(said: Mapping[str, Any]) -> Usage | None:
    if "input_tokens" not in said and "output_tokens" not in said:
        return None
    read, write = _count(said, "cache_read_input_tokens"), _count(said, "cache_creation_input_tokens")
    return _fitted(
        input=_count(said, "input_tokens") + read + write,
        cached_read=read,
        cache_write=write,
        cache_write_long=_count(_part(said, "cache_creation"), "ephemeral_1h_input_tokens"),
        output=_count(said, "output_tokens"),
        reasoning=_count(_part(said, "output_tokens_details"), "thinking_tokens", "reasoning_tokens"),
    )


def _gemini(said: Mapping[str, Any]) -> Usage | None:
    if not any(name in said for name in ("promptTokenCount", "candidatesTokenCount", "totalTokenCount")):
        return None
    thoughts = _count(said, "thoughtsTokenCount")
    return _fitted(
        input=_count(said, "promptTokenCount") + _count(said, "toolUsePromptTokenCount"),
        cached_read=_count(said, "cachedContentTokenCount"),
        output=_count(said, "candidatesTokenCount") + thoughts,
        reasoning=thoughts,
        audio=_modality(said, "AUDIO"),
        image=_modality(said, "IMAGE"),
    )


def _modality(said: Mapping[str, Any], modality: str) -> int:
    details = said.get("promptTokensDetails")
    rows = [row for row in details if isinstance(row, Mapping)] if isinstance(details, list) else []
    return sum(_count(row, "tokenCount") for row in rows if row.get("modality") == modality)


def _converse(said: Mapping[str, Any]) -> Usage | None:
    """Bedrock's Converse: like Anthropic, the input is without what the cache gave and took."""
    if "inputTokens" not in said and "outputTokens" not in said:
        return None
    read, write = _count(said, "cacheReadInputTokens"), _count(said, "cacheWriteInputTokens")
    return _fitted(
        input=_count(said, "inputTokens") + read + write,
        cached_read=read,
        cache_write=write,
        output=_count(said, "outputTokens"),
    )


def _cohere(said: Mapping[str, Any]) -> Usage | None:
    """Cohere bills `billed_units`, which may be fewer than the model's `tokens`."""
    billed = _part(said, "billed_units") or _part(said, "tokens")
    return _responses(billed) if billed else None


def _raw(said: Mapping[str, Any]) -> Usage | None:
    """An endpoint passed through as it is: whichever shape fits."""
    excludes_cache = "cache_read_input_tokens" in said or "cache_creation_input_tokens" in said
    shapes = (_chat, _gemini, _converse, _cohere, _anthropic if excludes_cache else _responses)
    return next((usage for shape in shapes if (usage := shape(said)) is not None), None)


READERS: Mapping[str, Callable[[Mapping[str, Any]], Usage | None]] = {
    "openai-chat": _chat,
    "openai-responses": _responses,
    "openai-embeddings": _chat,
    "anthropic": _anthropic,
    "gemini": _gemini,
    "raw": _raw,
}
# Where a reply or an event of a stream has its usage: (the object it is in, or "" for the top; its name).
PLACES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "openai-chat": (("", "usage"), ("x_groq", "usage")),
    "openai-responses": (("response", "usage"), ("", "usage")),
    "openai-embeddings": (("", "usage"),),
    "anthropic": (("message", "usage"), ("", "usage")),
    "gemini": (("", "usageMetadata"),),
    "raw": (
        ("", "usage"),
        ("", "usageMetadata"),
        ("message", "usage"),
        ("response", "usage"),
        ("metadata", "usage"),
        ("delta", "usage"),
        ("result", "usage"),
        ("", "meta"),
    ),
}
