"""Transcript: builds the messages that chat templates take from the content parts of a request.

Adjacent parts of the same role become one message. The APIs allow two messages of one role in a row, but many chat
templates do not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from emberline.core.errors import InvalidRequest

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(slots=True)
class _Message:
    role: Role
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    result_of: dict[str, str] = field(default_factory=dict)  # of a tool result: the call's id and the tool's name

    def to_dict(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": "\n".join(self.texts), **self.result_of}
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class Transcript:
    def __init__(self) -> None:
        self._messages: list[_Message] = []
        self._tool_names: dict[str, str] = {}  # by the id of the call
        self.ignored_fields: list[str] = []  # fields of the input without effect on the messages

    def add_text(self, role: Role, text: str) -> None:
        self._get_or_add_message(role).texts.append(text)

    def add_reasoning(self, text: str) -> None:
        self._get_or_add_message("assistant").thoughts.append(text)

    def add_tool_call(self, id: str, name: str, arguments: dict[str, Any]) -> None:
        self._tool_names[id] = name
        function = {"name": name, "arguments": arguments}
        self._get_or_add_message("assistant").calls.append({"id": id, "type": "function", "function": function})

    def add_tool_result(self, id: str, text: str, *, param: str) -> None:
        """Add the result of a tool call. Raises InvalidRequest if no earlier call has this id."""
        if (name := self._tool_names.get(id)) is None:
            hint = "send the tool call in an earlier message"
            raise InvalidRequest(
                f"{param} is {id[:100]!r}, but no earlier tool call has this id", param=param, hint=hint
            )
        self._messages.append(_Message("tool", [text], result_of={"tool_call_id": id, "name": name}))

    def to_messages(self, *, param: str) -> list[dict[str, Any]]:
        """Return the messages. Raises InvalidRequest if there are none or the last tool call is unanswered."""
        if not self._messages:
            raise InvalidRequest(f"{param} has no content", param=param, hint="send at least one message with text")
        if self._messages[-1].calls:
            hint = "append the result of the tool call"
            raise InvalidRequest(f"{param} ends with a tool call that has no result", param=param, hint=hint)
        return [message.to_dict() for message in self._messages]

    def _get_or_add_message(self, role: Role) -> _Message:
        if not self._messages or self._messages[-1].role != role:
            self._messages.append(_Message(role))
        return self._messages[-1]
