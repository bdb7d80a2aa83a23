"""MiniMax M2, DeepSeek V3.2 and V4: XML tags <invoke name="..."> and <parameter name="..."> in one section."""

from __future__ import annotations

from dataclasses import replace

from emberline.api.tool_styles.xml_calls import XmlStyle, XmlSyntax

MINIMAX = XmlStyle(
    name="minimax",
    families="MiniMax M2",
    begin="<minimax:tool_call>",
    other_begin_markers=('<invoke name="',),
    dropped_markers=("</minimax:tool_call>",),
    markers=("<minimax:tool_call>", "</minimax:tool_call>"),
    list_brackets=("\n", "</minimax:tool_call>"),
    syntax=XmlSyntax(
        call_open='<invoke name="',
        name_end='">',
        key_open='<parameter name="',
        key_end='">',
        value_open="",
        value_end="</parameter>",
        call_end="</invoke>",
        after_call="\n",
        line="\n",
        is_call_open_on_new_line=False,
    ),
    template_signs=(("<minimax:tool_call>", '<invoke name="'),),
    model_types=("minimax_m2",),
)
_MARK = "｜DSML｜"
_DSML_SYNTAX = XmlSyntax(
    call_open=f'<{_MARK}invoke name="',
    name_end='">',
    key_open=f'<{_MARK}parameter name="',
    key_end='" string="false">',
    string_key_end='" string="true">',
    value_open="",
    value_end=f"</{_MARK}parameter>",
    call_end=f"</{_MARK}invoke>",
    after_call="\n",
    line="\n",
    is_call_open_on_new_line=False,
)
DEEPSEEK_V32 = XmlStyle(
    name="deepseek-v3.2",
    families="DeepSeek V3.2",
    begin=f"<{_MARK}function_calls>",
    other_begin_markers=(_DSML_SYNTAX.call_open,),
    dropped_markers=(f"</{_MARK}function_calls>",),
    markers=(_MARK,),
    list_brackets=("\n", f"</{_MARK}function_calls>"),
    syntax=_DSML_SYNTAX,
    template_signs=(("｜DSML｜", "function_calls>"),),
    model_types=("deepseek_v32",),
)
DEEPSEEK_V4 = replace(
    DEEPSEEK_V32,
    name="deepseek-v4",
    families="DeepSeek V4",
    begin=f"<{_MARK}tool_calls>",
    dropped_markers=(f"</{_MARK}tool_calls>",),
    list_brackets=("\n", f"</{_MARK}tool_calls>"),
    template_signs=(("｜DSML｜", "tool_calls>"),),
    model_types=("deepseek_v4",),
)
