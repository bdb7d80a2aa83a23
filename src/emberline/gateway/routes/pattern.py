"""Pattern: a regular expression that takes time linear in the text, whatever its author wrote.

It does not backtrack, so a pattern cannot take exponential time. What that excludes (backreferences, lookaround, word
boundaries) is refused by the parser (pattern_parser.py).

Each character, dot or class of the pattern is a position of a Glushkov automaton; `follow` has the positions that may
come next. The set of active positions is the bits of an integer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

MAX_POSITIONS = 256  # after {n,m} is expanded
MAX_TEXT_CHARS = 16_384  # the rest of a text is not searched
MAX_CACHED_STEPS = 4096

CharacterTest: TypeAlias = Callable[[str], bool]

_CLASSES: dict[str, CharacterTest] = {
    "d": str.isdecimal,
    "w": lambda c: c.isalnum() or c == "_",
    "s": str.isspace,
    "D": lambda c: not c.isdecimal(),
    "W": lambda c: not (c.isalnum() or c == "_"),
    "S": lambda c: not c.isspace(),
}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}


@dataclass(slots=True)
class PatternFragment:
    """A part of the expression, with the positions (as bits) that it may begin and end with."""

    can_be_empty: bool
    first_positions: int
    last_positions: int


@dataclass(slots=True)
class Pattern:
    accepts: list[CharacterTest] = field(default_factory=list)  # one test for each position
    follow: list[int] = field(default_factory=list)
    whole: PatternFragment = field(default_factory=lambda: PatternFragment(True, 0, 0))
    anchored_at_start: bool = False
    anchored_at_end: bool = False
    _steps: dict[tuple[int, str], tuple[int, bool]] = field(default_factory=dict)

    def is_found_in(self, text: str) -> bool:
        """Return whether the pattern matches anywhere in the text, or as its anchors require."""
        if self.whole.can_be_empty and not (self.anchored_at_start and self.anchored_at_end):
            return True
        text = text[:MAX_TEXT_CHARS]
        begin = self.whole.first_positions
        state, done = begin, self.whole.can_be_empty
        for character in text:
            state, done = self._step(state, character)
            if done and not self.anchored_at_end:
                return True
            if not self.anchored_at_start:
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
                ends = ends or bool(bit & self.whole.last_positions)
            left ^= bit
        if len(self._steps) >= MAX_CACHED_STEPS:
            self._steps.clear()
        self._steps[state, character] = following, ends
        return following, ends

    # -- for the parser ------------------------------------------------------------------------------------------------

    def add_position(self, accepts: CharacterTest) -> PatternFragment:
        if len(self.accepts) >= MAX_POSITIONS:
            raise ValueError(f"with its repetitions expanded it is longer than {MAX_POSITIONS} characters")
        self.accepts.append(accepts)
        self.follow.append(0)
        bit = 1 << (len(self.accepts) - 1)
        return PatternFragment(False, bit, bit)

    def concatenate(self, before: PatternFragment, after: PatternFragment) -> PatternFragment:
        self._link(before.last_positions, after.first_positions)
        first = before.first_positions | after.first_positions if before.can_be_empty else before.first_positions
        last = before.last_positions | after.last_positions if after.can_be_empty else after.last_positions
        return PatternFragment(before.can_be_empty and after.can_be_empty, first, last)

    def repeat(self, fragment: PatternFragment) -> PatternFragment:
        """Let the fragment repeat, once or more."""
        self._link(fragment.last_positions, fragment.first_positions)
        return fragment

    def _link(self, ends: int, to: int) -> None:
        while ends:
            bit = ends & -ends
            self.follow[bit.bit_length() - 1] |= to
            ends ^= bit


def character_class(letter: str) -> CharacterTest | None:
    return _CLASSES.get(letter)


def unescape(letter: str) -> str:
    """Return the character that a backslash and this letter stand for. Raises ValueError."""
    if letter in _ESCAPES:
        return _ESCAPES[letter]
    if letter.isalnum():
        raise ValueError(f"\\{letter} is not supported")
    return letter
