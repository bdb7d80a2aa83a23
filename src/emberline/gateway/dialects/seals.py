"""Marks reasoning signatures with the format that they belong to.

Signatures are opaque to clients. One that passes through another wire format carries its origin as a prefix, so that it
is returned only to the provider format that issued it.
"""

from __future__ import annotations

from typing import get_args

from emberline.gateway.dialects.inner import Spoken

_FAMILIES: tuple[Spoken, ...] = get_args(Spoken)


def shown(signature: str, origin: Spoken, dialect: Spoken) -> str:
    """Return the signature as sent in wire format `dialect`: with its origin as prefix if that differs."""
    return signature if not signature or origin == dialect else f"{origin}:{signature}"


def found(signature: str, dialect: Spoken) -> tuple[str, Spoken]:
    """Return a signature that was received in wire format `dialect` without its prefix, and its origin."""
    for origin in _FAMILIES:
        if signature.startswith(f"{origin}:"):
            return signature[len(origin) + 1 :], origin
    return signature, dialect
