"""Validates the tools and the tool choice of a call, for every protocol."""

from __future__ import annotations

from collections.abc import Sequence

from emberline.api.call import Tool, ToolChoice
from emberline.core.errors import InvalidRequest


def check_tools(tools: Sequence[Tool], choice: ToolChoice) -> None:
    """Raise InvalidRequest if two tools share a name or the choice requires a tool that is missing."""
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise InvalidRequest(f"tools has two entries named {tool.name!r}", param="tools", hint="rename one of them")
        names.add(tool.name)
    if choice.mode in ("required", "named") and not tools:
        raise InvalidRequest(
            f"tool_choice is {choice.mode}, but the request has no tools", param="tool_choice", hint="send tools"
        )
    if choice.mode == "named" and choice.name not in names:
        hint = "use the name of one of the tools"
        raise InvalidRequest(
            f"tool_choice names {choice.name!r}, which is not in tools", param="tool_choice", hint=hint
        )
