"""Names of tools that are in a namespace (a field of the Responses API), for models, which know only plain names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def join_tool_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a tool. Several namespaces may have tools of the same name."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def split_tool_name(joined: str, tools: Iterable[Any]) -> tuple[str | None, str]:
    """Return the namespace and the name of the tool that the model called `joined`, among a request's `tools`."""
    for tool in tools:
        match tool:
            case {"type": "namespace", "name": str(namespace), "tools": list(inner)}:
                for each in inner:
                    name = each.get("name") if isinstance(each, dict) else None
                    if isinstance(name, str) and join_tool_name(namespace, name) == joined:
                        return namespace, name
    return None, joined
