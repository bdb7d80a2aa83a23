"""Granite 3: a JSON array of calls after <|tool_call|>."""

from __future__ import annotations

from emberline.api.tool_styles.json_arguments import JsonObjectStyle

GRANITE = JsonObjectStyle(
    name="granite",
    families="Granite 3.x",
    begin="<|tool_call|>",
    other_begin_markers=("<tool_call>",),
    dropped_markers=("</tool_call>",),
    markers=("<|tool_call|>", "<tool_call>", "</tool_call>"),
    head='{"name": "%(name)s", "arguments": ',
    tail="}",
    ends=("</tool_call>",),
    separator=", ",
    list_brackets=("[", "]"),
    allows_list=True,
    template_signs=(("<|tool_call|>",),),
    model_types=("granite", "granitemoe", "granitemoeshared"),
)
