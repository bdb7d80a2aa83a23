"""Seals of thinking: they are opaque to clients, so one of another family travels with its name before it and finds its
way back; only its own family ever gets it."""

from __future__ import annotations

from typing import get_args

from emberline.gateway.dialects.inner import Spoken

_FAMILIES: tuple[Spoken, ...] = get_args(Spoken)


def shown(seal: str, family: Spoken, dialect: Spoken) -> str:
    """A seal as `dialect` carries it."""
    return seal if not seal or family == dialect else f"{family}:{seal}"


def found(seal: str, dialect: Spoken) -> tuple[str, Spoken]:
    """What came back in `dialect`: the seal, and whose it is."""
    for family in _FAMILIES:
        if seal.startswith(f"{family}:"):
            return seal[len(family) + 1 :], family
    return seal, dialect
