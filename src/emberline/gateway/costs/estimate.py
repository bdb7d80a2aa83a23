"""Estimates of a request's input tokens, for use before the provider has counted them.

They are needed before a request is sent, and for a stream that broke off before its usage arrived.
"""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.net.notjson import NOT_JSON

BYTES = 4  # average
PICTURE = 800  # of an image, a file or audio, whatever its size
LONGEST_WORD = 2000  # a longer string without spaces is encoded data, not text


def estimated_input(body: bytes) -> int:
    """Return an estimate of at least 1. The JSON syntax stands for the tokens that chat templates add."""
    if len(body) < LONGEST_WORD:
        return max(1, len(body) // BYTES)
    try:
        found = msgspec.json.decode(body)
    except NOT_JSON:
        return max(1, len(body) // BYTES)
    return max(1, len(body) // BYTES - _excess_of_data(found))


def _excess_of_data(found: Any) -> int:
    """Return the tokens by which the estimate by bytes is too high for images and other encoded data."""
    match found:
        case str() if len(found) >= LONGEST_WORD and " " not in found[:LONGEST_WORD]:
            return max(0, len(found) // BYTES - PICTURE)
        case list():
            return sum(map(_excess_of_data, found))
        case dict():
            return sum(map(_excess_of_data, found.values()))
    return 0
