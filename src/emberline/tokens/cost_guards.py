"""CostGuardTransformer: adds calls to a chat template that count and limit the work of rendering it.

jinja2 compiles loops, concatenations, outputs, comparisons and slices to plain Python, which its sandbox cannot
intercept. Each added call (guard) is a jinja2 filter. Its name contains spaces, so that a template's author cannot
write it."""

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


def render_budget_of(context: Context) -> RenderBudget:
    budget = context.parent[BUDGET_KEY]
    assert isinstance(budget, RenderBudget)
    return budget


class CostGuardTransformer(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.For:
        if node.recursive:
            raise SecurityError("recursive loops are not supported in chat templates")
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
        # A comparison ends with the shorter operand, so the left one costs no more. But `in` may hash the left one.
        if any(operand.op in ("in", "notin") for operand in node.ops):
            node.expr = _wrap_in_guard(node.expr, "guard deep")
        for operand in node.ops:
            operand.expr = _wrap_in_guard(operand.expr, "guard deep")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _wrap_in_guard(node, "guard size")
        node.arg = _wrap_in_guard(node.arg, "guard deep")  # may be hashed
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        node.key = _wrap_in_guard(node.key, "guard deep")  # is hashed
        return node

    def _charge_body(self, node: Body) -> Body:
        """Add a guard that spends budget on each pass through the body, in proportion to the body's length."""
        cost = 0 if isinstance(node, nodes.For) else CALL_COST
        cost += NODE_COST * sum(1 for _ in node.find_all(nodes.Node))
        cost += sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(
            0, nodes.Output([_wrap_in_guard(nodes.Const(cost, lineno=node.lineno), "guard body", wraps_constants=True)])
        )
        return node


def _wrap_in_guard(node: nodes.Node, name: str, wraps_constants: bool = False) -> nodes.Expr:
    assert isinstance(node, nodes.Expr)
    if isinstance(node, nodes.Const) and not wraps_constants:
        return node
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context
def _spend_loop_cost(context: Context, value: Any) -> Any:
    if isinstance(value, Iterator):
        value = list(value)  # a view of data whose cost was already spent
    render_budget_of(context).spend(size_of(value) * STEP_COST)
    return value


@pass_context
def _concatenate_within_budget(context: Context, values: list[Any]) -> str:
    render_budget_of(context).spend_nested(values)
    return "".join([str(v) for v in values])


@pass_context
def _spend_nested_size(context: Context, value: Any) -> Any:
    render_budget_of(context).spend_nested(value)
    return value


@pass_context
def _spend_size(context: Context, value: Any) -> Any:
    render_budget_of(context).spend(size_of(value))
    return value


@pass_context
def _spend_body_cost(context: Context, cost: int) -> str:
    render_budget_of(context).spend(cost)
    return ""


GUARDS: dict[str, Callable[..., Any]] = {
    "guard loop": _spend_loop_cost,
    "guard concat": _concatenate_within_budget,
    "guard deep": _spend_nested_size,
    "guard size": _spend_size,
    "guard body": _spend_body_cost,
}
