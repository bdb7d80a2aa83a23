"""Pattern: a regular expression whose matching time is linear in the length of the text.

Matching does not backtrack, so no pattern can take exponential time. The parser (pattern_parser.py) rejects what would
need backtracking: backreferences, lookaround and word boundaries.

Each character, dot or class of the pattern is a position of a Glushkov automaton. `follow` maps a position to the
positions that may come next. A set of positions is stored as the bits of an integer.
"""

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
    """A part of the expression, with the sets of positions (as bits) at which it may begin and end."""

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
        """Return whether the pattern matches somewhere in the text, as its anchors ^ and $ require."""
        if self.whole.can_be_empty and not (self.anchored_at_start and self.anchored_at_end):
            return True
        text = text[:MAX_TEXT_CHARS]
        begin = self.whole.first_positions
        state, done = begin, self.whole.can_be_empty
        for character in text:
            state, done = self._consume_character(state, character)
            if done and not self.anchored_at_end:
                return True
            if not self.anchored_at_start:
                state |= begin
            elif not state and not done:
                return False
        return done

    def _consume_character(self, active_positions: int, character: str) -> tuple[int, bool]:
        """Return the positions that are active after this character, and whether a match ends with the character."""
        cached = self._steps.get((active_positions, character))
        if cached is not None:
            return cached
        following, ends, left = 0, False, active_positions
        while left:
            bit = left & -left
            position = bit.bit_length() - 1
            if self.accepts[position](character):
                following |= self.follow[position]
                ends = ends or bool(bit & self.whole.last_positions)
            left ^= bit
        if len(self._steps) >= MAX_CACHED_STEPS:
            self._steps.clear()
        self._steps[active_positions, character] = following, ends
        return following, ends

    # -- for the parser ------------------------------------------------------------------------------------------------

    def add_position(self, accepts: CharacterTest) -> PatternFragment:
        if len(self.accepts) >= MAX_POSITIONS:
            raise ValueError(
                f"the pattern is longer than {MAX_POSITIONS} characters after its repetitions are expanded"
            )
        self.accepts.append(accepts)
        self.follow.append(0)
        bit = 1 << (len(self.accepts) - 1)
        return PatternFragment(False, bit, bit)

    def concatenate(self, before: PatternFragment, after: PatternFragment) -> PatternFragment:
        self._link_positions(before.last_positions, after.first_positions)
        first = before.first_positions | after.first_positions if before.can_be_empty else before.first_positions
        last = before.last_positions | after.last_positions if after.can_be_empty else after.last_positions
        return PatternFragment(before.can_be_empty and after.can_be_empty, first, last)

    def repeat_fragment(self, fragment: PatternFragment) -> PatternFragment:
        """Return the fragment changed so that it may repeat, once or more."""
        self._link_positions(fragment.last_positions, fragment.first_positions)
        return fragment

    def _link_positions(self, end_positions: int, next_positions: int) -> None:
        while end_positions:
            bit = end_positions & -end_positions
            self.follow[bit.bit_length() - 1] |= next_positions
            end_positions ^= bit


def character_class(letter: str) -> CharacterTest | None:
    return _CLASSES.get(letter)


def unescape(letter: str) -> str:
    """Return the character that a backslash and this letter stand for.

    Raise ValueError if the escape is not supported.
    """
    if letter in _ESCAPES:
        return _ESCAPES[letter]
    if letter.isalnum():
        raise ValueError(f"the escape \\{letter} is not supported")
    return letter
