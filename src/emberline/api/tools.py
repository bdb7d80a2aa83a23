"""Renders tools into the prompt, and builds the grammar that constrains the model's tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from emberline.api.call import Tool, ToolChoice
from emberline.api.rule_writer import RuleWriter
from emberline.api.tool_styles.json_arguments import NO_PARAMETERS
from emberline.api.tool_styles.style import Message, ToolStyle
from emberline.core.errors import InvalidRequest
from emberline.core.params import GrammarSpec


def template_supports_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def to_template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools in the form that chat templates take."""
    return [
        {
            "type": "function",
            "function": {"name": t.name, "description": t.description, "parameters": t.parameters or NO_PARAMETERS},
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
            plain.append(write_calls(message, style))
    plain = [{k: v for k, v in message.items() if k != "answers"} for message in plain]
    return _add_instructions(plain, _build_tool_instructions(tools, style)) if tools else plain


def write_calls(message: Message, style: ToolStyle) -> Message:
    """Return the message with its tool calls as text, for templates that do not write them."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    functions = [call["function"] for call in calls]
    text = style.format_calls([(f["name"], json.dumps(f["arguments"], ensure_ascii=False)) for f in functions])
    content = message.get("content")
    rest = {k: v for k, v in message.items() if k != "tool_calls"}
    return {**rest, "content": f"{content}\n{text}" if content else text}


def _add_instructions(messages: list[Message], text: str) -> list[Message]:
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{text}".lstrip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _build_tool_instructions(tools: Sequence[Tool], style: ToolStyle) -> str:
    listing = "\n".join(json.dumps(entry["function"], ensure_ascii=False) for entry in to_template_tools(tools))
    example = style.format_calls([("tool_name", '{"parameter": "value"}')])
    return (
        "You can call tools. Each line between the tags describes one, with a JSON schema of its parameters.\n"
        f"<tools>\n{listing}\n</tools>\n"
        f"To call a tool, write its name and its arguments in exactly this form:\n{example}\n"
        "The result comes in the next message. If no tool helps, answer in plain text."
    )


def build_tool_call_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    style: ToolStyle,
    parallel: bool,
    special_tokens: Mapping[str, int] | None = None,
    text_markers: Sequence[str] = (),
) -> GrammarSpec | None:
    """Return the grammar that enforces the tool choice, or None if no constraint is needed.

    required, named   the output is one call, or several (required and parallel)
    auto              free text; once a call begins, its tool name and, for strict tools, its schema are enforced;
                      returns None if no tool is strict and parallel calls are allowed

    `special_tokens`: the ids of the markers that are special tokens. `text_markers`: markers that text may contain.
    Raises InvalidRequest if the choice names a tool that is not in `tools`, or if the style cannot enforce the schema
    of a strict tool.
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
    several = parallel and choice.mode != "named" and style.allows_several_calls
    rules = RuleWriter({m: i for m, i in (special_tokens or {}).items() if m in (*style.markers, *text_markers)})
    names = [rules.add_rule(f"call{i}", style.write_call(rules, tool, f"call{i}")) for i, tool in enumerate(callable_)]
    rules.add_rule("call", " | ".join(names))
    if choice.mode == "auto":
        return rules.build(style.write_optional_calls(rules, several, text_markers))
    return rules.build(style.write_forced_calls(rules, several))
