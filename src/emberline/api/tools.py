"""Renders tools into the prompt, and builds the grammar that constrains the model's tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from emberline.api.call import Tool, ToolChoice
from emberline.api.lark import build_literal_term, build_regex_term
from emberline.api.tool_style import MISTRAL, MISTRAL_ARGS, ToolStyle
from emberline.core.errors import InvalidRequest
from emberline.core.params import GrammarSpec

Message = dict[str, Any]

MAX_CALLS_PER_REPLY = 16  # of a reply whose grammar forces tool calls


def template_supports_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def to_template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools in the form that chat templates take."""
    return [
        {
            "type": "function",
            "function": {"name": t.name, "description": t.description, "parameters": _parameters_schema(t)},
        }
        for t in tools
    ]


def inject_tools(messages: Sequence[Message], tools: Sequence[Tool], style: ToolStyle) -> list[Message]:
    """Return messages for a chat template without tool support.

    The system message describes the tools; earlier tool calls and results become text."""
    plain: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            answer = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if plain and plain[-1].get("answers"):
                plain[-1]["content"] += "\n" + answer
            else:
                plain.append({"role": "user", "content": answer, "answers": True})
        else:
            plain.append(_convert_calls_to_text(message, style))
    plain = [{k: v for k, v in message.items() if k != "answers"} for message in plain]
    return _add_instructions(plain, _build_tool_instructions(tools, style)) if tools else plain


def _convert_calls_to_text(message: Message, style: ToolStyle) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    functions = [call["function"] for call in calls]
    text = format_tool_calls([(f["name"], json.dumps(f["arguments"], ensure_ascii=False)) for f in functions], style)
    content = message.get("content")
    rest = {k: v for k, v in message.items() if k != "tool_calls"}
    return {**rest, "content": f"{content}\n{text}" if content else text}


def format_tool_calls(calls: Sequence[tuple[str, str]], style: ToolStyle) -> str:
    """Return tool calls, given as (name, JSON of the arguments), as text in the format of this style."""
    bodies = [style.head % name + arguments + style.tail for name, arguments in calls]
    if style.list_brackets is None:
        return style.separator.join(style.begin + body for body in bodies)
    opening, closing = style.list_brackets
    return ("" if style.allows_bare_call else style.begin) + opening + style.separator.join(bodies) + closing


def _add_instructions(messages: list[Message], text: str) -> list[Message]:
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{text}".lstrip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _build_tool_instructions(tools: Sequence[Tool], style: ToolStyle) -> str:
    listing = "\n".join(json.dumps(entry["function"], ensure_ascii=False) for entry in to_template_tools(tools))
    example = format_tool_calls([("tool_name", '{"parameter": "value"}')], style)
    return (
        "You can call tools. Each line between the tags describes one, with a JSON schema of its parameters.\n"
        f"<tools>\n{listing}\n</tools>\n"
        f"To call a tool, write its name and its arguments in exactly this form:\n{example}\n"
        "The result comes in the next message. If no tool helps, answer in plain text."
    )


def shorten_call_ids(messages: Sequence[Message], style: ToolStyle) -> list[Message]:
    """For Mistral's style, shorten tool call ids to nine letters or digits, as its templates require."""
    if style not in (MISTRAL, MISTRAL_ARGS):
        return list(messages)
    fitted = []
    for message in messages:
        message = dict(message)
        if "tool_call_id" in message:
            message["tool_call_id"] = _make_nine_char_id(message["tool_call_id"])
        if message.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": _make_nine_char_id(call["id"])} for call in message["tool_calls"]]
        fitted.append(message)
    return fitted


