"""Reasoning: the text between two markers that some models write before their answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from emberline.api.lark import build_literal_term, build_regex_term, to_llguidance_grammars
from emberline.core.params import GrammarSpec


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    begin: str = "<think>"
    end: str = "</think>"

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end)

    def is_opened_by(self, prompt: str) -> bool:
        """Return whether the prompt ends with the opening marker: then the output begins with reasoning."""
        return prompt.rstrip().endswith(self.begin)


THINK = ReasoningStyle()
MAGISTRAL = ReasoningStyle("[THINK]", "[/THINK]")


def select_reasoning_style(template: str) -> ReasoningStyle | None:
    return next((style for style in (THINK, MAGISTRAL) if style.end in template), None)


def constrain_after_reasoning(
    grammar: GrammarSpec, style: ReasoningStyle, is_reasoning_open: bool, special_tokens: Mapping[str, int]
) -> GrammarSpec:
    """Return a grammar that allows free reasoning first and then applies `grammar` to the answer.

    `special_tokens` maps markers that are special tokens to their ids. A grammar that cannot be parsed is returned
    unchanged, so that the grammar compiler reports the error.
    """
    try:
        first, *rest = to_llguidance_grammars(grammar)
    except (ValueError, TypeError, KeyError, RecursionError):
        return grammar
    if style.end in special_tokens:
        thought = f"TEXT {build_literal_term(style.end, special_tokens)}"
        lead = (
            f"lead: {thought}"
            if is_reasoning_open
            else f"lead: ({build_literal_term(style.begin, special_tokens)} {thought})?"
        )
    else:
        inside = f"(.|\\n)*{re.escape(style.end)}"
        thought = f"thought[lazy]: {build_regex_term(inside if is_reasoning_open else re.escape(style.begin) + inside)}"
        lead = f"lead: thought{'' if is_reasoning_open else '?'}\n{thought}"
    return _prefix_grammar(f"lead GAP @body\n{lead}\nTEXT: /(.|\\n)*/", first, rest)


def constrain_answer(grammar: GrammarSpec) -> GrammarSpec:
    """Return a grammar for output after the reasoning: white space, then what `grammar` matches."""
    try:
        first, *rest = to_llguidance_grammars(grammar)
    except (ValueError, TypeError, KeyError, RecursionError):
        return grammar
    return _prefix_grammar("GAP @body", first, rest)


def _prefix_grammar(
    prefix_rule: str, main_grammar: dict[str, Any], other_grammars: list[dict[str, Any]]
) -> GrammarSpec:
    top = {"lark_grammar": f"start: {prefix_rule}\nGAP: /[ \\n]{{0,4}}/\n"}
    return GrammarSpec("grammar", json.dumps({"grammars": [top, {**main_grammar, "name": "body"}, *other_grammars]}))
