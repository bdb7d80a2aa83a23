"""Usage: the tokens that a request used, in the same form for every provider.

Providers differ in what their counts include. Here `input` includes `cached_read`, `cache_write`, `audio` and `image`;
`cache_write` includes `cache_write_long` (cached for an hour); `output` includes `reasoning`. `Usage.parse` ensures
this for the counts of every provider. If a provider reports a part that is larger than its whole, such as more
`cached_read` than `input`, the part is reduced to the whole, so that no token is billed twice.

A stream may report its usage several times, each time for the whole stream up to that event. `merge_later` therefore
takes the larger of two counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

MAX_TOKENS = 1 << 53  # a larger count is invalid and ignored


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request."""

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
        """Return the usage in a decoded usage object of this dialect, or None if it has no token counts."""
        return USAGE_READERS[dialect](data) if isinstance(data, dict | Mapping) else None  # `dict |`: a faster check

    @staticmethod
    def find_in(dialect: str, event: object) -> Usage | None:
        """Return the usage in a decoded reply, or in one decoded event of a stream.

        Return None if there is no usage.
        """
        if not isinstance(event, Mapping):
            return None
        for outer, name in USAGE_LOCATIONS[dialect]:
            parent = event.get(outer) if outer else event
            if isinstance(parent, Mapping) and (usage := Usage.parse(dialect, parent.get(name))):
                return usage
        return None

    def plus(self, other: Usage) -> Usage:
        """Return the sum of this usage and the usage of another provider call."""
        return Usage(*(getattr(self, name) + getattr(other, name) for name in Usage.__struct_fields__))

    def merge_later(self, later: Usage) -> Usage:
        """Return this usage updated with the usage in a later event of the same stream."""
        return _make_consistent_usage(
            input=max(self.input, later.input),
            cached_read=max(self.cached_read, later.cached_read),
            cache_write=max(self.cache_write, later.cache_write),
            output=max(self.output, later.output),
            reasoning=max(self.reasoning, later.reasoning),
            audio=max(self.audio, later.audio),
            image=max(self.image, later.image),
            cache_write_long=max(self.cache_write_long, later.cache_write_long),
        )


class EngineUsage(Usage, frozen=True):
    """Token counts of a reply of Emberline's engine, which also counts the tokens of speculative decoding."""

    accepted_drafts: int = 0  # drafted tokens that are part of the output
    rejected_drafts: int = 0  # drafted tokens that are not


