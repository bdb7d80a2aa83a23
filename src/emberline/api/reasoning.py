"""Reasoning: the text a model writes to itself before it answers, between two markers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from emberline.api.lark import literal, parts, pattern
from emberline.core.params import Grammar


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    begin: str = "<think>"
    end: str = "</think>"

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end)

    def opened_by(self, prompt: str) -> bool:
        """Templates of some models write the first marker themselves: the output then starts inside."""
        return prompt.rstrip().endswith(self.begin)


THINK = ReasoningStyle()
MAGISTRAL = ReasoningStyle("[THINK]", "[/THINK]")


def style_for(template: str) -> ReasoningStyle | None:
    return next((style for style in (THINK, MAGISTRAL) if style.end in template), None)


def reasoned(grammar: Grammar, style: ReasoningStyle, opened: bool, special: Mapping[str, int]) -> Grammar:
    """The same constraint, on what follows the reasoning. `special`: the ids of markers that are tokens of their own.
    One that cannot be read comes back as it is: whoever compiles it says why."""
    try:
        first, *rest = parts(grammar)
    except (ValueError, TypeError, KeyError, RecursionError):
        return grammar
    if style.end in special:
        thought = f"TEXT {literal(style.end, special)}"
        lead = f"lead: {thought}" if opened else f"lead: ({literal(style.begin, special)} {thought})?"
    else:
        inside = f"(.|\\n)*{re.escape(style.end)}"
        thought = f"thought[lazy]: {pattern(inside if opened else re.escape(style.begin) + inside)}"
        lead = f"lead: thought{'' if opened else '?'}\n{thought}"
    return _behind(f"lead GAP @body\n{lead}\nTEXT: /(.|\\n)*/", first, rest)


def answered(grammar: Grammar) -> Grammar:
    """The same constraint where the reasoning has been closed already: only the white space after it may come first."""
    try:
        first, *rest = parts(grammar)
    except (ValueError, TypeError, KeyError, RecursionError):
        return grammar
    return _behind("GAP @body", first, rest)


def _behind(start: str, body: dict[str, Any], rest: list[dict[str, Any]]) -> Grammar:
    top = {"lark_grammar": f"start: {start}\nGAP: /[ \\n]{{0,4}}/\n"}
    return Grammar("grammar", json.dumps({"grammars": [top, {**body, "name": "body"}, *rest]}))
