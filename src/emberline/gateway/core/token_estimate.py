"""Estimates of a request's input tokens, for use before the provider has counted them.

They are needed before a request is sent, and for a stream that broke off before its usage arrived.
"""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.net.json_errors import JSON_DECODE_ERRORS

BYTES_PER_TOKEN = 4  # average
TOKENS_PER_ATTACHMENT = 800  # of an image, a file or audio, whatever its size
MAX_WORD_CHARS = 2000  # a longer string without spaces is encoded data, not text


def estimate_input_tokens(body: bytes) -> int:
    """Return an estimate of at least 1. The JSON syntax stands for the tokens that chat templates add."""
    if len(body) < MAX_WORD_CHARS:
        return max(1, len(body) // BYTES_PER_TOKEN)
    try:
        found = msgspec.json.decode(body)
    except JSON_DECODE_ERRORS:
        return max(1, len(body) // BYTES_PER_TOKEN)
    return max(1, len(body) // BYTES_PER_TOKEN - _excess_of_data(found))


def _excess_of_data(found: Any) -> int:
    """Return the tokens by which the estimate by bytes is too high for images and other encoded data."""
    match found:
        case str() if len(found) >= MAX_WORD_CHARS and " " not in found[:MAX_WORD_CHARS]:
            return max(0, len(found) // BYTES_PER_TOKEN - TOKENS_PER_ATTACHMENT)
        case list():
            return sum(map(_excess_of_data, found))
        case dict():
            return sum(map(_excess_of_data, found.values()))
    return 0
