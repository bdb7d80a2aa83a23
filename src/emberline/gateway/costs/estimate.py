"""Estimates: about how many tokens a request's input has, where nobody has counted them: before it is sent, and when
its stream broke before its usage came."""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.net.notjson import NOT_JSON

BYTES = 4  # of a token, about
PICTURE = 800  # tokens of an image, a file or a sound, whatever its bytes
LONGEST_WORD = 2000  # characters: what is longer and has no space is data, not text


def estimated_input(body: bytes) -> int:
    """At least 1. JSON's own characters stand for what chat templates add."""
    if len(body) < LONGEST_WORD:
        return max(1, len(body) // BYTES)
    try:
        found = msgspec.json.decode(body)
    except NOT_JSON:
        return max(1, len(body) // BYTES)
    return max(1, len(body) // BYTES - _data(found))


def _data(found: Any) -> int:
    """Tokens too many that were counted for pictures and the like."""
    match found:
        case str() if len(found) >= LONGEST_WORD and " " not in found[:LONGEST_WORD]:
            return max(0, len(found) // BYTES - PICTURE)
        case list():
            return sum(map(_data, found))
        case dict():
            return sum(map(_data, found.values()))
    return 0