def _make_nine_char_id(id_: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", id_)[-9:].rjust(9, "0")


def build_tool_call_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    style: ToolStyle,
    parallel: bool,
    special_tokens: Mapping[str, int] | None = None,
) -> GrammarSpec | None:
    """Return the grammar that enforces the tool choice, or None if no constraint is needed.

    required, named   the output is one call, or several (required and parallel)
    auto              free text; once a call begins, its tool name and, for strict tools, its schema are enforced;
                      returns None if no tool is strict and parallel calls are allowed

    `special_tokens`: the ids of the style's markers that are special tokens. Raises InvalidRequest if the choice names
    a tool that is not in `tools`.
    """
    if choice.mode == "none" or not tools:
        return None
    if choice.mode == "auto" and parallel and not any(tool.strict for tool in tools):
        return None
    callable_ = [t for t in tools if t.name == choice.name] if choice.mode == "named" else tools
    if not callable_:
        hint = "use the name of one of the tools"
        raise InvalidRequest(
            f"tool_choice names {choice.name!r}, which is not in tools", param="tool_choice", hint=hint
        )
    several = parallel and choice.mode != "named"
    special_tokens = {m: i for m, i in (special_tokens or {}).items() if m in style.markers}
    rules = [
        _build_optional_call_rule(style, several, special_tokens)
        if choice.mode == "auto"
        else _build_forced_call_rule(style, several, special_tokens)
    ]
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(callable_))))
    for i, tool in enumerate(callable_):
        ends = (
            build_literal_term(style.head % tool.name, special_tokens),
            build_literal_term(style.tail, special_tokens) if style.tail else "",
        )
        rules.append(f"call{i}: {ends[0]} @arguments{i} {ends[1]}")
    schemas = [{"name": f"arguments{i}", "json_schema": _make_grammar_schema(tool)} for i, tool in enumerate(callable_)]
    return GrammarSpec("grammar", json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *schemas]}))


def _build_forced_call_rule(style: ToolStyle, allows_several: bool, special_tokens: Mapping[str, int]) -> str:
    unit = f"{build_literal_term(style.begin, special_tokens)} {_build_calls_rule(style, allows_several)}"
    if style.allows_bare_call:
        unit = _build_calls_rule(style, allows_several)
    joint = build_literal_term(style.separator) if style.separator else ""
    more = f" ({joint} {unit}){{0,{MAX_CALLS_PER_REPLY - 1}}}" if allows_several and style.list_brackets is None else ""
    return f"start: {unit}{more}"


def _build_optional_call_rule(style: ToolStyle, allows_several: bool, special_tokens: Mapping[str, int]) -> str:
    region = _build_calls_rule(style, allows_several)
    text = r"(\s*[^{\s](.|\n)*)?" if style.allows_bare_call else r"(.|\n)*"
    if style.begin in special_tokens:
        lead = f"lead: TEXT {build_literal_term(style.begin, special_tokens)}"
    else:
        lead = f"lead[lazy]: {build_regex_term(text + re.escape(style.begin))}"
    start = f"(lead {region})* TEXT" if allows_several and style.list_brackets is None else f"TEXT | lead {region}"
    if style.allows_bare_call:  # an output that starts with a brace is a call too
        start = f"{start} | {region}"
    return f"start: {start}\n{lead}\nTEXT: {build_regex_term(text)}"


def _build_calls_rule(style: ToolStyle, allows_several: bool) -> str:
    """Return the grammar rule for the text after the opening marker of a tool call."""
    if style.list_brackets is None:
        return "call"
    opening, closing = (build_literal_term(text) if text else "" for text in style.list_brackets)
    more = f"({build_literal_term(style.separator)} call){{0,{MAX_CALLS_PER_REPLY - 1}}}" if allows_several else ""
    return f"{opening} call {more} {closing}"


def _parameters_schema(tool: Tool) -> dict[str, Any]:
    return tool.parameters or {"type": "object", "properties": {}}


def _make_grammar_schema(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of the tool's arguments, always of type object.

    Unknown schema keywords are errors only for strict tools."""
    return {**_parameters_schema(tool), "type": "object", "x-guidance": {"lenient": not tool.strict}}
