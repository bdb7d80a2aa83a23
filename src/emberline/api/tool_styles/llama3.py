"""Llama 3: a JSON object, at the start of the output or after <|python_tag|>."""

from __future__ import annotations

from emberline.api.tool_styles.json_arguments import JsonObjectStyle

LLAMA3 = JsonObjectStyle(
    name="llama3",
    families="Llama 3.x, Llama 4 with its own template",
    begin="<|python_tag|>",
    other_begin_markers=("<|python_start|>",),
    dropped_markers=("<|python_end|>",),
    markers=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    head='{"name": "%(name)s", "parameters": ',
    tail="}",
    separator="; ",
    list_brackets=("", ""),
    markerless_starts="{",
    gap_chars=";",
    template_signs=(("<|python_tag|>",), ("<|start_header_id|>",), ("<|header_start|>",)),
    model_types=("llama4", "llama4_text"),
)
