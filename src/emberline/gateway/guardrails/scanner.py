"""PatternScanner: finds the matches of a gateway's rules in a text.

For a text that still grows, the scanner also finds the position after which more text could change the matches.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable
from typing import NamedTuple

from emberline.gateway.core.guardrail_finding import Action, Check, GuardrailFinding
from emberline.gateway.core.guardrail_policy import PatternKind, PatternRule
from emberline.gateway.guardrails.normalized import NormalizedText
from emberline.gateway.guardrails.patterns import FINDERS, MAX_MATCH_CHARS

_SEVERITY: dict[Action, int] = {"flag": 0, "redact": 1, "block": 2}

# The end of a text that may become part of a match when the text continues: one word, groups of digits with spaces, an
# account number in groups, the first line of a private key.
_WORD = string.ascii_letters + string.digits + "_.,%+@:()/-\\"
_NUMBERS = re.compile(r"(?:[0-9().+,/_-]{1,40}(?:[ \t]?[\n\r]{1,2}[ \t]?|[ \t]{1,2}| - ?))+[^\s]*\Z")
_ACCOUNT = re.compile(r"(?<!\w)[A-Za-z]{2}\d{2}(?:[ ./_,\t\n\r-]{0,3}[A-Za-z0-9])*+[ ./_,\t\n\r-]{0,3}\Z")
_FIRST_LINE = re.compile(r"-----B[A-Z0-9 ]{0,60}(?:-{1,5}\s{0,4}[A-Za-z0-9+/=]{0,16})?\Z")
_MAX_NUMBERS_CHARS, _MAX_ACCOUNT_CHARS, _MAX_FIRST_LINE_CHARS = 96, 144, 160


class PatternMatch(NamedTuple):
    start: int
    end: int
    rule: PatternRule
    kind: PatternKind


class RedactionRange(NamedTuple):
    start: int
    end: int
    label: str


class PatternScanner:
    def __init__(self, rules: Iterable[PatternRule], check: Check) -> None:
        self._rules = [(rule, kind) for rule in rules for kind in rule.find]
        self._check: Check = check
        self._finds_private_keys = any(kind == "private_key" for _, kind in self._rules)
        self._finds_ibans = any(kind == "iban" for _, kind in self._rules)

    def __bool__(self) -> bool:
        return bool(self._rules)

    @property
    def first_enforcing_rule(self) -> str:
        """The name of the first rule that redacts or blocks, or "" if all rules only flag."""
        return next((rule.name for rule, _ in self._rules if rule.action != "flag"), "")

    def find_matches(self, text: str, start: int = 0) -> list[PatternMatch]:
        """Return the matches that begin at `start` or later, ordered by position.

        If two rules match the same range, each has its own match.
        """
        normalized = NormalizedText(text)
        begin, to_original = normalized.to_normalized(start), normalized.to_original
        matches = [
            PatternMatch(to_original(first), to_original(last), rule, kind)
            for rule, kind in self._rules
            for first, last in FINDERS[kind](normalized.text, begin)
        ]
        return sorted(matches, key=lambda match: (match.start, match.end))

    def find_undecided_start(self, text: str, start: int) -> int:
        """Return the position after which text that is still to come could create or remove a match.

        `start`: the position at which the search for such a position begins.
        """
        if not self._rules:
            return len(text)
        normalized = NormalizedText(text)
        return normalized.to_original(
            self._find_undecided_start_in_normalized(normalized.text, normalized.to_normalized(start))
        )

    def _find_undecided_start_in_normalized(self, text: str, start: int) -> int:
        end = len(text)
        begins = [max(start, end - MAX_MATCH_CHARS, len(text.rstrip(_WORD)))]
        if (numbers := _NUMBERS.search(text, max(start, end - _MAX_NUMBERS_CHARS))) is not None:
            begins.append(numbers.start())
        if self._finds_ibans and (account := _ACCOUNT.search(text, max(start, end - _MAX_ACCOUNT_CHARS))) is not None:
            begins.append(account.start())
        if (
            self._finds_private_keys
            and (line := _FIRST_LINE.search(text, max(start, end - _MAX_FIRST_LINE_CHARS))) is not None
        ):
            begins.append(line.start())
        return min(begins)

    def make_finding(self, match: PatternMatch) -> GuardrailFinding:
        return GuardrailFinding(match.rule.name, match.kind, self._check, match.rule.action)


def redact_text(text: str, matches: Iterable[PatternMatch]) -> str:
    """Return the text with a label in place of each redacted range. Overlapping matches get one label."""
    parts, at = [], 0
    for start, end, label in merge_redaction_ranges(matches):
        parts += [text[at:start], label]
        at = end
    return "".join([*parts, text[at:]])


def merge_redaction_ranges(matches: Iterable[PatternMatch]) -> list[RedactionRange]:
    """Return the ranges to redact, each with its label. Overlapping matches are merged into one range."""
    ranges: list[RedactionRange] = []
    for match in matches:
        if match.rule.action != "redact":
            continue
        if ranges and match.start < ranges[-1][1]:
            start, end, label = ranges[-1]
            ranges[-1] = RedactionRange(start, max(end, match.end), label)
        else:
            ranges.append(RedactionRange(match.start, match.end, f"[{match.kind}]"))
    return ranges


def most_severe_action(findings: Iterable[GuardrailFinding]) -> Action | None:
    return max((each.action for each in findings), key=_SEVERITY.__getitem__, default=None)
