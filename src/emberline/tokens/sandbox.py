"""TemplateSandbox: a jinja2 environment in which a malicious template cannot harm the server.

jinja2's own sandbox blocks access to Python's internals but allows endless loops and output. Here each rendering has a
`RenderBudget`, and every loop pass, call, filter, operator and output first spends an amount of that budget that grows
with the size of the data. Format widths, powers and recursive loops are rejected, because their cost is not known in
advance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace, pass_context

from emberline.tokens.cost_guards import GUARDS, CostGuardTransformer, render_budget_of
from emberline.tokens.render_budget import size_of

MAX_INT_BITS = 256
SORTING_FILTERS = ("sort", "dictsort")
_STR_METHODS = """
    capitalize casefold count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric isspace isupper
    join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split
    splitlines startswith strip swapcase title upper
"""
_SHALLOW_FILTERS = """
    abs count d default first float int items last length list map reject rejectattr reverse select selectattr
"""
# These print, compare or hash what is inside their value.
_NESTED_FILTERS = "capitalize dictsort indent join lower max min replace sort string title trim unique upper"
_NESTED_TESTS = "== eq equalto != ne > gt greaterthan >= ge < lt lessthan <= le in filter test lower upper"
ALLOWED_ATTRIBUTES: dict[type, frozenset[str]] = {
    str: frozenset(_STR_METHODS.split()),
    dict: frozenset(("items", "keys", "values", "get")),
    list: frozenset(("index", "count")),
    tuple: frozenset(("index", "count")),
}


class TemplateSandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "-", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag])
        self.globals = {name: self.globals[name] for name in ("range", "namespace", "dict")}
        self.filters = {
            **{
                name: _spend_before_call(name, FILTERS[name], includes_nested=False)
                for name in _SHALLOW_FILTERS.split()
            },
            **{name: _spend_before_call(name, FILTERS[name], includes_nested=True) for name in _NESTED_FILTERS.split()},
            "tojson": _tojson,
            "safe": lambda value: value,  # nothing is ever escaped
            **GUARDS,
        }
        self.tests = {
            name: _spend_before_call(name, test, includes_nested=name in _NESTED_TESTS.split())
            for name, test in TESTS.items()
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        CostGuardTransformer().visit(tree)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, allowed in ALLOWED_ATTRIBUTES.items():
            if isinstance(obj, kind):
                return attr in allowed
        return isinstance(obj, (LoopContext, Namespace, Macro)) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Return None, so that jinja2 does not wrap str.format in a safe version: templates may not call it."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner, arguments = getattr(__obj, "__self__", None), [*args, *kwargs.values()]
        name = __obj.__name__ if isinstance(owner, str) else ""
        budget = render_budget_of(__context)
        if not isinstance(__obj, Macro):  # others may print, compare or hash their arguments
            budget.spend_nested([owner if isinstance(owner, (list, tuple)) else None, *arguments])
        budget.spend_string_operation(name, owner, arguments)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise SecurityError(f"the operator {operator} is not supported in chat templates")
        if operator == "-" and not (isinstance(left, (int, float)) and isinstance(right, (int, float))):
            raise TypeError("the operator - needs two numbers")
        times = 1
        if operator == "*":
            times = max([1, *(n for n in (left, right) if isinstance(n, int))])
        render_budget_of(context).spend(
            (size_of(left) + size_of(right)) * times if _is_either_a_sequence(left, right) else 0
        )
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > MAX_INT_BITS:
            raise SecurityError(f"a number in the chat template has more than {MAX_INT_BITS} bits")
        return result


def _is_either_a_sequence(left: Any, right: Any) -> bool:
    return isinstance(left, (str, list, tuple)) or isinstance(right, (str, list, tuple))


def _spend_before_call(name: str, function: Any, includes_nested: bool) -> Callable[..., Any]:
    leading = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @pass_context
    def spend_and_call(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget, arguments = render_budget_of(context), [*args, *kwargs.values()]
        if includes_nested:
            budget.spend_nested([value, *arguments], size_of(value).bit_length() if name in SORTING_FILTERS else 1)
        elif name not in ("d", "default"):
            budget.spend_nested(arguments)  # attribute names may be hashed
        if name == "join":  # the filter takes the list first, the separator second
            budget.spend_string_operation(name, arguments[0] if arguments else "", [value])
        else:
            budget.spend_string_operation(name, value, arguments)
        passed = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        first = (passed[leading], value) if leading else (value,)
        result = function(*first, *args, **kwargs)
        return list(result) if isinstance(result, Iterator) else result

    return spend_and_call


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    render_budget_of(context).spend_nested(value)
    if separators is not None and any(size_of(separator) > 16 for separator in separators):
        raise SecurityError("the chat template calls tojson with separators of more than 16 characters")
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
        raise SecurityError(f"the chat template calls tojson with indent {indent!r}; it must be 0 to 16")
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    render_budget_of(context).spend(len(text))
    return text


class GenerationTag(Extension):
    """The template tag {% generation %}, which marks the assistant's text for training.

    Its content is rendered; the tag itself is ignored."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
