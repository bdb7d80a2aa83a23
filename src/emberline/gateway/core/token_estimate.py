"""Estimates the number of input tokens of a request.

The estimate is used before the request is sent, and for a stream that broke off before the provider reported its usage.
"""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.net.json_errors import JSON_DECODE_ERRORS

BYTES_PER_TOKEN = 4  # average
TOKENS_PER_ATTACHMENT = 800  # of an image, a file or audio, whatever its size
MAX_WORD_CHARS = 2000  # a longer string without spaces is encoded data, not text


def estimate_input_tokens(body: bytes) -> int:
    """Return the estimated number of input tokens, at least 1.

    The bytes of JSON syntax count as text, which makes up for the tokens that chat templates add.
    """
    if len(body) < MAX_WORD_CHARS:
        return max(1, len(body) // BYTES_PER_TOKEN)
    try:
        found = msgspec.json.decode(body)
    except JSON_DECODE_ERRORS:
        return max(1, len(body) // BYTES_PER_TOKEN)
    return max(1, len(body) // BYTES_PER_TOKEN - _count_overestimated_tokens(found))


def _count_overestimated_tokens(value: Any) -> int:
    """Return by how many tokens the estimate from bytes is too high.

    It is too high for images and other encoded data.
    """
    match value:
        case str() if len(value) >= MAX_WORD_CHARS and " " not in value[:MAX_WORD_CHARS]:
            return max(0, len(value) // BYTES_PER_TOKEN - TOKENS_PER_ATTACHMENT)
        case list():
            return sum(map(_count_overestimated_tokens, value))
        case dict():
            return sum(map(_count_overestimated_tokens, value.values()))
    return 0
