"""RenderBudget: limits the work of rendering a chat template once.

The work is counted in characters and not in seconds, so that the limit is the same on every machine."""

from __future__ import annotations

from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_RENDER_COST = 32_000_000  # about half a second of work
STEP_COST = 64  # fixed cost of an operation, besides its data
MAX_NESTING = 500  # levels of lists, tuples and dicts
# Methods that may compare each character of the text with each of the argument, about 16 in the time of one unit.
QUADRATIC_METHODS = frozenset(("rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip", "trim"))
CHARS_PER_COMPARISON = 16
CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
SIZED: tuple[Any, ...] = (str, dict, range, *CONTAINERS)


class RenderBudgetExceeded(SecurityError):
    pass


class RenderBudget:
    def __init__(self, amount: int = MAX_RENDER_COST) -> None:
        self.remaining = amount

    def spend(self, amount: int) -> None:
        self.remaining -= amount + STEP_COST
        if self.remaining < 0:
            raise RenderBudgetExceeded("rendering the chat template does too much work or produces too much text")

    def spend_nested(self, value: Any, times: int = 1) -> None:
        """Spend the cost of printing, comparing or hashing `value` so many times, including all that is inside it.

        A list that occurs twice inside `value` is counted twice. Raises SecurityError if `value` is nested too deeply,
        because hashing it could overflow the stack."""
        level = [value]
        for _ in range(MAX_NESTING):
            inner: list[Any] = []
            for v in level:
                self.spend(size_of(v) * times)
                if isinstance(v, Namespace):
                    v = _attributes_of(v)
                if isinstance(v, dict):
                    inner += v.keys()
                    inner += v.values()
                elif isinstance(v, CONTAINERS):
                    inner += v
            if not inner:
                return
            level = inner
        raise SecurityError(f"a value in the chat template is nested more than {MAX_NESTING} levels deep")

    def spend_string_operation(self, name: str, text: Any, args: list[Any]) -> None:
        """Spend the cost of the string method or filter `name`, called with `text` and `args`.

        For `replace`, `join` and `indent` the cost includes the result, which may be far longer than the input."""
        self.spend(size_of(text) + sum(size_of(a) for a in args))
        if name == "replace" and len(args) >= 2:
            self.spend(str(text).count(str(args[0])) * size_of(args[1]))
        elif name == "join" and args:
            self.spend_nested(args[0])
            self.spend(size_of(text) * size_of(args[0]))
        elif name in QUADRATIC_METHODS and args:
            self.spend(size_of(text) * size_of(args[0]) // CHARS_PER_COMPARISON)
        elif name == "indent" and args:
            width = args[0] if isinstance(args[0], int) else size_of(args[0])
            self.spend((str(text).count("\n") + 1) * max(width, 0))


def size_of(value: Any) -> int:
    return len(value) if isinstance(value, SIZED) else 1


def _attributes_of(namespace: Namespace) -> dict[str, Any]:
    attributes: dict[str, Any] = namespace._Namespace__attrs  # which printing the namespace writes
    return attributes
