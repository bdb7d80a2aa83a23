"""Qwen3-Coder and Seed-OSS: XML-like tags <function=NAME> and <parameter=NAME> between <tool_call> tags."""

from __future__ import annotations

from dataclasses import replace

from emberline.api.tool_styles.xml_calls import XmlStyle, XmlSyntax

QWEN3_CODER = XmlStyle(
    name="qwen3-coder",
    families="Qwen3-Coder, Qwen 3.5, Nemotron 3, Granite 4.2",
    begin="<tool_call>",
    other_begin_markers=("<function=",),
    dropped_markers=("</tool_call>",),
    markers=("<tool_call>", "</tool_call>"),
    separator="\n",
    syntax=XmlSyntax(
        call_open="<function=",
        name_end=">",
        key_open="<parameter=",
        key_end=">",
        value_open="",
        value_end="</parameter>",
        call_end="</function>",
        section_end="</tool_call>",
        line="\n",
        trims_lines=True,
    ),
    template_signs=(("<function=", "<parameter="),),
    model_types=("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
)
SEED = replace(
    QWEN3_CODER,
    name="seed",
    families="Seed-OSS",
    begin="<seed:tool_call>",
    dropped_markers=("</seed:tool_call>",),
    markers=("<seed:tool_call>", "</seed:tool_call>"),
    syntax=replace(QWEN3_CODER.syntax, section_end="</seed:tool_call>", trims_lines=False),
    template_signs=(("<seed:tool_call>",),),
    model_types=("seed_oss",),
)
