"""Scanner: the matches of a gateway's rules in a text.

It also finds the end of a growing text that is still undecided."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable
from typing import NamedTuple

from emberline.gateway.guardrails.finding import Action, Check, Finding
from emberline.gateway.guardrails.normalized import NormalizedText
from emberline.gateway.guardrails.patterns import FINDERS, LONGEST
from emberline.gateway.guardrails.policy import Kind, PatternRule

_ORDER: dict[Action, int] = {"flag": 0, "redact": 1, "block": 2}

# The end of a text that may become part of a match when the text continues: one word, groups of digits with spaces, an
# account number in groups, the first line of a private key.
_WORD = string.ascii_letters + string.digits + "_.,%+@:()-\\"
_NUMBERS = re.compile(r"(?:[0-9().+,-]{1,40}(?:[ \t]?[\n\r]{1,2}[ \t]?|[ \t]{1,2}| - ?))+[^\s]*\Z")
_ACCOUNT = re.compile(r"(?<!\w)[A-Za-z]{2}\d{2}(?:[ .\t\n\r-]{0,3}[A-Za-z0-9])*+[ .\t\n\r-]{0,3}\Z")
_FIRST_LINE = re.compile(r"-----B[A-Z0-9 ]{0,60}(?:-{1,5}\s{0,4}[A-Za-z0-9+/=]{0,16})?\Z")
_NUMBERS_SPAN, _ACCOUNT_SPAN, _LINE_SPAN = 96, 120, 160


class Span(NamedTuple):
    start: int
    end: int
    rule: PatternRule
    kind: Kind


class Scanner:
    def __init__(self, rules: Iterable[PatternRule], check: Check) -> None:
        self._rules = [(rule, kind) for rule in rules for kind in rule.find]
        self._check: Check = check
        self._keys = any(kind == "private_key" for _, kind in self._rules)
        self._accounts = any(kind == "iban" for _, kind in self._rules)

    def __bool__(self) -> bool:
        return bool(self._rules)

    @property
    def strictest(self) -> str:
        """The name of a rule that redacts or blocks, or "" if all rules only flag."""
        return next((rule.name for rule, _ in self._rules if rule.action != "flag"), "")

    def find(self, text: str, start: int = 0) -> list[Span]:
        """Return the matches from `start` on, ordered by position, one for each rule that matches."""
        normalized = NormalizedText(text)
        begin, to_original = normalized.position(start), normalized.written
        matches = [
            Span(to_original(first), to_original(last), rule, kind)
            for rule, kind in self._rules
            for first, last in FINDERS[kind](normalized.text, begin)
        ]
        return sorted(matches, key=lambda match: (match.start, match.end))

    def undecided(self, text: str, start: int) -> int:
        """Return the position from which on more text may create or remove a match."""
        if not self._rules:
            return len(text)
        normalized = NormalizedText(text)
        return normalized.written(self._undecided(normalized.text, normalized.position(start)))

    def _undecided(self, text: str, start: int) -> int:
        end = len(text)
        begins = [max(start, end - LONGEST, len(text.rstrip(_WORD)))]
        if (numbers := _NUMBERS.search(text, max(start, end - _NUMBERS_SPAN))) is not None:
            begins.append(numbers.start())
        if self._accounts and (account := _ACCOUNT.search(text, max(start, end - _ACCOUNT_SPAN))) is not None:
            begins.append(account.start())
        if self._keys and (line := _FIRST_LINE.search(text, max(start, end - _LINE_SPAN))) is not None:
            begins.append(line.start())
        return min(begins)

    def finding(self, span: Span) -> Finding:
        return Finding(span.rule.name, span.kind, self._check, span.rule.action)


def redacted(text: str, spans: Iterable[Span]) -> str:
    """Return the text with a label in place of each match to redact; overlapping matches are merged."""
    parts, at = [], 0
    for start, end, label in cuts(spans):
        parts += [text[at:start], label]
        at = end
    return "".join([*parts, text[at:]])


def cuts(spans: Iterable[Span]) -> list[tuple[int, int, str]]:
    """Return start, end and label of each range to redact; overlapping matches are merged."""
    ranges: list[tuple[int, int, str]] = []
    for match in spans:
        if match.rule.action != "redact":
            continue
        if ranges and match.start < ranges[-1][1]:
            start, end, label = ranges[-1]
            ranges[-1] = (start, max(end, match.end), label)
        else:
            ranges.append((match.start, match.end, f"[{match.kind}]"))
    return ranges


def worst(findings: Iterable[Finding]) -> Action | None:
    return max((each.action for each in findings), key=_ORDER.__getitem__, default=None)
