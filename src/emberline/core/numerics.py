"""Numerics: the settings that determine the numbers a model computes.

Only workers with equal Numerics continue each other's streams. KV blocks are also exchanged between workers that differ
in their ranks, though sums of different numbers of ranks differ in their last bits."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class Numerics:
    checkpoint: str  # fingerprint of config and tensors
    dtype: str  # of matrix products
    weights: str  # form, such as plain, packed or fp8, whose kernels round differently; with -exact if `exact` is set
    kv_dtype: str
    device: str  # cpu, cuda, or cuda-portable
    ranks: str = ""  # such as tp2, if ranks add their parts, which rounds differently: Layout.numerics_name

    def differences(self, other: Numerics) -> str:
        """Return the fields that differ, as in "dtype (bfloat16, float32)"; "" if all are equal."""
        pairs = ((field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return ", ".join(f"{name} ({ours}, {theirs})" for name, ours, theirs in pairs if ours != theirs)


def can_exchange_blocks(ours: Numerics | None, theirs: Numerics | None) -> bool:
    """Whether two workers use each other's KV blocks: whether their numerics agree in everything but the ranks."""
    if ours is None or theirs is None:
        return ours is theirs
    return replace(ours, ranks="") == replace(theirs, ranks="")


def describe_difference(ours: Numerics | None, theirs: Numerics | None) -> str:
    """Return how two workers' numerics differ, in the form of `Numerics.differences`; "" if they agree.

    None means that a worker reports no numerics, as earlier releases did. Two such workers count as equal."""
    if ours is None or theirs is None:
        return "" if ours is theirs else "release (one reports no numerics)"
    return ours.differences(theirs)
