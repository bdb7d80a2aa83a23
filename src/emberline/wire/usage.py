"""Usage: the tokens that a request used, in the same form for every provider.

Providers differ in what their counts include. Here the parts are always subsets: `cached_read`, `cache_write`, `audio`
and `image` of `input`; `cache_write_long` (cached for an hour) of `cache_write`; `reasoning` of `output`. `Usage.parse`
ensures this for any provider's counts: a part that exceeds its whole is reduced, never billed twice, never an error.

A stream may have several usage objects. Each is cumulative, so `merge_later` takes the larger of every count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

MAX_TOKENS = 1 << 53  # a larger count is invalid and ignored


class Usage(msgspec.Struct, frozen=True):
    """Numbers of tokens."""

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
    def parse(dialect: str, data: object) -> Usage | None:
        """Return the usage in a dialect's decoded usage object, or None if it has no token counts."""
        return USAGE_READERS[dialect](data) if isinstance(data, dict | Mapping) else None  # `dict |`: a faster check

    @staticmethod
    def find_in(dialect: str, event: object) -> Usage | None:
        """Return the usage in a decoded reply or in one decoded event of a stream, or None."""
        if not isinstance(event, Mapping):
            return None
        for outer, name in USAGE_LOCATIONS[dialect]:
            parent = event.get(outer) if outer else event
            if isinstance(parent, Mapping) and (usage := Usage.parse(dialect, parent.get(name))):
                return usage
        return None

    def plus(self, other: Usage) -> Usage:
        """Return the sum of this usage and that of another request."""
        return Usage(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))

    def merge_later(self, later: Usage) -> Usage:
        """Return this usage updated with that of a later event of the same stream."""
        return _consistent(
            input=max(self.input, later.input),
            cached_read=max(self.cached_read, later.cached_read),
            cache_write=max(self.cache_write, later.cache_write),
            output=max(self.output, later.output),
            reasoning=max(self.reasoning, later.reasoning),
            audio=max(self.audio, later.audio),
            image=max(self.image, later.image),
            cache_write_long=max(self.cache_write_long, later.cache_write_long),
        )


def _consistent(
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
    """Return the usage with every part reduced to at most its whole."""
    if not (cached_read or cache_write or reasoning or audio or image):  # the usual case
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


def _count(data: Mapping[str, Any], *names: str) -> int:
    """Return the first of these fields that is a count, or 0. Some providers write 12.0."""
    for name in names:
        value = data.get(name)
        if type(value) is int and 0 <= value <= MAX_TOKENS:  # type(): True is not a count
            return value
        if type(value) is float and 0 <= value <= MAX_TOKENS and value.is_integer():
            return int(value)
    return 0


def _part(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = data.get(name)
    return part if isinstance(part, dict) else {}


def _chat(data: Mapping[str, Any]) -> Usage | None:
    if "prompt_tokens" not in data and "completion_tokens" not in data:
        return None
    input, output = _count(data, "prompt_tokens"), _count(data, "completion_tokens")
    into, out = _part(data, "prompt_tokens_details"), _part(data, "completion_tokens_details")
    # xAI and Gemini's OpenAI endpoint count reasoning tokens, which they bill, in total_tokens only.
    hidden = max(0, _count(data, "total_tokens") - input - output)
    cached = _count(data, "prompt_cache_hit_tokens", "cached_tokens")
    if not (into or out or hidden):
        return _consistent(input=input, cached_read=cached, output=output)
    return _consistent(
        input=input,
        cached_read=_count(into, "cached_tokens") or cached,
        cache_write=_count(into, "cache_write_tokens", "cache_creation_tokens"),
        output=output + hidden,
        reasoning=max(_count(out, "reasoning_tokens"), hidden),
        audio=_count(into, "audio_tokens"),
        image=_count(into, "image_tokens"),
    )


def _responses(data: Mapping[str, Any]) -> Usage | None:
    if "input_tokens" not in data and "output_tokens" not in data:
        return None
    into, out = _part(data, "input_tokens_details"), _part(data, "output_tokens_details")
    return _consistent(
        input=_count(data, "input_tokens"),
        cached_read=_count(into, "cached_tokens"),
        cache_write=_count(into, "cache_write_tokens"),
        output=_count(data, "output_tokens"),
        reasoning=_count(out, "reasoning_tokens"),
        audio=_count(into, "audio_tokens"),
        image=_count(into, "image_tokens"),
    )


def _anthropic(data: Mapping[str, Any]) -> Usage | None:
    if "input_tokens" not in data and "output_tokens" not in data:
        return None
    read, write = _count(data, "cache_read_input_tokens"), _count(data, "cache_creation_input_tokens")
    return _consistent(
        input=_count(data, "input_tokens") + read + write,
        cached_read=read,
        cache_write=write,
        cache_write_long=_count(_part(data, "cache_creation"), "ephemeral_1h_input_tokens"),
        output=_count(data, "output_tokens"),
        reasoning=_count(_part(data, "output_tokens_details"), "thinking_tokens", "reasoning_tokens"),
    )


def _gemini(data: Mapping[str, Any]) -> Usage | None:
    if not any(name in data for name in ("promptTokenCount", "candidatesTokenCount", "totalTokenCount")):
        return None
    thoughts = _count(data, "thoughtsTokenCount")
    return _consistent(
        input=_count(data, "promptTokenCount") + _count(data, "toolUsePromptTokenCount"),
        cached_read=_count(data, "cachedContentTokenCount"),
        output=_count(data, "candidatesTokenCount") + thoughts,
        reasoning=thoughts,
        audio=_modality(data, "AUDIO"),
        image=_modality(data, "IMAGE"),
    )


def _modality(data: Mapping[str, Any], modality: str) -> int:
    details = data.get("promptTokensDetails")
    rows = [row for row in details if isinstance(row, Mapping)] if isinstance(details, list) else []
    return sum(_count(row, "tokenCount") for row in rows if row.get("modality") == modality)


def _converse(data: Mapping[str, Any]) -> Usage | None:
    """Read Bedrock's Converse: as with Anthropic, inputTokens does not include cached tokens."""
    if "inputTokens" not in data and "outputTokens" not in data:
        return None
    read, write = _count(data, "cacheReadInputTokens"), _count(data, "cacheWriteInputTokens")
    return _consistent(
        input=_count(data, "inputTokens") + read + write,
        cached_read=read,
        cache_write=write,
        output=_count(data, "outputTokens"),
    )


def _cohere(data: Mapping[str, Any]) -> Usage | None:
    """Read Cohere's usage, which bills `billed_units`; they may be fewer than `tokens`."""
    billed = _part(data, "billed_units") or _part(data, "tokens")
    return _responses(billed) if billed else None


def _raw(data: Mapping[str, Any]) -> Usage | None:
    """Read the usage of an endpoint with an unknown dialect: the first format that fits."""
    excludes_cache = "cache_read_input_tokens" in data or "cache_creation_input_tokens" in data
    readers = (_chat, _gemini, _converse, _cohere, _anthropic if excludes_cache else _responses)
    return next((usage for read in readers if (usage := read(data)) is not None), None)


USAGE_READERS: Mapping[str, Callable[[Mapping[str, Any]], Usage | None]] = {
    "openai-chat": _chat,
    "openai-responses": _responses,
    "openai-embeddings": _chat,
    "anthropic": _anthropic,
    "gemini": _gemini,
    "raw": _raw,
}
# Where a reply or an event of a stream has its usage: (enclosing object, or "" for the top level; field).
USAGE_LOCATIONS: Mapping[str, tuple[tuple[str, str], ...]] = {
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
