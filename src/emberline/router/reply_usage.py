"""ReplyUsage: the token counts in a worker's reply, found by searching the relayed bytes, whatever the API protocol."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FIELD_BY_KEY = {
    b"prompt_tokens": "prompt",
    b"input_tokens": "prompt",
    b"completion_tokens": "output",
    b"output_tokens": "output",
    b"cached_tokens": "cached",
    b"cache_read_input_tokens": "read",
}
_FIELD_PATTERN = re.compile(rb'"(%b)":\s*(\d{1,9})' % b"|".join(_FIELD_BY_KEY))


@dataclass(frozen=True, slots=True)
class ReplyUsage:
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None

    @staticmethod
    def parse(*reply_parts: bytes) -> ReplyUsage:
        """Return the token counts found in these parts of a reply; the last one if a count occurs twice."""
        found = {
            _FIELD_BY_KEY[name]: int(number) for part in reply_parts for name, number in _FIELD_PATTERN.findall(part)
        }
        prompt = found.get("prompt")
        if prompt is not None:
            prompt += found.get("read", 0)  # Anthropic's input_tokens excludes tokens read from the cache
        return ReplyUsage(prompt, found.get("output"), found.get("cached", found.get("read")))
