"""CostGuardTransformer: adds calls that spend the render budget to a template's syntax tree.

jinja2 compiles loops, concatenations, outputs, comparisons and slices to plain Python, so the sandbox cannot intercept
them. The added guards are filters with spaces in their names, which no template can use by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from emberline.tokens.render_budget import STEP_COST, RenderBudget, size_of

BUDGET_KEY = "render budget"  # with a space, so that no template can read it
NODE_COST = 8
CALL_COST = 2048  # of a macro call, which takes about 40 microseconds
Body = TypeVar("Body", nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)


def budget_of(context: Context) -> RenderBudget:
    budget = context.parent[BUDGET_KEY]
    assert isinstance(budget, RenderBudget)
    return budget


class CostGuardTransformer(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.For:
        if node.recursive:
            raise SecurityError("recursive loops are not supported")
        self._charge_body(node)
        node.iter = _wrap_in_guard(node.iter, "guard loop")
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._charge_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        return self._charge_body(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Block:
        return self._charge_body(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [n if isinstance(n, nodes.TemplateData) else _wrap_in_guard(n, "guard deep") for n in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _wrap_in_guard(nodes.List(node.nodes, lineno=node.lineno), "guard concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        # The left operand costs no more: a comparison ends with the shorter one, and `in` searches the right one.
        for operand in node.ops:
            operand.expr = _wrap_in_guard(operand.expr, "guard deep")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _wrap_in_guard(node, "guard size") if isinstance(node.arg, nodes.Slice) else node

    def _charge_body(self, node: Body) -> Body:
        """Make each pass through the body spend a cost in proportion to the body's length."""
        cost = 0 if isinstance(node, nodes.For) else CALL_COST
        cost += NODE_COST * sum(1 for _ in node.find_all(nodes.Node))
        cost += sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(
            0, nodes.Output([_wrap_in_guard(nodes.Const(cost, lineno=node.lineno), "guard body", always=True)])
        )
        return node


def _wrap_in_guard(node: nodes.Node, name: str, always: bool = False) -> nodes.Expr:
    assert isinstance(node, nodes.Expr)
    if isinstance(node, nodes.Const) and not always:
        return node
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context
def _guard_loop(context: Context, value: Any) -> Any:
    if isinstance(value, Iterator):
        value = list(value)  # a view of data whose cost was already spent
    budget_of(context).spend(size_of(value) * STEP_COST)
    return value


@pass_context
def _guard_concat(context: Context, values: list[Any]) -> str:
    budget_of(context).spend_nested(values)
    return "".join([str(v) for v in values])


@pass_context
def _guard_nested(context: Context, value: Any) -> Any:
    budget_of(context).spend_nested(value)
    return value


@pass_context
def _guard_size(context: Context, value: Any) -> Any:
    budget_of(context).spend(size_of(value))
    return value


@pass_context
def _guard_body(context: Context, cost: int) -> str:
    budget_of(context).spend(cost)
    return ""


GUARDS: dict[str, Callable[..., Any]] = {
    "guard loop": _guard_loop,
    "guard concat": _guard_concat,
    "guard deep": _guard_nested,
    "guard size": _guard_size,
    "guard body": _guard_body,
}
