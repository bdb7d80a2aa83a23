"""Numerics: what decides the numbers that a model computes. Tokens of one worker can be continued by another, and its
keys and values used there, only where these agree."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Numerics:
    checkpoint: str  # fingerprint of its config and tensors
    dtype: str  # that matrices are multiplied in
    weights: str  # plain, packed or both: other kernels, which round elsewhere
    kv_dtype: str
    device: str  # cpu or cuda

    def differences(self, other: Numerics) -> str:
        """What differs, as in "dtype (bfloat16, float32)"; "" if nothing does."""
        pairs = ((field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return ", ".join(f"{name} ({ours}, {theirs})" for name, ours, theirs in pairs if ours != theirs)


def describe_difference(ours: Numerics | None, theirs: Numerics | None) -> str:
    """As `differences`; workers of earlier releases report no numerics, and agree only with each other."""
    if ours is None or theirs is None:
        return "" if ours is theirs else "release (one reports no numerics)"
    return ours.differences(theirs)
