"""RuleWriter: collects the Lark rules and JSON schemas of one grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from emberline.api.lark import build_literal_term, build_regex_term
from emberline.core.params import GrammarSpec

ANY_TEXT = r"(.|\n)*"
MAX_OTHER_PARAMETERS = 16  # of a call: parameters that the tool's schema does not list


class RuleWriter:
    """`special_tokens` maps markers that are single tokens to their ids; the grammar matches them by id."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self.special_tokens = special_tokens
        self._rules: dict[str, str] = {}
        self._schemas: list[dict[str, Any]] = []

    @property
    def num_schemas(self) -> int:
        return len(self._schemas)

    def literal(self, text: str) -> str:
        """Return a term that matches exactly `text`, or no term if the text is empty."""
        return build_literal_term(text, self.special_tokens) if text else ""

    def regex(self, pattern: str) -> str:
        return build_regex_term(pattern)

    def any_text(self) -> str:
        """Return a term that matches any text without special tokens."""
        return self.add_rule("TEXT", build_regex_term(ANY_TEXT))

    def text_until(self, end: str) -> str:
        """Return a term that matches any text up to the first `end`, and `end` itself."""
        if any(end.startswith(token) for token in self.special_tokens):
            return f"{self.any_text()} {self.literal(end)}"
        name = "until" + "".join(f"_{ord(char):x}" for char in end)
        return self.add_rule(name, build_regex_term(ANY_TEXT + re.escape(end).replace("\\\n", r"\n")), is_lazy=True)

    def add_rule(self, name: str, expression: str, is_lazy: bool = False) -> str:
        """Add a rule unless it exists, and return its name. A lazy rule matches as little text as possible."""
        self._rules[f"{name}[lazy]" if is_lazy else name] = expression
        return name

    def add_schema(self, name: str, schema: dict[str, Any]) -> str:
        """Return a term that matches a JSON value of the schema."""
        self._schemas.append({"name": name, "json_schema": schema})
        return f"@{name}"

    def write_sequence(
        self, name: str, items: Sequence[tuple[str, bool]], separator: str = "", other: str | None = None
    ) -> str:
        """Return a term for the items in their order, with the separator between those that are there.

        An item is a term, and whether it is required. `other`: a term that may be repeated after the items.
        """
        joint = self.literal(separator)
        others = f"({joint} {other}){{0,{MAX_OTHER_PARAMETERS}}}" if other else ""
        if not joint:
            return " ".join([*(f"({term})" if needed else f"({term})?" for term, needed in items), others]) or '""'
        rest = [f"{name}_rest{i}" for i in range(len(items) + 1)]
        for i, (term, needed) in enumerate(items):
            self.add_rule(rest[i], f"({joint} {term}){'' if needed else '?'} {rest[i + 1]}")
        self.add_rule(rest[-1], others or '""')
        starts = []
        for i, (term, needed) in enumerate(items):
            starts.append(f"{term} {rest[i + 1]}")
            if needed:
                break
        else:
            starts += [f"{other} {others}"] if other else []
            starts.append('""')
        return self.add_rule(name, " | ".join(starts))

    def build(self, start: str) -> GrammarSpec:
        rules = {"start": start, **self._rules}
        text = "\n".join(f"{name}: {expression}" for name, expression in rules.items())
        return GrammarSpec("grammar", json.dumps({"grammars": [{"lark_grammar": text}, *self._schemas]}))
