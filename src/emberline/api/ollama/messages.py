"""The messages and tools of /api/chat, and their conversion to the form that chat templates take."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from emberline.api.call import Tool
from emberline.api.fields import IgnoredField, keeps_types
from emberline.api.openai.messages import FunctionName
from emberline.api.openai.tools import MAX_TOOLS, Function, FunctionTool, select_tools
from emberline.api.parse import WireStruct, decode_json_object
from emberline.api.transcript import Role, Transcript
from emberline.core.errors import InvalidRequest

Images = list[Any] | None

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class OllamaCalledFunction(WireStruct):
    name: FunctionName
    arguments: dict[str, Any] | str | None = None  # text: of clients that send OpenAI's form
    index: int | None = None  # without effect: calls stay in their order
    description: str | None = None


class OllamaToolCall(WireStruct):
    function: OllamaCalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(WireStruct):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: Images = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None  # of a tool's result
    tool_call_id: str | None = None  # of a tool's result
    name: IgnoredField = None


class OllamaTool(WireStruct):
    function: Function
    type: str | None = None
    items: IgnoredField = None


Tools = Annotated[list[OllamaTool], Meta(max_length=MAX_TOOLS), keeps_types("function")]


def convert_tools(tools: list[OllamaTool] | None) -> tuple[Tool, ...]:
    functions = [FunctionTool(type="function", function=tool.function) for tool in tools or ()]
    return select_tools(functions, None, None).tools


def reject_images(images: Images, param: str) -> None:
    if images:
        raise InvalidRequest(
            f"{param} is not supported: the models of this server read text only",
            param=param,
            hint=f"remove {param}",
        )


def convert_messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Return the messages for chat templates. Raises InvalidRequest for images, unknown roles and lone results."""
    transcript, open_calls = Transcript(), _OpenCalls()
    for i, message in enumerate(messages):
        param = f"messages[{i}]"
        reject_images(message.images, f"{param}.images")
        if (role := ROLES.get(message.role.lower())) is None:
            what = f"{param}.role is {message.role[:100]!r}; it must be one of {', '.join(ROLES)}"
            raise InvalidRequest(what, param=f"{param}.role", hint="send one of these roles")
        if role == "tool":
            call_id = open_calls.take(message)
            transcript.add_tool_result(call_id, message.content or "", param=f"{param}.tool_call_id")
            continue
        if role == "assistant" and message.thinking:
            transcript.add_reasoning(message.thinking)
        if message.content or not message.tool_calls:
            transcript.add_text(role, message.content or "")
        for call in message.tool_calls or ():
            transcript.add_tool_call(open_calls.add(call), call.function.name, _read_arguments(call, param))
    return transcript.to_messages(param="messages")


def _read_arguments(call: OllamaToolCall, param: str) -> dict[str, Any]:
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        return decode_json_object(arguments, f"{param}.tool_calls.function.arguments")
    return arguments


class _OpenCalls:
    """The tool calls that have no result yet. In Ollama's protocol, ids are optional: most clients send a result with
    the name of the tool, or with nothing but its place among the messages."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # name of the tool by the id of the call
        self._num_calls = 0

    def add(self, call: OllamaToolCall) -> str:
        id = call.id or f"call_{self._num_calls}"
        self._num_calls += 1
        self._names[id] = call.function.name
        return id

    def take(self, result: OllamaMessage) -> str:
        """Return the id of the call that the message answers; "" or an unknown id if there is none."""
        candidates = [id for id in self._names if id == result.tool_call_id]
        candidates += [id for id, name in self._names.items() if name == result.tool_name]
        candidates += list(self._names)
        if not candidates:
            return result.tool_call_id or ""
        del self._names[candidates[0]]
        return candidates[0]
