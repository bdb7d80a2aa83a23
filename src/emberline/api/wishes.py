"""Wishes: what a request asks of the chat template. Each has an effect, or is refused by the name of its field."""

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


def check_wishes(wishes: Sequence[Wish], known: frozenset[str], reasons: bool) -> None:
    """`known`: the variables a request may set; `reasons`: whether the model does. What holds anyway is granted."""
    for wish in wishes:
        if known.isdisjoint(wish.names) and wish.thinks is not reasons:
            names, others = " or ".join(wish.names)[:200], ", ".join(sorted(known))
            raise InvalidRequest(
                f"{wish.field} has no effect: this model's chat template does not use {names}",
                param=wish.field,
                hint="leave it out" + (f"; chat_template_kwargs that it uses: {others}" if others else ""),
            )


def _thinks(name: str, value: Any) -> bool | None:
    if name in ("enable_thinking", "thinking") and isinstance(value, bool):
        return value
    return False if name == "reasoning_effort" and value == "none" else None
