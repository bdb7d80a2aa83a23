"""RenderBudget: limits the work of rendering a chat template once.

The work is counted in characters and not in seconds, so that the limit is the same on every machine."""

from __future__ import annotations

from typing import Any

from jinja2.exceptions import SecurityError

MAX_RENDER_COST = 32_000_000  # about half a second of work
STEP_COST = 64  # fixed cost of an operation, besides its data


class RenderBudgetExceeded(SecurityError):
    pass


class RenderBudget:
    def __init__(self, amount: int = MAX_RENDER_COST) -> None:
        self.remaining = amount

    def spend(self, amount: int) -> None:
        self.remaining -= amount + STEP_COST
        if self.remaining < 0:
            raise RenderBudgetExceeded("rendering the chat template does too much work or produces too much text")

    def spend_nested(self, value: Any) -> None:
        """Spend the cost of printing or comparing `value`, including all lists and dicts inside it.

        A list that occurs twice inside `value` is counted twice."""
        stack = [value]
        while stack:
            v = stack.pop()
            self.spend(size_of(v))
            if isinstance(v, dict):
                stack += v.keys()
                stack += v.values()
            elif isinstance(v, (list, tuple)):
                stack += v

    def spend_string_operation(self, name: str, text: Any, args: list[Any]) -> None:
        """Spend the cost of the string method or filter `name`, called with `text` and `args`.

        For `replace`, `join` and `indent` the cost includes the result, which may be far longer than the input."""
        self.spend(size_of(text) + sum(size_of(a) for a in args))
        if name == "replace" and len(args) >= 2:
            self.spend(str(text).count(str(args[0])) * size_of(args[1]))
        elif name == "join" and args:
            self.spend_nested(args[0])
            self.spend(size_of(text) * size_of(args[0]))
        elif name == "indent" and args:
            width = args[0] if isinstance(args[0], int) else size_of(args[0])
            self.spend((str(text).count("\n") + 1) * max(width, 0))


def size_of(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict, range)) else 1
