"""Selects the formats in which a model writes tool calls and reasoning, when the server starts."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from emberline.api.reasoning import HARMONY_ANALYSIS, ReasoningStyle, select_reasoning_style
from emberline.api.tool_styles.harmony import HARMONY
from emberline.api.tool_styles.registry import TOOL_STYLES, SelectedToolStyle, select_tool_style
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

    The styles of gpt-oss are used only together. If just one of them is shown, by the template or the model type, a
    style that neither the settings nor the template show gives way to it.
    A template that supports tools in an unknown format is logged as a warning. Raises InvalidRequest for unknown names
    and for two styles that cannot be combined.
    """
    selected = select_tool_style(template, config.tool_style, model_type)
    reasoning = select_reasoning_style(template, config.reasoning_style)
    if not _fit_together(selected.style, reasoning):
        if config.reasoning_style == "auto" and reasoning is None:
            reasoning = HARMONY_ANALYSIS
        elif config.tool_style == "auto":
            selected = _select_tool_style_beside(reasoning, template)
    if not _fit_together(selected.style, reasoning):
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


def _fit_together(style: ToolStyle, reasoning: ReasoningStyle | None) -> bool:
    return style.uses_channels == (reasoning is not None and reasoning.uses_channels)


def _select_tool_style_beside(reasoning: ReasoningStyle | None, template: str) -> SelectedToolStyle:
    """Return the style that the template shows; if it shows none, one that fits to the reasoning style."""
    selected = select_tool_style(template)
    if not selected.is_certain and reasoning is not None and reasoning.uses_channels:
        return SelectedToolStyle(HARMONY, True)
    return selected
