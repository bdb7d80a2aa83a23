"""Creates the OutputParser for the styles in which a model writes reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emberline.api.call import Tool
from emberline.api.harmony_parser import HarmonyParser
from emberline.api.marker_parser import MarkerParser
from emberline.api.output_parser import OutputParser
from emberline.api.reasoning import ReasoningStyle
from emberline.api.tool_styles.style import ToolStyle


def make_output_parser(
    index: int,
    new_id: Callable[[], str],
    style: ToolStyle | None,
    reasoning: ReasoningStyle | None,
    starts_in_reasoning: bool,
    tools: Sequence[Tool],
) -> OutputParser | None:
    """Return a parser for one choice, or None if its output is plain text. `style` is None without tools."""
    if style is None and reasoning is None:
        return None
    if reasoning is not None and reasoning.uses_channels:
        return HarmonyParser(index, new_id, frozenset(tool.name for tool in tools) if style else frozenset())
    return MarkerParser(index, new_id, style, reasoning, starts_in_reasoning, tools)
