"""Whether a call's tools and its choice among them fit, in any protocol."""

from __future__ import annotations

from collections.abc import Sequence

from emberline.api.call import Tool, ToolChoice
from emberline.core.errors import InvalidRequest


def check_tools(tools: Sequence[Tool], choice: ToolChoice) -> None:
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise InvalidRequest(f"two tools are named {tool.name!r}", param="tools")
        names.add(tool.name)
    if choice.mode in ("required", "named") and not tools:
        raise InvalidRequest("tool_choice demands a tool call, and there are no tools", param="tool_choice")
    if choice.mode == "named" and choice.name not in names:
        raise InvalidRequest(f"tool_choice names {choice.name!r}, which is not among the tools", param="tool_choice")
