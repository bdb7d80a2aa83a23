"""Request fields that set variables of the chat template.

A setting that the model's template does not use is ignored if it is a hint about reasoning; any other is an error that
names its field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from emberline.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Wish:
    field: str  # name in the protocol
    names: tuple[str, ...]  # template variables that carry it; without effect if the template uses none of them
    thinks: bool | None = None  # whether it turns reasoning on or off; None: neither


def wishes_of_kwargs(given: dict[str, Any]) -> list[Wish]:
    return [
        Wish(f"chat_template_kwargs.{name[:100]}", (name,), _reasoning_switch(name, value))
        for name, value in given.items()
    ]


HINTS = frozenset({"enable_thinking", "thinking", "reasoning_effort", "thinking_budget"})


def ignored_wishes(wishes: Sequence[Wish], known: frozenset[str], reasons: bool) -> list[str]:
    """Return the fields about reasoning that have no effect with this template.

    `known`: the variables that a request may set; `model_reasons`: whether the model reasons, so that a setting which
    states the same is not ignored. Raises InvalidRequest for any other variable that the template does not use.
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
                hint=f"remove {wish.field}" + (f"; variables that the template uses: {others}" if others else ""),
            )
        ignored.append(wish.field)
    return ignored


def _reasoning_switch(name: str, value: Any) -> bool | None:
    if name in ("enable_thinking", "thinking") and isinstance(value, bool):
        return value
    return False if name == "reasoning_effort" and value == "none" else None