def _make_consistent_usage(
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
    """Return the usage, with each count limited to the count that includes it: for example `cached_read` to `input`."""
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


def _read_count(data: Mapping[str, Any], *names: str) -> int:
    """Return the first field in `names` that is a valid count, else 0. A float such as 12.0 is valid."""
    for name in names:
        value = data.get(name)
        if type(value) is int and 0 <= value <= MAX_TOKENS:  # type(): True is not a count
            return value
        if type(value) is float and 0 <= value <= MAX_TOKENS and value.is_integer():
            return int(value)
    return 0


def _read_object(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = data.get(name)
    return part if isinstance(part, dict) else {}


def _read_chat_usage(data: Mapping[str, Any]) -> Usage | None:
    if "prompt_tokens" not in data and "completion_tokens" not in data:
        return None
    input, output = _read_count(data, "prompt_tokens"), _read_count(data, "completion_tokens")
    into, out = _read_object(data, "prompt_tokens_details"), _read_object(data, "completion_tokens_details")
    # xAI and Gemini's OpenAI endpoint count reasoning tokens, which they bill, in total_tokens only.
    hidden = max(0, _read_count(data, "total_tokens") - input - output)
    cached = _read_count(data, "prompt_cache_hit_tokens", "cached_tokens")
    if not (into or out or hidden):
        return _make_consistent_usage(input=input, cached_read=cached, output=output)
    return _make_consistent_usage(
        input=input,
        cached_read=_read_count(into, "cached_tokens") or cached,
        cache_write=_read_count(into, "cache_write_tokens", "cache_creation_tokens"),
        output=output + hidden,
        reasoning=max(_read_count(out, "reasoning_tokens"), hidden),
        audio=_read_count(into, "audio_tokens"),
        image=_read_count(into, "image_tokens"),
    )


def _read_responses_usage(data: Mapping[str, Any]) -> Usage | None:
    if "input_tokens" not in data and "output_tokens" not in data:
        return None
    into, out = _read_object(data, "input_tokens_details"), _read_object(data, "output_tokens_details")
    return _make_consistent_usage(
        input=_read_count(data, "input_tokens"),
        cached_read=_read_count(into, "cached_tokens"),
        cache_write=_read_count(into, "cache_write_tokens"),
        output=_read_count(data, "output_tokens"),
        reasoning=_read_count(out, "reasoning_tokens"),
        audio=_read_count(into, "audio_tokens"),
        image=_read_count(into, "image_tokens"),
    )


def _read_anthropic_usage(data: Mapping[str, Any]) -> Usage | None:
    if "input_tokens" not in data and "output_tokens" not in data:
        return None
    read, write = _read_count(data, "cache_read_input_tokens"), _read_count(data, "cache_creation_input_tokens")
    return _make_consistent_usage(
        input=_read_count(data, "input_tokens") + read + write,
        cached_read=read,
        cache_write=write,
        cache_write_long=_read_count(_read_object(data, "cache_creation"), "ephemeral_1h_input_tokens"),
        output=_read_count(data, "output_tokens"),
        reasoning=_read_count(_read_object(data, "output_tokens_details"), "thinking_tokens", "reasoning_tokens"),
    )


def _read_gemini_usage(data: Mapping[str, Any]) -> Usage | None:
    if not any(name in data for name in ("promptTokenCount", "candidatesTokenCount", "totalTokenCount")):
        return None
    thoughts = _read_count(data, "thoughtsTokenCount")
    return _make_consistent_usage(
        input=_read_count(data, "promptTokenCount") + _read_count(data, "toolUsePromptTokenCount"),
        cached_read=_read_count(data, "cachedContentTokenCount"),
        output=_read_count(data, "candidatesTokenCount") + thoughts,
        reasoning=thoughts,
        audio=_count_modality_tokens(data, "AUDIO"),
        image=_count_modality_tokens(data, "IMAGE"),
    )


def _count_modality_tokens(data: Mapping[str, Any], modality: str) -> int:
    details = data.get("promptTokensDetails")
    rows = [row for row in details if isinstance(row, Mapping)] if isinstance(details, list) else []
    return sum(_read_count(row, "tokenCount") for row in rows if row.get("modality") == modality)


def _read_converse_usage(data: Mapping[str, Any]) -> Usage | None:
    """Read the usage of Bedrock's Converse API, whose inputTokens do not include cached tokens."""
    if "inputTokens" not in data and "outputTokens" not in data:
        return None
    read, write = _read_count(data, "cacheReadInputTokens"), _read_count(data, "cacheWriteInputTokens")
    return _make_consistent_usage(
        input=_read_count(data, "inputTokens") + read + write,
        cached_read=read,
        cache_write=write,
        output=_read_count(data, "outputTokens"),
    )


def _read_cohere_usage(data: Mapping[str, Any]) -> Usage | None:
    """Read Cohere's usage from `billed_units`, the tokens that Cohere charges for, or else from `tokens`."""
    billed = _read_object(data, "billed_units") or _read_object(data, "tokens")
    return _read_responses_usage(billed) if billed else None


def _read_unknown_usage(data: Mapping[str, Any]) -> Usage | None:
    """Read the usage of an endpoint with an unknown dialect, in the first format that matches."""
    excludes_cache = "cache_read_input_tokens" in data or "cache_creation_input_tokens" in data
    readers = (
        _read_chat_usage,
        _read_gemini_usage,
        _read_converse_usage,
        _read_cohere_usage,
        _read_anthropic_usage if excludes_cache else _read_responses_usage,
    )
    return next((usage for read in readers if (usage := read(data)) is not None), None)


USAGE_READERS: Mapping[str, Callable[[Mapping[str, Any]], Usage | None]] = {
    "openai-chat": _read_chat_usage,
    "openai-responses": _read_responses_usage,
    "openai-embeddings": _read_chat_usage,
    "anthropic": _read_anthropic_usage,
    "gemini": _read_gemini_usage,
    "raw": _read_unknown_usage,
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
