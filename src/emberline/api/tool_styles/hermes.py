"""Hermes: one JSON object between <tool_call> tags."""

from __future__ import annotations

from emberline.api.tool_styles.json_arguments import JsonObjectStyle

HERMES = JsonObjectStyle(
    name="hermes",
    families="Hermes, Qwen 2.5, Qwen 3, Qwen3-Next, Granite 4, SmolLM 3",
    begin="<tool_call>",
    markers=("<tool_call>", "</tool_call>"),
    dropped_markers=("</tool_call>",),
    head='\n{"name": "%(name)s", "arguments": ',
    tail="}\n</tool_call>",
    ends=("</tool_call>",),
    separator="\n",
    mistaken_starts="{`",
    template_signs=(("<tool_call>",),),
    model_types=("qwen3_next",),
)
