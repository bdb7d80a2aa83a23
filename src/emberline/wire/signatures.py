"""Adds to reasoning signatures the name of the wire format that issued them, and removes it again.

A signature is opaque to clients. If the client's wire format differs from the provider's, the signature gets the
provider's format as a prefix, so that the gateway sends it back only to providers of that format.
"""

from __future__ import annotations

from typing import get_args

from emberline.wire.deltas import ChatDialect

_DIALECTS: tuple[ChatDialect, ...] = get_args(ChatDialect)


def encode_signature(signature: str, origin: ChatDialect, dialect: ChatDialect) -> str:
    """Return the signature for a client of format `dialect`, prefixed with `origin:` if they differ."""
    return signature if not signature or origin == dialect else f"{origin}:{signature}"


def decode_signature(signature: str, dialect: ChatDialect) -> tuple[str, ChatDialect]:
    """Return a received signature without its prefix, and the wire format that issued it."""
    for origin in _DIALECTS:
        if signature.startswith(f"{origin}:"):
            return signature[len(origin) + 1 :], origin
    return signature, dialect
