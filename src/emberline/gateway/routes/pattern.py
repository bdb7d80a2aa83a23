"""Pattern: a regular expression that takes time only in proportion to the text, whatever its author wrote: no
backtracking, so none of it can be catastrophic. What that rules out (backreferences, looking around, word boundaries)
is refused when it is read (pattern_reader.py).

Every character, dot or class of it is a position; `follow` says which positions may come next. All that are possible
are tried at once, as the bits of a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

MOST_POSITIONS = 256  # counted after {n,m} is written out
LONGEST = 16_384  # characters of a text that are looked at
KEPT = 4096  # steps remembered

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
    """A piece of the expression: whether it may be empty, and the positions it may begin and end with."""

    empty: bool
    first: int
    last: int


@dataclass(slots=True)
class Pattern:
    accepts: list[Accepts] = field(default_factory=list)  # of each position
    follow: list[int] = field(default_factory=list)
    whole: Part = field(default_factory=lambda: Part(True, 0, 0))
    from_start: bool = False
    to_end: bool = False
    _steps: dict[tuple[int, str], tuple[int, bool]] = field(default_factory=dict)

    def found_in(self, text: str) -> bool:
        """Anywhere, unless it is anchored."""
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
        """The positions that may come after this character, and whether the whole may end with it."""
        known = self._steps.get((state, character))
        if known is not None:
            return known
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

    # -- while it is read ----------------------------------------------------------------------------------------------

    def one(self, accepts: Accepts) -> Part:
        if len(self.accepts) >= MOST_POSITIONS:
            raise ValueError(f"it is longer than {MOST_POSITIONS} characters, with all repetitions written out")
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
        """Once or more."""
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
    """The character that is meant by a backslash and this one."""
    if letter in _ESCAPES:
        return _ESCAPES[letter]
    if letter.isalnum():
        raise ValueError(f"\\{letter} is not known here")
    return letter
