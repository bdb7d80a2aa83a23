"""Tool styles: the formats, such as markers and JSON keys, in which model families write tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ToolStyle:
    name: str
    begin: str  # marker that opens a call in the text
    end: str  # marker that closes a call; empty: the call ends with its JSON
    markers: tuple[str, ...]  # texts that the detokenizer must keep where they are special tokens
    head: str  # text between `begin` and the arguments; %s is the tool's name
    tail: str  # text after the arguments, including `end`
    separator: str  # text between two calls
    list_brackets: tuple[str, str] | None = None  # texts before and after several calls that share one `begin`
    allows_bare_call: bool = False  # an output that starts with { may be a call without `begin`
    allows_plain_name: bool = False  # a plain tool name, or a list of calls, may follow `begin`


_MISTRAL = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

HERMES = ToolStyle(
    name="hermes",  # also Qwen 2.5 and Qwen 3
    begin="<tool_call>",
    end="</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
    head='\n{"name": "%s", "arguments": ',
    tail="}\n</tool_call>",
    separator="\n",
)
LLAMA3 = ToolStyle(
    name="llama3",
    begin="<|python_tag|>",
    end="",
    markers=("<|python_tag|>",),
    head='{"name": "%s", "parameters": ',
    tail="}",
    separator="; ",
    list_brackets=("", ""),
    allows_bare_call=True,
)
MISTRAL = ToolStyle(
    name="mistral",  # tokenizers up to v7
    begin="[TOOL_CALLS]",
    end="",
    markers=_MISTRAL,
    head='{"name": "%s", "arguments": ',
    tail="}",
    separator=", ",
    list_brackets=("[", "]"),
    allows_plain_name=True,
)
MISTRAL_ARGS = ToolStyle(
    name="mistral-args",  # tokenizers from v11 on
    begin="[TOOL_CALLS]",
    end="",
    markers=_MISTRAL,
    head="%s[ARGS]",
    tail="",
    separator="",
    allows_plain_name=True,
)

TOOL_STYLES: dict[str, ToolStyle] = {style.name: style for style in (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS)}


def select_tool_style(template: str, name: str = "auto") -> ToolStyle:
    """Return the style called `name`. Raises InvalidRequest for an unknown name.

    With "auto", return the style whose markers occur in the chat template, or Hermes if no style's markers do.
    """
    if name != "auto":
        if name not in TOOL_STYLES:
            raise InvalidRequest(
                f"unknown tool style {name!r}", hint=f"--tool-style takes auto, {', '.join(TOOL_STYLES)}"
            )
        return TOOL_STYLES[name]
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" not in template and ("<|python_tag|>" in template or "<|start_header_id|>" in template):
        return LLAMA3
    return HERMES
