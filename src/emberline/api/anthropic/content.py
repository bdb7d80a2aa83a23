"""The messages of an Anthropic request, and their conversion to messages for chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from emberline.api.fields import IgnoredField, RedundantField, drops_types, without_effect
from emberline.api.parse import WireStruct
from emberline.api.transcript import Role, Transcript

ToolName = Annotated[str, Meta(min_length=1, max_length=128)]

# Blocks of an answer that a different provider wrote: encrypted reasoning, and the calls of tools that it hosts.
HOSTED_BLOCKS = (
    "redacted_thinking",
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "container_upload",
    "fallback",
)


class TextBlock(WireStruct, tag="text", tag_field="type"):
    text: str
    cache_control: RedundantField = None
    citations: list[dict[str, Any]] | None = None  # not passed to the model, which reads the text only


class PlainTextBlock(WireStruct):
    """A text block in a field that accepts only text blocks, such as `system`."""

    type: Literal["text"]
    text: str
    cache_control: RedundantField = None
    citations: IgnoredField = None


class ThinkingBlock(WireStruct, tag="thinking", tag_field="type"):
    thinking: str
    signature: str = ""  # not checked: the text may come from a different provider


class ToolUseBlock(WireStruct, tag="tool_use", tag_field="type"):
    id: str
    name: ToolName
    input: dict[str, Any]
    cache_control: RedundantField = None
    caller: Annotated[Any, without_effect({"type": "direct"})] = None
    toolset_name: IgnoredField = None


class ToolReferenceBlock(WireStruct, tag="tool_reference", tag_field="type"):
    """A tool that the client's search has found. The request's `tools` describe it, as they do all others."""

    tool_name: ToolName
    cache_control: RedundantField = None


class ToolResultBlock(WireStruct, tag="tool_result", tag_field="type"):
    tool_use_id: str
    content: str | list[TextBlock | ToolReferenceBlock] | None = None
    is_error: bool | None = None
    cache_control: RedundantField = None
    toolset_name: IgnoredField = None


class AnthropicSystemMessage(WireStruct, tag="system", tag_field="role"):
    transcript_role: ClassVar[Role] = "system"
    content: str | list[PlainTextBlock]


class AnthropicUserMessage(WireStruct, tag="user", tag_field="role"):
    transcript_role: ClassVar[Role] = "user"
    content: str | list[TextBlock | ToolResultBlock]


class AnthropicAssistantMessage(WireStruct, tag="assistant", tag_field="role"):
    transcript_role: ClassVar[Role] = "assistant"
    content: str | Annotated[list[TextBlock | ThinkingBlock | ToolUseBlock], drops_types(*HOSTED_BLOCKS)]


Block = TextBlock | PlainTextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
Message = AnthropicSystemMessage | AnthropicUserMessage | AnthropicAssistantMessage


def build_transcript(system: str | list[PlainTextBlock] | None, messages: list[Message]) -> Transcript:
    result = Transcript()
    for text in _list_block_texts(system):
        result.add_text("system", text)
    for i, message in enumerate(messages):
        content = message.content
        blocks: Sequence[Block] = [TextBlock(text=content)] if isinstance(content, str) else content
        for j, block in enumerate(blocks):
            _add_block(result, message.transcript_role, block, f"messages[{i}].content[{j}]")
    return result


def _add_block(transcript: Transcript, role: Role, block: Block, path: str) -> None:
    match block:
        case TextBlock() | PlainTextBlock():
            transcript.add_text(role, block.text)
        case ThinkingBlock():
            transcript.add_reasoning(block.thinking)
        case ToolUseBlock():
            transcript.add_tool_call(block.id, block.name, block.input)
        case ToolResultBlock():
            # Templates have no field for a failed tool call, so the text says it.
            text = ("Error: " if block.is_error else "") + "\n".join(_list_block_texts(block.content))
            transcript.add_tool_result(block.tool_use_id, text, param=f"{path}.tool_use_id")


def _list_block_texts(
    content: str | Sequence[PlainTextBlock | TextBlock | ToolReferenceBlock] | None,
) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    return [block.tool_name if isinstance(block, ToolReferenceBlock) else block.text for block in content]
