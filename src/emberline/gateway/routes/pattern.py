"""Pattern: a regular expression that takes time linear in the text, whatever its author wrote.

It does not backtrack, so a pattern cannot take exponential time. What that excludes (backreferences, lookaround, word
boundaries) is refused by the parser (pattern_parser.py).

Each character, dot or class of the pattern is a position of a Glushkov automaton; `follow` has the positions that may
come next. The set of active positions is the bits of an integer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

MOST_POSITIONS = 256  # after {n,m} is expanded
LONGEST = 16_384  # the rest of a text is not searched
KEPT = 4096

Accepts: TypeAlias = Callable[[str], bool]

_CLASSES: dict[str, Accepts] = {
    "d": str.isdecimal,
    "w": lambda c: c.isalnum() or c == "_",
    "s": str.isspace,
    "D": lambda c: not c.isdecimal(),
    "W": lambda c: not (c.isalnum() or c == "_"),
    "S": lambda c: not c.isspace(),
}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}


@dataclass(slots=True)
class Part:
    """A part of the expression, with the positions (as bits) that it may begin and end with."""

    empty: bool
    first: int
    last: int


@dataclass(slots=True)
class Pattern:
    accepts: list[Accepts] = field(default_factory=list)  # one test for each position
    follow: list[int] = field(default_factory=list)
    whole: Part = field(default_factory=lambda: Part(True, 0, 0))
    from_start: bool = False
    to_end: bool = False
    _steps: dict[tuple[int, str], tuple[int, bool]] = field(default_factory=dict)

    def found_in(self, text: str) -> bool:
        """Return whether the pattern matches anywhere in the text, or as its anchors require."""
        if self.whole.empty and not (self.from_start and self.to_end):
            return True
        text = text[:LONGEST]
        begin = self.whole.first
        state, done = begin, self.whole.empty
        for character in text:
            state, done = self._step(state, character)
            if done and not self.to_end:
                return True
            if not self.from_start:
                state |= begin
            elif not state and not done:
                return False
        return done

    def _step(self, state: int, character: str) -> tuple[int, bool]:
        """Return the positions that may come after this character, and whether a match ends with it."""
        cached = self._steps.get((state, character))
        if cached is not None:
            return cached
        following, ends, left = 0, False, state
        while left:
            bit = left & -left
            position = bit.bit_length() - 1
            if self.accepts[position](character):
                following |= self.follow[position]
                ends = ends or bool(bit & self.whole.last)
            left ^= bit
        if len(self._steps) >= KEPT:
            self._steps.clear()
        self._steps[state, character] = following, ends
        return following, ends

    # -- for the parser ------------------------------------------------------------------------------------------------

    def one(self, accepts: Accepts) -> Part:
        if len(self.accepts) >= MOST_POSITIONS:
            raise ValueError(f"with its repetitions expanded it is longer than {MOST_POSITIONS} characters")
        self.accepts.append(accepts)
        self.follow.append(0)
        bit = 1 << (len(self.accepts) - 1)
        return Part(False, bit, bit)

    def joined(self, before: Part, after: Part) -> Part:
        self._lead(before.last, after.first)
        first = before.first | after.first if before.empty else before.first
        last = before.last | after.last if after.empty else after.last
        return Part(before.empty and after.empty, first, last)

    def again(self, part: Part) -> Part:
        """Let the fragment repeat, once or more."""
        self._lead(part.last, part.first)
        return part

    def _lead(self, ends: int, to: int) -> None:
        while ends:
            bit = ends & -ends
            self.follow[bit.bit_length() - 1] |= to
            ends ^= bit


def class_of(letter: str) -> Accepts | None:
    return _CLASSES.get(letter)


def escaped(letter: str) -> str:
    """Return the character that a backslash and this letter stand for. Raises ValueError."""
    if letter in _ESCAPES:
        return _ESCAPES[letter]
    if letter.isalnum():
        raise ValueError(f"\\{letter} is not supported")
    return letter
