"""GLM: the tool's name and pairs of <arg_key> and <arg_value> between <tool_call> tags."""

from __future__ import annotations

from dataclasses import replace

from emberline.api.tool_styles.xml_calls import XmlStyle, XmlSyntax

_GLM47_SYNTAX = XmlSyntax(
    call_open="",
    name_end="",
    key_open="<arg_key>",
    key_end="</arg_key>",
    value_open="<arg_value>",
    value_end="</arg_value>",
    call_end="</tool_call>",
)
GLM47 = XmlStyle(
    name="glm-4.7",
    families="GLM-4.7",
    begin="<tool_call>",
    dropped_markers=("</tool_call>",),
    markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    syntax=_GLM47_SYNTAX,
    template_signs=(("{function-name}<arg_key>",),),
)
GLM45 = replace(
    GLM47,
    name="glm-4.5",
    families="GLM-4.5, GLM-4.6",
    separator="\n",
    syntax=replace(_GLM47_SYNTAX, line="\n"),
    template_signs=(("<arg_key>",),),
    model_types=("glm4_moe",),
)
