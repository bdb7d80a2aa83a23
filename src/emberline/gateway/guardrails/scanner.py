"""Scanner: what a gateway's rules find in a text, and which part of a text that goes on is still undecided."""

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

# What can be part of something that is found, so that it may go on: one word, words of digits with a space between, an
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
        """The name of a rule that lets something not pass; "": they all do."""
        return next((rule.name for rule, _ in self._rules if rule.action != "flag"), "")

    def find(self, text: str, start: int = 0) -> list[Span]:
        """By where they begin. What several rules find is there several times."""
        read = NormalizedText(text)
        begin, at = read.position(start), read.written
        found = [
            Span(at(first), at(last), rule, kind)
            for rule, kind in self._rules
            for first, last in FINDERS[kind](read.text, begin)
        ]
        return sorted(found, key=lambda span: (span.start, span.end))

    def undecided(self, text: str, start: int) -> int:
        """From where on more text may make something of it, or unmake it."""
        if not self._rules:
            return len(text)
        read = NormalizedText(text)
        return read.written(self._undecided(read.text, read.position(start)))

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
    """Without what is to be redacted; what overlaps is one."""
    parts, at = [], 0
    for start, end, label in cuts(spans):
        parts += [text[at:start], label]
        at = end
    return "".join([*parts, text[at:]])


def cuts(spans: Iterable[Span]) -> list[tuple[int, int, str]]:
    made: list[tuple[int, int, str]] = []
    for span in spans:
        if span.rule.action != "redact":
            continue
        if made and span.start < made[-1][1]:
            start, end, label = made[-1]
            made[-1] = (start, max(end, span.end), label)
        else:
            made.append((span.start, span.end, f"[{span.kind}]"))
    return made


def worst(findings: Iterable[Finding]) -> Action | None:
    return max((each.action for each in findings), key=_ORDER.__getitem__, default=None)
