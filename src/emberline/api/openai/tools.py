"""The tools of a chat request, today's and the older `functions`: which there are, and which may or must be called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from emberline.api.call import Tool, ToolChoice
from emberline.api.openai.messages import FunctionName
from emberline.api.parse import Wire
from emberline.core.errors import InvalidRequest

MAX_TOOLS = 256


class Function(Wire):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Wire):
    type: Literal["function"]
    function: Function


class FunctionRef(Wire):
    name: FunctionName


class ToolRef(Wire, tag_field="type", tag="function"):
    function: FunctionRef


class AllowedTool(Wire):
    type: Literal["function"]
    function: FunctionRef


class AllowedTools(Wire):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(Wire, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


Tools = Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)]
Choice = Literal["none", "auto", "required"] | ToolRef | AllowedToolsChoice
Functions = Annotated[list[Function], Meta(max_length=MAX_TOOLS)]
FunctionChoice = Literal["none", "auto"] | FunctionRef


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What the fields say, made one."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    parallel: bool
    legacy: bool  # the reply must speak of function_call too


def toolbox(tools: list[FunctionTool] | None, choice: Choice | None, parallel: bool | None) -> Toolbox:
    made = _tools([tool.function for tool in tools or []], "tools")
    made, chosen = _choose(made, choice)
    return Toolbox(made, chosen, parallel=parallel is not False, legacy=False)


def legacy_toolbox(functions: list[Function] | None, choice: FunctionChoice | None) -> Toolbox:
    made = _tools(functions or [], "functions")
    if isinstance(choice, FunctionRef):
        return Toolbox(made, _named(choice.name, made, "function_call.name"), parallel=False, legacy=True)
    return Toolbox(made, ToolChoice(choice or "auto"), parallel=False, legacy=True)


def _tools(functions: list[Function], param: str) -> tuple[Tool, ...]:
    inner = ".function" if param == "tools" else ""
    made: dict[str, Tool] = {}
    for at, function in enumerate(functions):
        if function.name in made:
            path = f"{param}[{at}]{inner}.name"
            raise InvalidRequest(f"{path}: {function.name!r} is taken", param=path, hint="give each its own name")
        made[function.name] = Tool(
            function.name, function.description or "", function.parameters or {}, strict=bool(function.strict)
        )
    return tuple(made.values())


def _choose(tools: tuple[Tool, ...], asked: Choice | None) -> tuple[tuple[Tool, ...], ToolChoice]:
    match asked:
        case ToolRef():
            return tools, _named(asked.function.name, tools, "tool_choice.function.name")
        case AllowedToolsChoice(allowed_tools=allowed):
            for at, ref in enumerate(allowed.tools):
                _named(ref.function.name, tools, f"tool_choice.allowed_tools.tools[{at}].function.name")
            names = {ref.function.name for ref in allowed.tools}
            return tuple(tool for tool in tools if tool.name in names), ToolChoice(allowed.mode)
        case "required" if not tools:
            raise InvalidRequest("tool_choice asks for a call of no tools", param="tool_choice", hint="send tools")
        case str():
            return tools, ToolChoice(asked)
    return tools, ToolChoice()


def _named(name: str, tools: tuple[Tool, ...], param: str) -> ToolChoice:
    if all(tool.name != name for tool in tools):
        raise InvalidRequest(f"{param} is {name!r}, and no tool has this name", param=param)
    return ToolChoice("named", name)
