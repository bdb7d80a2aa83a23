"""ReplyUsage: the token counts of a finished reply, found in the relayed bytes of any API protocol."""

from __future__ import annotations

import re
from dataclasses import dataclass

_MEANS = {
    b"prompt_tokens": "prompt",
    b"input_tokens": "prompt",
    b"completion_tokens": "output",
    b"output_tokens": "output",
    b"cached_tokens": "cached",
    b"cache_read_input_tokens": "read",
}
_FIELD = re.compile(rb'"(%b)":\s*(\d{1,9})' % b"|".join(_MEANS))


@dataclass(frozen=True, slots=True)
class Usage:
    prompt: int | None = None
    output: int | None = None
    cached: int | None = None

    @staticmethod
    def read(*pieces: bytes) -> Usage:
        """Return the usage in the first and the last piece of a reply; later values override earlier ones."""
        found = {_MEANS[name]: int(number) for piece in pieces for name, number in _FIELD.findall(piece)}
        prompt = found.get("prompt")
        if prompt is not None:
            prompt += found.get("read", 0)  # Anthropic's input_tokens excludes tokens read from the cache
        return Usage(prompt, found.get("output"), found.get("cached", found.get("read")))
