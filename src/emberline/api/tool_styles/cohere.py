"""Cohere: a JSON array of calls between <|START_ACTION|> and <|END_ACTION|>, or in a code block after `Action:`."""

from __future__ import annotations

from emberline.api.tool_styles.json_arguments import JsonObjectStyle

COHERE = JsonObjectStyle(
    name="cohere",
    families="Command R7B, Command A",
    begin="<|START_ACTION|>",
    dropped_markers=("<|END_ACTION|>",),
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
COMMAND_R = JsonObjectStyle(
    name="command-r",
    families="Command R, Command R+",
    begin="Action: ```json",
    other_begin_markers=("Action:```json",),
    markers=(),
    head='    {\n        "tool_name": "%(name)s",\n        "parameters": ',
    tail="\n    }",
    ends=("```",),
    separator=",\n",
    list_brackets=("\n[\n", "\n]```"),
    name_key="tool_name",
    allows_list=True,
    template_signs=(("followed by a json-formatted list of actions",),),
    model_types=("cohere",),
)
