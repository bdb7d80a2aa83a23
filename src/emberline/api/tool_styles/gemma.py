"""Gemma 3: its own template has no tools, so calls are Python in a code block, as Google's guide for it proposes."""

from __future__ import annotations

from emberline.api.tool_styles.pythonic import PythonicStyle

GEMMA3 = PythonicStyle(
    name="gemma3",
    families="Gemma 2 and 3",
    begin="```tool_code",
    markers=(),
    separator="\n",
    list_brackets=("\n", "\n```"),
    end="```",
    model_types=("gemma2", "gemma3", "gemma3_text"),
)
