"""What a template's syntax tree gets added before it is compiled, so that loops, concatenations, outputs, comparisons
and slices, which jinja2 compiles to bare Python, are paid for too. Guards are filters with names no template can spell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from emberline.tokens.fuel import STEP, Fuel, size

FUEL_KEY = "fuel of this rendering"  # with its spaces, not a name either
NODE_COST = 8
CALL_COST = 2048  # a macro call is dear: about 40 microseconds
Body = TypeVar("Body", nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)


def fuel_of(context: Context) -> Fuel:
    fuel = context.parent[FUEL_KEY]
    assert isinstance(fuel, Fuel)
    return fuel


class Guarding(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.For:
        if node.recursive:
            raise SecurityError("recursive loops are not offered")
        self._paid_body(node)
        node.iter = _guard(node.iter, "guard loop")
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._paid_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        return self._paid_body(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Block:
        return self._paid_body(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [n if isinstance(n, nodes.TemplateData) else _guard(n, "guard deep") for n in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _guard(nodes.List(node.nodes, lineno=node.lineno), "guard concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        for (
            operand
        ) in node.ops:  # the other side costs no more: a comparison ends with the shorter, a search is in this one
            operand.expr = _guard(operand.expr, "guard deep")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _guard(node, "guard size") if isinstance(node.arg, nodes.Slice) else node

    def _paid_body(self, node: Body) -> Body:
        """Each pass through a body pays for its length, whatever cheap things it is made of."""
        cost = 0 if isinstance(node, nodes.For) else CALL_COST
        cost += NODE_COST * sum(1 for _ in node.find_all(nodes.Node))
        cost += sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(0, nodes.Output([_guard(nodes.Const(cost, lineno=node.lineno), "guard body", always=True)]))
        return node


def _guard(node: nodes.Node, name: str, always: bool = False) -> nodes.Expr:
    assert isinstance(node, nodes.Expr)
    if isinstance(node, nodes.Const) and not always:
        return node
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context
def _loop(context: Context, value: Any) -> Any:
    if isinstance(value, Iterator):
        value = list(value)  # a view of something already paid for
    fuel_of(context).burn(size(value) * STEP)
    return value


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    fuel_of(context).burn_deep(values)
    return "".join([str(v) for v in values])


@pass_context
def _deep(context: Context, value: Any) -> Any:
    fuel_of(context).burn_deep(value)
    return value


@pass_context
def _size(context: Context, value: Any) -> Any:
    fuel_of(context).burn(size(value))
    return value


@pass_context
def _body(context: Context, cost: int) -> str:
    fuel_of(context).burn(cost)
    return ""


GUARDS: dict[str, Callable[..., Any]] = {
    "guard loop": _loop,
    "guard concat": _concat,
    "guard deep": _deep,
    "guard size": _size,
    "guard body": _body,
}
