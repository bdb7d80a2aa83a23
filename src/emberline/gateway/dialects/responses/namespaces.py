"""Translates namespaces of tools, which only Responses has: the model sees functions with joined names."""

from __future__ import annotations

from emberline.gateway.dialects import canonical
from emberline.wire.reply_context import ReplyContext
from emberline.wire.tool_names import join_tool_name, split_tool_name


def flatten_namespaces(request: canonical.CanonicalRequest) -> None:
    """Replace the namespaces in the request's tools by their functions, and join the names of earlier calls."""
    request.tools = [each for tool in request.tools for each in _flatten(tool)]
    for message in request.messages:
        for part in message.parts:
            if isinstance(part, canonical.ToolCallContent) and isinstance(part.extra.get("namespace"), str):
                part.name = join_tool_name(part.extra.pop("namespace"), part.name)


def render_tool_name(name: str, context: ReplyContext) -> canonical.Json:
    """Return the fields of a function call that name its tool."""
    namespace, plain = split_tool_name(name, context.echoed_fields.get("tools", ()))
    return {"name": plain} if namespace is None else {"namespace": namespace, "name": plain}


def _flatten(
    tool: canonical.CanonicalTool | canonical.OpaqueContent,
) -> list[canonical.CanonicalTool | canonical.OpaqueContent]:
    match tool:
        case canonical.OpaqueContent(kind="namespace", raw={"name": str(namespace), "tools": list(inner)}):
            return [_parse_inner(each, namespace) for each in inner]
    return [tool]


def _parse_inner(raw: object, namespace: str) -> canonical.CanonicalTool | canonical.OpaqueContent:
    match raw:
        case {"type": "function", "name": str(name), **fields}:
            description, schema, strict = (fields.get(key) for key in ("description", "parameters", "strict"))
            return canonical.CanonicalTool(
                join_tool_name(namespace, name),
                description if isinstance(description, str) else None,
                schema if isinstance(schema, dict) else None,
                strict if isinstance(strict, bool) else None,
            )
        case {"type": str(kind)}:
            return canonical.OpaqueContent(kind, {})
    return canonical.OpaqueContent("namespace.tools", {})
