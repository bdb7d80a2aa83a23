"""Tools: how they are shown to a model, and the grammar that makes it call them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from emberline.api.call import Tool, ToolChoice
from emberline.api.lark import literal, pattern
from emberline.api.toolstyle import MISTRAL, MISTRAL_ARGS, ToolStyle
from emberline.core.errors import InvalidRequest
from emberline.core.params import Grammar

Message = dict[str, Any]

MAX_CALLS = 16  # in one reply that is made to call


def knows_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def shown(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """As chat templates take them."""
    return [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": _parameters(t)}}
        for t in tools
    ]


def inject(messages: Sequence[Message], tools: Sequence[Tool], style: ToolStyle) -> list[Message]:
    """For a template that knows no tools: they go into the system message, past calls and results into plain text."""
    plain: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            answer = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if plain and plain[-1].get("answers"):
                plain[-1]["content"] += "\n" + answer
            else:
                plain.append({"role": "user", "content": answer, "answers": True})
        else:
            plain.append(_spelled(message, style))
    plain = [{k: v for k, v in message.items() if k != "answers"} for message in plain]
    return _instructed(plain, _instructions(tools, style)) if tools else plain


def _spelled(message: Message, style: ToolStyle) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    functions = [call["function"] for call in calls]
    text = written([(f["name"], json.dumps(f["arguments"], ensure_ascii=False)) for f in functions], style)
    content = message.get("content")
    rest = {k: v for k, v in message.items() if k != "tool_calls"}
    return {**rest, "content": f"{content}\n{text}" if content else text}


def written(calls: Sequence[tuple[str, str]], style: ToolStyle) -> str:
    """These calls (name, arguments' JSON) as a model of this style writes them."""
    bodies = [style.head % name + arguments + style.tail for name, arguments in calls]
    if style.listed is None:
        return style.joint.join(style.begin + body for body in bodies)
    opening, closing = style.listed
    return ("" if style.bare else style.begin) + opening + style.joint.join(bodies) + closing


def _instructed(messages: list[Message], text: str) -> list[Message]:
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{text}".lstrip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _instructions(tools: Sequence[Tool], style: ToolStyle) -> str:
    listing = "\n".join(json.dumps(entry["function"], ensure_ascii=False) for entry in shown(tools))
    example = written([("tool_name", '{"parameter": "value"}')], style)
    return (
        "You can call tools. Each line between the tags describes one, with a JSON schema of its parameters.\n"
        f"<tools>\n{listing}\n</tools>\n"
        f"To call a tool, write its name and its arguments in exactly this form:\n{example}\n"
        "The result comes in the next message. If no tool helps, answer in plain text."
    )


def fit_ids(messages: Sequence[Message], style: ToolStyle) -> list[Message]:
    """Mistral's templates take only ids of nine letters and digits; elsewhere they stay as they are."""
    if style not in (MISTRAL, MISTRAL_ARGS):
        return list(messages)
    fitted = []
    for message in messages:
        message = dict(message)
        if "tool_call_id" in message:
            message["tool_call_id"] = _nine(message["tool_call_id"])
        if message.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": _nine(call["id"])} for call in message["tool_calls"]]
        fitted.append(message)
    return fitted


def _nine(id_: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", id_)[-9:].rjust(9, "0")


def grammar_for(
    tools: Sequence[Tool],
    choice: ToolChoice,
    style: ToolStyle,
    parallel: bool,
    special: Mapping[str, int] | None = None,
) -> Grammar | None:
    """What holds the model to its choice. `special`: the ids of the style's markers that are tokens of their own.

    required, named   the reply is a call, or several (required and parallel)
    auto              free text; but once a call begins it is held to the tools' names and the schemas of strict ones.
                      None, when there is nothing to hold to: no tool is strict and calls may be many
    """
    if choice.mode == "none" or not tools:
        return None
    if choice.mode == "auto" and parallel and not any(tool.strict for tool in tools):
        return None
    callable_ = [t for t in tools if t.name == choice.name] if choice.mode == "named" else tools
    if not callable_:
        raise InvalidRequest(f"tool_choice names {choice.name!r}, which is not among the tools", param="tool_choice")
    several = parallel and choice.mode != "named"
    special = {m: i for m, i in (special or {}).items() if m in style.markers}
    rules = [_free(style, several, special) if choice.mode == "auto" else _forced(style, several, special)]
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(callable_))))
    for i, tool in enumerate(callable_):
        ends = (literal(style.head % tool.name, special), literal(style.tail, special) if style.tail else "")
        rules.append(f"call{i}: {ends[0]} @arguments{i} {ends[1]}")
    schemas = [{"name": f"arguments{i}", "json_schema": _schema(tool)} for i, tool in enumerate(callable_)]
    return Grammar("grammar", json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *schemas]}))


def _forced(style: ToolStyle, several: bool, special: Mapping[str, int]) -> str:
    unit = f"{literal(style.begin, special)} {_region(style, several)}"
    if style.bare:
        unit = _region(style, several)
    joint = literal(style.joint) if style.joint else ""
    more = f" ({joint} {unit}){{0,{MAX_CALLS - 1}}}" if several and style.listed is None else ""
    return f"start: {unit}{more}"


def _free(style: ToolStyle, several: bool, special: Mapping[str, int]) -> str:
    region = _region(style, several)
    text = r"(\s*[^{\s](.|\n)*)?" if style.bare else r"(.|\n)*"
    if style.begin in special:
        lead = f"lead: TEXT {literal(style.begin, special)}"
    else:
        lead = f"lead[lazy]: {pattern(text + re.escape(style.begin))}"
    start = f"(lead {region})* TEXT" if several and style.listed is None else f"TEXT | lead {region}"
    if style.bare:  # then a reply that starts with a brace is a call too
        start = f"{start} | {region}"
    return f"start: {start}\n{lead}\nTEXT: {pattern(text)}"


def _region(style: ToolStyle, several: bool) -> str:
    """What follows `begin`."""
    if style.listed is None:
        return "call"
    opening, closing = (literal(text) if text else "" for text in style.listed)
    more = f"({literal(style.joint)} call){{0,{MAX_CALLS - 1}}}" if several else ""
    return f"{opening} call {more} {closing}"


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.parameters or {"type": "object", "properties": {}}


def _schema(tool: Tool) -> dict[str, Any]:
    """Arguments are an object even if the schema forgot to say so; only strict tools insist on every keyword."""
    return {**_parameters(tool), "type": "object", "x-guidance": {"lenient": not tool.strict}}
