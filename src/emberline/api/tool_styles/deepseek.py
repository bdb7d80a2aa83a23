"""DeepSeek V3, R1 and V3.1: a section of calls, each with the tool's name before a separator or after it."""

from __future__ import annotations

import re

from emberline.api.tool_styles.json_arguments import NamedCallStyle

_SECTION_BEGIN, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_MARKERS = (_SECTION_BEGIN, _SECTION_END, _CALL_BEGIN, _SEPARATOR, _CALL_END)
# Both forms are read: V3 writes the word "function" before the separator, and the arguments in a code block.
_HEAD = re.compile(
    rf"(?:{_CALL_BEGIN})?\s*(?:function{_SEPARATOR})?(?P<name>[\w.-]+)\s*(?:{_SEPARATOR})?\s*(?:```(?:json)?)?\s*"
)
_ENDS = ("```" + _CALL_END, _CALL_END)

DEEPSEEK_V3 = NamedCallStyle(
    name="deepseek-v3",
    families="DeepSeek V3, R1",
    begin=_SECTION_BEGIN,
    other_begin_markers=(_CALL_BEGIN,),
    dropped_markers=(_SECTION_END, _CALL_END),
    markers=_MARKERS,
    separator="\n",
    list_brackets=("", _SECTION_END),
    head=f"{_CALL_BEGIN}function{_SEPARATOR}%(name)s\n```json\n",
    tail=f"\n```{_CALL_END}",
    ends=_ENDS,
    head_pattern=_HEAD,
    template_signs=((_CALL_BEGIN, "```json"),),
    model_types=("deepseek_v2", "deepseek_v3"),
)
DEEPSEEK_V31 = NamedCallStyle(
    name="deepseek-v3.1",
    families="DeepSeek V3.1",
    begin=_SECTION_BEGIN,
    other_begin_markers=(_CALL_BEGIN,),
    dropped_markers=(_SECTION_END, _CALL_END),
    markers=_MARKERS,
    list_brackets=("", _SECTION_END),
    head=f"{_CALL_BEGIN}%(name)s{_SEPARATOR}",
    tail=_CALL_END,
    ends=_ENDS,
    head_pattern=_HEAD,
    template_signs=((_CALL_BEGIN,),),
)
