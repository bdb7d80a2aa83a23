"""The known tool styles, and the choice of one for a model."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.api.tool_styles.cohere import COHERE, COMMAND_R
from emberline.api.tool_styles.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from emberline.api.tool_styles.gemma import GEMMA3
from emberline.api.tool_styles.gemma4 import FUNCTION_GEMMA, GEMMA4
from emberline.api.tool_styles.glm import GLM45, GLM47
from emberline.api.tool_styles.granite import GRANITE
from emberline.api.tool_styles.harmony import HARMONY
from emberline.api.tool_styles.hermes import HERMES
from emberline.api.tool_styles.invoke import DEEPSEEK_V4, DEEPSEEK_V32, MINIMAX
from emberline.api.tool_styles.kimi import KIMI
from emberline.api.tool_styles.llama3 import LLAMA3
from emberline.api.tool_styles.mistral import MISTRAL, MISTRAL_ARGS
from emberline.api.tool_styles.phi4 import FUNCTOOLS, PHI4
from emberline.api.tool_styles.pythonic import LFM2, PYTHONIC
from emberline.api.tool_styles.qwen3_coder import QWEN3_CODER, SEED
from emberline.api.tool_styles.style import ToolStyle
from emberline.core.errors import InvalidRequest

# Ordered: of two styles whose signs a template contains, the first one is used.
_STYLES: tuple[ToolStyle, ...] = (
    MISTRAL_ARGS,
    MISTRAL,
    HARMONY,
    GEMMA4,
    FUNCTION_GEMMA,
    KIMI,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    MINIMAX,
    COHERE,
    COMMAND_R,
    SEED,
    QWEN3_CODER,
    GLM47,
    GLM45,
    PHI4,
    FUNCTOOLS,
    GRANITE,
    LFM2,
    PYTHONIC,
    GEMMA3,
    HERMES,
    LLAMA3,
)
TOOL_STYLES: dict[str, ToolStyle] = {style.name: style for style in _STYLES}


@dataclass(frozen=True, slots=True)
class SelectedToolStyle:
    style: ToolStyle
    is_certain: bool  # false: neither the template nor the model type shows the format of tool calls


def select_tool_style(template: str, name: str = "auto", model_type: str = "") -> SelectedToolStyle:
    """Return the style called `name`. Raises InvalidRequest for an unknown name.

    With "auto", return the style whose markers occur in the chat template, or else the one of the model type, or else
    Hermes.
    """
    if name != "auto":
        if name not in TOOL_STYLES:
            raise InvalidRequest(
                f"unknown tool style {name!r}",
                param="tool_style",
                hint=f"--tool-style takes auto, {', '.join(TOOL_STYLES)}",
            )
        return SelectedToolStyle(TOOL_STYLES[name], True)
    styles = list(TOOL_STYLES.values())
    found = next((style for style in styles if style.is_used_by(template)), None) or next(
        (style for style in styles if model_type and model_type in style.model_types), None
    )
    return SelectedToolStyle(found or HERMES, found is not None)
