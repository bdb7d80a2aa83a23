"""Estimates how long a value takes to unpickle, by counting the values inside it.

Functions that run in a child process (`core/offload.py`) reject a result that would take too long: the server
unpickles it while holding the interpreter's lock."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from emberline.core.errors import WorkTooLarge

CONTAINER_COST = 4  # cost of a list, dict or object, in numbers or strings
MAX_PICKLE_COST = 1_000_000  # unpickled in about 50 ms


def check_pickle_cost(value: Any, max_cost: int = MAX_PICKLE_COST, description: str = "the request") -> None:
    """Raise WorkTooLarge if the estimated cost of unpickling the value is above `max_cost`."""
    if estimate_pickle_cost(value, max_cost) > max_cost:
        raise WorkTooLarge(
            f"{description} contains more than {max_cost} values, which is the limit", hint="send a smaller request"
        )


def estimate_pickle_cost(value: Any, max_cost: int) -> int:
    """Return the estimated cost of unpickling the value. The unit is the cost of one number or string.

    Counting stops once the cost is above `max_cost`."""
    cost, left = 0, [value]
    while left and cost <= max_cost:
        each = left.pop()
        if (parts := _contained_values(each)) is None:
            cost += 1
        else:
            cost += CONTAINER_COST
            left += parts
    return cost + len(left)


def _contained_values(value: Any) -> list[Any] | None:
    """Return the values inside a container or object; None for a plain value."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, name) for name in value.__dataclass_fields__]
    if (names := getattr(value, "__struct_fields__", None)) is not None and not isinstance(value, type):
        return [getattr(value, name) for name in names]
    return None
