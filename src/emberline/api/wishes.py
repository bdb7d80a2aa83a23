"""Wishes: what a request asks of the chat template. One without effect is ignored where it is a hint about reasoning,
and refused by the name of its field otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from emberline.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Wish:
    field: str  # as the protocol names it
    names: tuple[str, ...]  # variables that carry it: a template that uses none of them does not hear of it
    thinks: bool | None = None  # it asks for reasoning, or for none; None: for something else


def wishes_of_kwargs(given: dict[str, Any]) -> list[Wish]:
    return [Wish(f"chat_template_kwargs.{name[:100]}", (name,), _thinks(name, value)) for name, value in given.items()]


HINTS = frozenset({"enable_thinking", "thinking", "reasoning_effort", "thinking_budget"})  # how much to reason


def ignored_wishes(wishes: Sequence[Wish], known: frozenset[str], reasons: bool) -> list[str]:
    """The fields that have no effect, as they ask for more or less reasoning than there is a way to ask for.

    `known`: the variables that a request may set; `reasons`: whether the model does. What holds anyway is granted.
    Raises InvalidRequest for any other variable that the template does not use.
    """
    ignored = []
    for wish in wishes:
        if not known.isdisjoint(wish.names) or wish.thinks is reasons:
            continue
        if HINTS.isdisjoint(wish.names):
            names, others = " or ".join(wish.names)[:200], ", ".join(sorted(known))
            raise InvalidRequest(
                f"{wish.field} has no effect: this model's chat template does not use {names}",
                param=wish.field,
                hint="leave it out" + (f"; chat_template_kwargs that it uses: {others}" if others else ""),
            )
        ignored.append(wish.field)
    return ignored


def _thinks(name: str, value: Any) -> bool | None:
    if name in ("enable_thinking", "thinking") and isinstance(value, bool):
        return value
    return False if name == "reasoning_effort" and value == "none" else None
