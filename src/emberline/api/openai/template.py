"""What a chat request says to the chat template beside its messages: extra variables, and how the prompt shall end."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

from emberline.api.openai.messages import AssistantMessage, Message
from emberline.api.parse import Wire
from emberline.api.wishes import Wish, wishes_of_kwargs
from emberline.core.errors import InvalidRequest
from emberline.tokens.template import OWN_NAMES

RESERVED = OWN_NAMES | {"self"}


class Thinking(Wire):
    type: Literal["enabled", "disabled", "auto"]


def template_kwargs(
    given: dict[str, Any] | None, enable_thinking: bool | None, thinking: Thinking | None
) -> dict[str, Any]:
    """With what the fields of their own say of reasoning; chat_template_kwargs win."""
    said = {} if thinking is None or thinking.type == "auto" else {"enable_thinking": thinking.type == "enabled"}
    if enable_thinking is not None:
        said["enable_thinking"] = enable_thinking
    return {**said, **(given or {})}


def template_args(given: dict[str, Any] | None, effort: str | None = None) -> dict[str, Any]:
    args = given or {}
    if taken := sorted(RESERVED & args.keys()):
        path = f"chat_template_kwargs.{taken[0]}"
        raise InvalidRequest(f"{path} is a name the template already has", param=path, hint="use the field of its own")
    if effort is None:
        return args
    # Templates know one name or the other; what the request gives them outright wins.
    return {**_said_by(effort), **args}


def wishes(
    given: dict[str, Any] | None,
    effort: str | None = None,
    field: str = "reasoning_effort",
    own: tuple[Collection[str], str] = ((), ""),
) -> list[Wish]:
    """What `template_args` are there for. `field`: what the protocol calls the effort; `own`: the names in `given` that
    come from a field of their own, and that field."""
    args = given or {}
    asked = [replace(wish, field=own[1]) if wish.names[0] in own[0] else wish for wish in wishes_of_kwargs(args)]
    if effort is None:
        return asked
    names = tuple(name for name, value in _said_by(effort).items() if args.get(name, value) == value)
    if not names:
        raise InvalidRequest(f"{field} and chat_template_kwargs contradict each other", param=field)
    return [Wish(field, names, thinks=False if effort == "none" else None), *asked]


def _said_by(effort: str) -> dict[str, Any]:
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def continues_last(messages: list[Message], asked: bool | None, generation_prompt: bool | None) -> bool:
    """Whether the last message is to be continued; it must be the assistant's, and no new turn may be opened."""
    if not asked:
        return False
    param = "continue_final_message"
    if generation_prompt:
        raise InvalidRequest(f"{param} and add_generation_prompt exclude each other", param=param)
    if not isinstance(messages[-1], AssistantMessage):
        raise InvalidRequest(f"{param} needs the last message to be the assistant's", param=param)
    return True
