"""The messages of Anthropic's protocol, and the conversation they tell."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from emberline.api.parse import Wire
from emberline.api.transcript import Role, Transcript
from emberline.core.errors import InvalidRequest

ToolName = Annotated[str, Meta(min_length=1, max_length=128)]


def signature(thinking: str) -> str:
    """What we sign thinking with. It shows that a block came back as it was given; it keeps no secret."""
    return hashlib.sha256(thinking.encode()).hexdigest()[:32]


class CacheControl(Wire):
    type: Literal["ephemeral"]  # where a struct stands alone, a tag could be left out
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Wire, tag="text", tag_field="type"):
    text: str
    cache_control: CacheControl | None = None
    citations: list[dict[str, Any]] | None = None  # of an answer: in its text, as far as a model reads it


class OnlyText(Wire):
    """A text block where there are no others."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class ThinkingBlock(Wire, tag="thinking", tag_field="type"):
    thinking: str
    signature: str = ""


class DirectCaller(Wire):
    type: Literal["direct"]


class ToolUseBlock(Wire, tag="tool_use", tag_field="type"):
    id: str
    name: ToolName
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None
    toolset_name: None = None


class ToolResultBlock(Wire, tag="tool_result", tag_field="type"):
    tool_use_id: str
    content: str | list[OnlyText] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


class SystemMessage(Wire, tag="system", tag_field="role"):
    speaker: ClassVar[Role] = "system"
    content: str | list[OnlyText]


class UserMessage(Wire, tag="user", tag_field="role"):
    speaker: ClassVar[Role] = "user"
    content: str | list[TextBlock | ToolResultBlock]


class AssistantMessage(Wire, tag="assistant", tag_field="role"):
    speaker: ClassVar[Role] = "assistant"
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock]


Block = TextBlock | OnlyText | ThinkingBlock | ToolUseBlock | ToolResultBlock
Message = SystemMessage | UserMessage | AssistantMessage


def transcript(system: str | list[OnlyText] | None, messages: list[Message]) -> Transcript:
    made = Transcript()
    for text in _texts(system):
        made.say("system", text)
    for i, message in enumerate(messages):
        content = message.content
        blocks: Sequence[Block] = [TextBlock(text=content)] if isinstance(content, str) else content
        for j, block in enumerate(blocks):
            _add(made, message.speaker, block, f"messages[{i}].content[{j}]")
    return made


def _add(made: Transcript, speaker: Role, block: Block, path: str) -> None:
    match block:
        case TextBlock() | OnlyText():
            made.say(speaker, block.text)
        case ThinkingBlock():
            if block.signature not in ("", signature(block.thinking)):
                raise InvalidRequest(
                    f"{path}.signature does not belong to this thinking",
                    param=f"{path}.signature",
                    hint="give the block back as it came, or leave the signature empty",
                )
            made.think(block.thinking)
        case ToolUseBlock():
            made.call(block.id, block.name, block.input)
        case ToolResultBlock():
            # Templates have no place for a failure; the model reads of it in the text.
            text = ("Error: " if block.is_error else "") + "\n".join(_texts(block.content))
            made.answer(block.tool_use_id, text, param=f"{path}.tool_use_id")


def _texts(content: str | list[OnlyText] | None) -> list[str]:
    if content is None:
        return []
    return [content] if isinstance(content, str) else [block.text for block in content]
