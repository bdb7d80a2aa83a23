"""How a family of models writes a tool call: the markers and JSON around its name and arguments."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ToolStyle:
    name: str
    begin: str  # the marker that opens a call in running text
    end: str  # the one that closes it; empty: the JSON ends by itself
    markers: tuple[str, ...]  # what the detokenizer must not drop, should it be a special token
    head: str  # what stands before a call's arguments, after `begin`; %s is the name
    tail: str  # and after them, `end` included
    joint: str  # between calls
    listed: tuple[str, str] | None = None  # around several calls that share one `begin`
    bare: bool = False  # a reply that starts with { may be a call without `begin`
    named: bool = False  # `begin` may be followed by a plain name, or by a list of calls


_MISTRAL = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

HERMES = ToolStyle(
    name="hermes",  # and Qwen 2.5, Qwen 3
    begin="<tool_call>",
    end="</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
    head='\n{"name": "%s", "arguments": ',
    tail="}\n</tool_call>",
    joint="\n",
)
LLAMA3 = ToolStyle(
    name="llama3",
    begin="<|python_tag|>",
    end="",
    markers=("<|python_tag|>",),
    head='{"name": "%s", "parameters": ',
    tail="}",
    joint="; ",
    listed=("", ""),
    bare=True,
)
MISTRAL = ToolStyle(
    name="mistral",  # up to the v7 tokenizers
    begin="[TOOL_CALLS]",
    end="",
    markers=_MISTRAL,
    head='{"name": "%s", "arguments": ',
    tail="}",
    joint=", ",
    listed=("[", "]"),
    named=True,
)
MISTRAL_ARGS = ToolStyle(
    name="mistral-args",  # from v11 on
    begin="[TOOL_CALLS]",
    end="",
    markers=_MISTRAL,
    head="%s[ARGS]",
    tail="",
    joint="",
    named=True,
)

STYLES: dict[str, ToolStyle] = {style.name: style for style in (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS)}


def style_for(template: str, name: str = "auto") -> ToolStyle:
    """The style called `name`; with "auto", the one whose markers the chat template has, and Hermes if it has none."""
    if name != "auto":
        if name not in STYLES:
            raise InvalidRequest(f"no tool style {name!r}", hint=f"auto, {', '.join(STYLES)}")
        return STYLES[name]
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" not in template and ("<|python_tag|>" in template or "<|start_header_id|>" in template):
        return LLAMA3
    return HERMES
