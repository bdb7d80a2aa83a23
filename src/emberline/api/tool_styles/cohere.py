"""Cohere: a JSON array of calls between <|START_ACTION|> and <|END_ACTION|>."""

from __future__ import annotations

from emberline.api.tool_styles.json_arguments import JsonObjectStyle

COHERE = JsonObjectStyle(
    name="cohere",
    families="Command R7B, Command A",
    begin="<|START_ACTION|>",
    markers=("<|START_ACTION|>", "<|END_ACTION|>"),
    head='    {"tool_call_id": "%(number)d", "tool_name": "%(name)s", "parameters": ',
    tail="}",
    ends=("<|END_ACTION|>",),
    separator=",\n",
    list_brackets=("[\n", "\n]<|END_ACTION|>"),
    name_key="tool_name",
    allows_list=True,
    ends_reasoning=True,
    template_signs=(("<|START_ACTION|>",),),
    model_types=("cohere2",),
)
