"""Marks reasoning signatures with the format that they belong to.

Signatures are opaque to clients. One that passes through another wire format carries its origin as a prefix, so that it
is returned only to the provider format that issued it.
"""

from __future__ import annotations

from typing import get_args

from emberline.wire.deltas import ChatDialect

_DIALECTS: tuple[ChatDialect, ...] = get_args(ChatDialect)


def encode_signature(signature: str, origin: ChatDialect, dialect: ChatDialect) -> str:
    """Return the signature as sent in wire format `dialect`: with its origin as prefix if that differs."""
    return signature if not signature or origin == dialect else f"{origin}:{signature}"


def decode_signature(signature: str, dialect: ChatDialect) -> tuple[str, ChatDialect]:
    """Return a signature that was received in wire format `dialect` without its prefix, and its origin."""
    for origin in _DIALECTS:
        if signature.startswith(f"{origin}:"):
            return signature[len(origin) + 1 :], origin
    return signature, dialect
