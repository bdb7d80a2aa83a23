"""weight_of: about how long a value takes to be unpickled, by the number of its parts. A function that runs in another
process (`core/offload.py`) refuses what would hold the interpreter's lock for long when it comes back."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from emberline.core.errors import WorkTooLarge

CONTAINER = 4  # a list, an object or a struct takes about as long as so many numbers or texts
MAX_WEIGHT = 1_000_000  # is unpickled in about 50 ms


def check_weight(value: Any, most: int = MAX_WEIGHT, what: str = "the request") -> None:
    """Raises WorkTooLarge for a value of more than `most`."""
    if weight_of(value, most) > most:
        raise WorkTooLarge(f"{what} has too many values: more than {most} are not taken", hint="send less at once")


def weight_of(value: Any, most: int) -> int:
    """A value of more than `most` is not counted to its end."""
    found, left = 0, [value]
    while left and found <= most:
        each = left.pop()
        if (parts := _parts(each)) is None:
            found += 1
        else:
            found += CONTAINER
            left += parts
    return found + len(left)


def _parts(value: Any) -> list[Any] | None:
    """None: it has none."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, name) for name in value.__dataclass_fields__]
    if (names := getattr(value, "__struct_fields__", None)) is not None and not isinstance(value, type):
        return [getattr(value, name) for name in names]
    return None
