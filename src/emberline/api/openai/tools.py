"""The tools and tool choice of a chat request, from `tools` or from the older `functions` fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from emberline.api.call import Tool, ToolChoice
from emberline.api.fields import keeps_types
from emberline.api.openai.messages import FunctionName
from emberline.api.parse import WireStruct
from emberline.core.errors import InvalidRequest

MAX_TOOLS = 256


class Function(WireStruct):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(WireStruct):
    type: Literal["function"]
    function: Function


class FunctionRef(WireStruct):
    name: FunctionName


class ToolRef(WireStruct, tag_field="type", tag="function"):
    function: FunctionRef


class AllowedTool(WireStruct):
    type: Literal["function"]
    function: FunctionRef


class AllowedTools(WireStruct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS), keeps_types("function")]


class AllowedToolsChoice(WireStruct, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


Tools = Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS), keeps_types("function")]
ToolChoiceField = Literal["none", "auto", "required"] | ToolRef | AllowedToolsChoice
Functions = Annotated[list[Function], Meta(max_length=MAX_TOOLS)]
FunctionChoice = Literal["none", "auto"] | FunctionRef


@dataclass(frozen=True, slots=True)
class ToolSelection:
    """The tools and the tool choice of a request, from its `tools` or `functions` fields."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    is_parallel: bool
    is_legacy: bool  # the reply uses function_call in place of tool_calls


def select_tools(
    tools: list[FunctionTool] | None, choice: ToolChoiceField | None, parallel: bool | None
) -> ToolSelection:
    available = _convert_tools([tool.function for tool in tools or []], "tools")
    allowed, tool_choice = _apply_tool_choice(available, choice)
    return ToolSelection(allowed, tool_choice, is_parallel=parallel is not False, is_legacy=False)


def select_functions(functions: list[Function] | None, choice: FunctionChoice | None) -> ToolSelection:
    available = _convert_tools(functions or [], "functions")
    if isinstance(choice, FunctionRef):
        chosen = _choose_tool_by_name(choice.name, available, "function_call.name")
        return ToolSelection(available, chosen, is_parallel=False, is_legacy=True)
    return ToolSelection(available, ToolChoice(choice or "auto"), is_parallel=False, is_legacy=True)


def _convert_tools(functions: list[Function], param: str) -> tuple[Tool, ...]:
    inner = ".function" if param == "tools" else ""
    by_name: dict[str, Tool] = {}
    for i, function in enumerate(functions):
        if function.name in by_name:
            path = f"{param}[{i}]{inner}.name"
            what = f"{path} is {function.name!r}, which an earlier entry uses"
            raise InvalidRequest(what, param=path, hint="use a different name for each")
        by_name[function.name] = Tool(
            function.name, function.description or "", function.parameters or {}, strict=bool(function.strict)
        )
    return tuple(by_name.values())


def _apply_tool_choice(tools: tuple[Tool, ...], choice: ToolChoiceField | None) -> tuple[tuple[Tool, ...], ToolChoice]:
    match choice:
        case ToolRef():
            return tools, _choose_tool_by_name(choice.function.name, tools, "tool_choice.function.name")
        case AllowedToolsChoice(allowed_tools=allowed):
            for i, ref in enumerate(allowed.tools):
                _choose_tool_by_name(ref.function.name, tools, f"tool_choice.allowed_tools.tools[{i}].function.name")
            names = {ref.function.name for ref in allowed.tools}
            return tuple(tool for tool in tools if tool.name in names), ToolChoice(allowed.mode)
        case "required" if not tools:
            what = "tool_choice is required, but the request has no tools"
            raise InvalidRequest(what, param="tool_choice", hint="send tools")
        case str():
            return tools, ToolChoice(choice)
    return tools, ToolChoice()


def _choose_tool_by_name(name: str, tools: tuple[Tool, ...], param: str) -> ToolChoice:
    if all(tool.name != name for tool in tools):
        hint = "use the name of one of the tools"
        raise InvalidRequest(f"{param} is {name!r}, but no tool has this name", param=param, hint=hint)
    return ToolChoice("named", name)
