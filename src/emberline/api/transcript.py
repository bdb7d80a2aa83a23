"""Transcript: a conversation as chat templates take it, built from a protocol's finer pieces. Neighbours of one role
become one message, because the protocols allow them and many templates do not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from emberline.core.errors import InvalidRequest

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(slots=True)
class _Turn:
    role: Role
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)  # a tool's turn: which call it answers

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": "\n".join(self.texts), **self.answers}
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class Transcript:
    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        self._names: dict[str, str] = {}  # of the tools called so far, by call id

    def say(self, role: Role, text: str) -> None:
        self._turn(role).texts.append(text)

    def think(self, text: str) -> None:
        self._turn("assistant").thoughts.append(text)

    def call(self, id: str, name: str, arguments: dict[str, Any]) -> None:
        self._names[id] = name
        function = {"name": name, "arguments": arguments}
        self._turn("assistant").calls.append({"id": id, "type": "function", "function": function})

    def answer(self, id: str, text: str, *, param: str) -> None:
        if (name := self._names.get(id)) is None:
            raise InvalidRequest(f"{param} is {id[:100]!r}, and no earlier tool call has this id", param=param)
        self._turns.append(_Turn("tool", [text], answers={"tool_call_id": id, "name": name}))

    def messages(self, *, param: str) -> list[dict[str, Any]]:
        if not self._turns:
            raise InvalidRequest(f"{param} says nothing", param=param)
        if self._turns[-1].calls:
            hint = "append the call's result"
            raise InvalidRequest(f"{param} ends with a tool call, which awaits its result", param=param, hint=hint)
        return [turn.message() for turn in self._turns]

    def _turn(self, role: Role) -> _Turn:
        if not self._turns or self._turns[-1].role != role:
            self._turns.append(_Turn(role))
        return self._turns[-1]
