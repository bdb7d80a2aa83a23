"""Reads the variables of the chat template, and `continue_final_message`, from a chat request."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

from emberline.api.openai.messages import AssistantMessage, Message
from emberline.api.parse import WireStruct
from emberline.api.template_settings import TemplateSetting, settings_from_kwargs
from emberline.core.errors import InvalidRequest
from emberline.tokens.template import RESERVED_NAMES

RESERVED_VARIABLES = RESERVED_NAMES | {"self"}


class ThinkingOption(WireStruct):
    type: Literal["enabled", "disabled", "auto"]


def merge_template_kwargs(
    kwargs: dict[str, Any] | None, enable_thinking: bool | None, thinking: ThinkingOption | None
) -> dict[str, Any]:
    """Return `kwargs` (chat_template_kwargs) with variables for `enable_thinking` and `thinking` added.

    A variable that `kwargs` already sets keeps its value.
    """
    merged = {} if thinking is None or thinking.type == "auto" else {"enable_thinking": thinking.type == "enabled"}
    if enable_thinking is not None:
        merged["enable_thinking"] = enable_thinking
    return {**merged, **(kwargs or {})}


def build_template_args(kwargs: dict[str, Any] | None, effort: str | None = None) -> dict[str, Any]:
    """Return the chat template's variables.

    Raises InvalidRequest for a variable that only the server may set.
    """
    args = kwargs or {}
    if reserved := sorted(RESERVED_VARIABLES & args.keys()):
        path = f"chat_template_kwargs.{reserved[0]}"
        what = f"{path} is reserved: the server sets this variable itself"
        raise InvalidRequest(what, param=path, hint="use the request field for it")
    if effort is None:
        return args
    # Templates use one variable or the other; chat_template_kwargs take precedence.
    return {**_build_effort_variables(effort), **args}


def list_template_settings(
    kwargs: dict[str, Any] | None,
    effort: str | None = None,
    effort_field: str = "reasoning_effort",
    variables_from_other_field: tuple[Collection[str], str] = ((), ""),
) -> list[TemplateSetting]:
    """Return each template variable that the request sets, with the request field that it came from.

    `effort_field` is the name of the request field that `effort` came from. `variables_from_other_field` is
    (variables, field name): these variables of `kwargs` came from that request field instead of chat_template_kwargs.
    Raises InvalidRequest if `effort` contradicts `kwargs`.
    """
    args = kwargs or {}
    settings = [
        replace(setting, field=variables_from_other_field[1])
        if setting.variables[0] in variables_from_other_field[0]
        else setting
        for setting in settings_from_kwargs(args)
    ]
    if effort is None:
        return settings
    names = tuple(name for name, value in _build_effort_variables(effort).items() if args.get(name, value) == value)
    if not names:
        what = f"{effort_field} is {effort!r}, which contradicts chat_template_kwargs"
        raise InvalidRequest(what, param=effort_field, hint="send one of them")
    return [TemplateSetting(effort_field, names, enables_reasoning=False if effort == "none" else None), *settings]


def _build_effort_variables(effort: str) -> dict[str, Any]:
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def continues_last_message(
    messages: list[Message], continue_final_message: bool | None, add_generation_prompt: bool | None
) -> bool:
    """Return whether the output continues the last message (`continue_final_message`).

    Raises InvalidRequest if continue_final_message is set together with add_generation_prompt, or if the last message
    is not an assistant message.
    """
    if not continue_final_message:
        return False
    param = "continue_final_message"
    if add_generation_prompt:
        what = f"{param} and add_generation_prompt are both true"
        raise InvalidRequest(what, param=param, hint="send add_generation_prompt: false")
    if not isinstance(messages[-1], AssistantMessage):
        role = type(messages[-1]).__struct_config__.tag
        what = f"{param} is true, but the role of the last message is {role}"
        raise InvalidRequest(what, param=param, hint="end messages with an assistant message")
    return True
