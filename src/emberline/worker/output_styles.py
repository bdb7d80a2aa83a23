"""Selects the formats in which a model writes tool calls and reasoning, when the server starts."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from emberline.api.reasoning import ReasoningStyle, select_reasoning_style
from emberline.api.tool_styles.registry import TOOL_STYLES, select_tool_style
from emberline.api.tool_styles.style import ToolStyle
from emberline.api.tools import template_supports_tools
from emberline.core.config import ServerConfig
from emberline.core.errors import InvalidRequest

log = logging.getLogger("emberline.server")


@dataclass(frozen=True, slots=True)
class OutputStyles:
    tool_style: ToolStyle
    reasoning: ReasoningStyle | None


def select_output_styles(config: ServerConfig, model: str, template: str, model_type: str) -> OutputStyles:
    """Return the styles that the settings name, or else those that the chat template shows.

    A template that supports tools in an unknown format is logged as a warning. Raises InvalidRequest for unknown names
    and for two styles that cannot be combined.
    """
    selected = select_tool_style(template, config.tool_style, model_type)
    reasoning = select_reasoning_style(template, config.reasoning_style)
    if selected.style.uses_channels != (reasoning is not None and reasoning.uses_channels):
        raise InvalidRequest(
            f"the tool style {selected.style.name} cannot be combined with the reasoning style "
            f"{reasoning.name if reasoning else 'none'}",
            param="tool_style",
            hint="set --tool-style harmony and --reasoning-style harmony, or neither",
        )
    if not selected.is_certain and template_supports_tools(template):
        log.warning(
            "Tool call format unknown, using %s: model=%s (hint: set --tool-style to one of %s)",
            selected.style.name,
            model,
            ", ".join(TOOL_STYLES),
        )
    return OutputStyles(selected.style, reasoning)
