"""RuleWriter: collects the Lark rules and JSON schemas of one grammar."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from emberline.api.lark import build_literal_term, build_regex_term
from emberline.core.params import GrammarSpec

ANY_TEXT = r"(.|\n)*"
MAX_OTHER_PARAMETERS = 16  # of a call: parameters that the tool's schema does not list


class RuleWriter:
    """Collects the rules of one grammar.

    `special_tokens` maps markers that are single tokens to their ids. The grammar matches them by id.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self.special_tokens = special_tokens
        self._rules: dict[str, str] = {}
        self._schemas: list[dict[str, Any]] = []

    @property
    def num_schemas(self) -> int:
        return len(self._schemas)

    def literal(self, text: str) -> str:
        """Return a term that matches exactly `text`, or "" if the text is empty."""
        return build_literal_term(text, self.special_tokens) if text else ""

    def regex(self, pattern: str) -> str:
        return build_regex_term(pattern)

    def text(self, pattern: str = ANY_TEXT) -> str:
        """Return a term that matches text in the form of the regex `pattern`, without special tokens."""
        return self.add_rule(_name_rule("TEXT", pattern).upper(), build_regex_term(pattern))

    def text_until(self, end: str, pattern: str = ANY_TEXT) -> str:
        """Return a term that matches text up to the first `end`, and `end` itself. `pattern` matches the text."""
        at, token = min((end.find(t), t) for t in self.special_tokens if t in end) if self._has_token(end) else (-1, "")
        if token:
            # Before a special token, a pattern matches as much text as possible, including the first part of `end`.
            return f"{self.text(pattern + _escape(end[:at]))} {self.literal(end[at:])}"
        name = _name_rule("until", end, pattern)
        return self.add_rule(name, build_regex_term(pattern + _escape(end)), is_lazy=True)

    def _has_token(self, text: str) -> bool:
        return any(token in text for token in self.special_tokens)

    def add_rule(self, name: str, expression: str, is_lazy: bool = False) -> str:
        """Add or replace the rule called `name`, and return the name. A lazy rule matches as little as possible."""
        self._rules[f"{name}[lazy]" if is_lazy else name] = expression
        return name

    def add_schema(self, name: str, schema: dict[str, Any]) -> str:
        """Return a term that matches a JSON value of the schema."""
        self._schemas.append({"name": name, "json_schema": schema})
        return f"@{name}"

    def write_sequence(
        self, name: str, items: Sequence[tuple[str, bool]], separator: str = "", other: str | None = None
    ) -> str:
        """Return a term for the items in their order, with the separator between the items that are present.

        An item is (term, whether it is required). `other`: a term that may be repeated after the items.
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


def _escape(text: str) -> str:
    return re.escape(text).replace("\\\n", r"\n")


def _name_rule(kind: str, *texts: str) -> str:
    """Return a name for a rule. The name depends only on `kind` and `texts`."""
    return f"{kind}_{zlib.crc32(json.dumps(texts).encode()):08x}"
