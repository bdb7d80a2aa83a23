"""Builds Lark grammars with correct escaping, from literals, regexes, special tokens and grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from emberline.core.params import GrammarSpec


def build_literal_term(text: str, special_tokens: Mapping[str, int] | None = None) -> str:
    """Return a Lark term that matches exactly `text`. Special tokens in it are matched by token id."""
    if not special_tokens:
        return json.dumps(text)
    pieces = re.split(f"({'|'.join(map(re.escape, special_tokens))})", text)
    return " ".join(
        f"<[{special_tokens[part]}]>" if part in special_tokens else json.dumps(part) for part in pieces if part
    )


def build_regex_term(regex: str) -> str:
    """Return the regex as a Lark pattern, between slashes."""
    escaped = re.sub(r"\\.|/|\n", lambda m: {"/": r"\/", "\n": r"\n"}.get(m[0], m[0]), regex, flags=re.DOTALL)
    return f"/{escaped}/"


def to_llguidance_grammars(grammar: GrammarSpec) -> list[dict[str, Any]]:
    """Convert a grammar to llguidance's list of grammars. Matching starts with the first grammar."""
    match grammar.kind:
        case "json_object":
            return [{"json_schema": {"type": "object"}}]
        case "json_schema":
            return [{"json_schema": json.loads(grammar.text)}]
        case "regex":
            return [{"lark_grammar": f"start: {build_regex_term(grammar.text)}"}]
        case "choice":
            return [
                {
                    "lark_grammar": "start: "
                    + " | ".join(build_literal_term(choice) for choice in json.loads(grammar.text))
                }
            ]
        case "grammar" if grammar.text.lstrip().startswith("{"):
            return [dict(part) for part in json.loads(grammar.text)["grammars"]]
        case "grammar":
            return [{"lark_grammar": grammar.text}]


def build_either_grammar(first: GrammarSpec, second: GrammarSpec) -> GrammarSpec:
    """Return a grammar that matches what `first` or `second` matches.

    Only one of the two may refer to named grammars.
    """
    a, *rest_a = to_llguidance_grammars(first)
    b, *rest_b = to_llguidance_grammars(second)
    top = {"lark_grammar": "start: @first | @second"}
    named = [{**a, "name": "first"}, {**b, "name": "second"}]
    return GrammarSpec("grammar", json.dumps({"grammars": [top, *named, *rest_a, *rest_b]}))
