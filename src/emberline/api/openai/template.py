"""Variables that a chat request passes to the chat template, and how the prompt ends."""

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
    """Add the request's fields about reasoning to chat_template_kwargs, which take precedence."""
    merged = {} if thinking is None or thinking.type == "auto" else {"enable_thinking": thinking.type == "enabled"}
    if enable_thinking is not None:
        merged["enable_thinking"] = enable_thinking
    return {**merged, **(given or {})}


def template_args(given: dict[str, Any] | None, effort: str | None = None) -> dict[str, Any]:
    """Return the template's variables. Raises InvalidRequest for a name that the server sets itself."""
    args = given or {}
    if reserved := sorted(RESERVED & args.keys()):
        path = f"chat_template_kwargs.{reserved[0]}"
        what = f"{path} is reserved: the server sets this variable itself"
        raise InvalidRequest(what, param=path, hint="use the request field for it")
    if effort is None:
        return args
    # Templates use one variable or the other; chat_template_kwargs take precedence.
    return {**_effort_variables(effort), **args}


def wishes(
    given: dict[str, Any] | None,
    effort: str | None = None,
    field: str = "reasoning_effort",
    own: tuple[Collection[str], str] = ((), ""),
) -> list[Wish]:
    """Return the settings that `build_template_args` are made from.

    `effort_field`: the protocol's name of the effort field. `renamed`: variables in `kwargs` that come from another
    request field, and the name of that field. Raises InvalidRequest if the effort contradicts `kwargs`.
    """
    args = given or {}
    settings = [replace(wish, field=own[1]) if wish.names[0] in own[0] else wish for wish in wishes_of_kwargs(args)]
    if effort is None:
        return settings
    names = tuple(name for name, value in _effort_variables(effort).items() if args.get(name, value) == value)
    if not names:
        what = f"{field} is {effort!r}, which contradicts chat_template_kwargs"
        raise InvalidRequest(what, param=field, hint="send one of them")
    return [Wish(field, names, thinks=False if effort == "none" else None), *settings]


def _effort_variables(effort: str) -> dict[str, Any]:
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def continues_last(messages: list[Message], asked: bool | None, generation_prompt: bool | None) -> bool:
    """Return whether the output continues the last message.

    Raises InvalidRequest unless that message is the assistant's and add_generation_prompt is not set.
    """
    if not asked:
        return False
    param = "continue_final_message"
    if generation_prompt:
        what = f"{param} and add_generation_prompt are both true"
        raise InvalidRequest(what, param=param, hint="send add_generation_prompt: false")
    if not isinstance(messages[-1], AssistantMessage):
        role = type(messages[-1]).__struct_config__.tag
        what = f"{param} is true, but the role of the last message is {role}"
        raise InvalidRequest(what, param=param, hint="end messages with an assistant message")
    return True
