"""RenderBudget: limits the work of rendering one template.

The cost is counted in characters processed and not measured as time, so the limit is the same on every machine."""

from __future__ import annotations

from typing import Any

from jinja2.exceptions import SecurityError

FUEL = 32_000_000  # about half a second of work
STEP = 64  # fixed cost of an operation, besides its data


class OutOfFuel(SecurityError):
    pass


class Fuel:
    def __init__(self, amount: int = FUEL) -> None:
        self.left = amount

    def burn(self, amount: int) -> None:
        self.left -= amount + STEP
        if self.left < 0:
            raise OutOfFuel("rendering does too much work or produces too much text")

    def burn_deep(self, value: Any) -> None:
        """Spend the cost of printing or comparing `value`.

        A list that occurs twice inside another is counted twice."""
        stack = [value]
        while stack:
            v = stack.pop()
            self.burn(size(v))
            if isinstance(v, dict):
                stack += v.keys()
                stack += v.values()
            elif isinstance(v, (list, tuple)):
                stack += v

    def burn_text(self, name: str, text: Any, args: list[Any]) -> None:
        """Spend the cost of a string method or filter.

        `replace`, `join` and `indent` may produce far more than they read."""
        self.burn(size(text) + sum(size(a) for a in args))
        if name == "replace" and len(args) >= 2:
            self.burn(str(text).count(str(args[0])) * size(args[1]))
        elif name == "join" and args:
            self.burn_deep(args[0])
            self.burn(size(text) * size(args[0]))
        elif name == "indent" and args:
            width = args[0] if isinstance(args[0], int) else size(args[0])
            self.burn((str(text).count("\n") + 1) * max(width, 0))


def size(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict, range)) else 1
