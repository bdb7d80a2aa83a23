"""Request fields that set variables of the model's chat template.

A variable that the template does not use is ignored if it is a hint about reasoning. Otherwise it is an error with the
name of the request field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from emberline.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class TemplateSetting:
    field: str  # name in the protocol
    variables: tuple[str, ...]  # template variables that it sets; it has no effect if the template uses none of them
    enables_reasoning: bool | None = None  # whether it turns reasoning on or off; None: neither


def settings_from_kwargs(kwargs: dict[str, Any]) -> list[TemplateSetting]:
    return [
        TemplateSetting(f"chat_template_kwargs.{name[:100]}", (name,), _parse_reasoning_switch(name, value))
        for name, value in kwargs.items()
    ]


REASONING_VARIABLES = frozenset({"enable_thinking", "thinking", "reasoning_effort", "thinking_budget"})


def find_ignored_settings(
    settings: Sequence[TemplateSetting], known_variables: frozenset[str], model_reasons: bool
) -> list[str]:
    """Return the request fields about reasoning that have no effect with this model's template.

    `known_variables` are the variables that the template uses. A field that turns reasoning on or off is not listed if
    the model behaves that way anyway (`model_reasons`). Raises InvalidRequest for a variable that the template does not
    use and that is not about reasoning.
    """
    ignored = []
    for setting in settings:
        if not known_variables.isdisjoint(setting.variables) or setting.enables_reasoning is model_reasons:
            continue
        if REASONING_VARIABLES.isdisjoint(setting.variables):
            names, others = " or ".join(setting.variables)[:200], ", ".join(sorted(known_variables))
            raise InvalidRequest(
                f"{setting.field} has no effect: this model's chat template does not use {names}",
                param=setting.field,
                hint=f"remove {setting.field}" + (f"; variables that the template uses: {others}" if others else ""),
            )
        ignored.append(setting.field)
    return ignored


def _parse_reasoning_switch(name: str, value: Any) -> bool | None:
    if name in ("enable_thinking", "thinking") and isinstance(value, bool):
        return value
    return False if name == "reasoning_effort" and value == "none" else None
