"""Seals of thinking: they are opaque to clients, so one of another family travels with its name before it and finds its
way back; only its own family ever gets it."""

from __future__ import annotations

from typing import get_args

from emberline.gateway.dialects.inner import Spoken

_FAMILIES: tuple[Spoken, ...] = get_args(Spoken)


def shown(signature: str, origin: Spoken, dialect: Spoken) -> str:
    """A seal as `dialect` carries it."""
    return signature if not signature or origin == dialect else f"{origin}:{signature}"


def found(signature: str, dialect: Spoken) -> tuple[str, Spoken]:
    """What came back in `dialect`: the seal, and whose it is."""
    for origin in _FAMILIES:
        if signature.startswith(f"{origin}:"):
            return signature[len(origin) + 1 :], origin
    return signature, dialect
