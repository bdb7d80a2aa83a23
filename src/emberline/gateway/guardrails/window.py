"""Window: a text that comes in pieces. What is decided can go; what may still become part of a finding is held back, so
that not one character of one ever leaves, however the text was cut. `stream.py` lets events go by it.

Series: texts that clients put together, such as the parts of one message. They are read as one text, with and without a
line between two parts, as those of a whole reply are (`inspection.py`)."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from emberline.gateway.guardrails.scanner import Scanner, Span, cuts
from emberline.gateway.guardrails.texts import Path, Text

CONTEXT = 16  # characters that are kept of what has gone: finders look at what stands before
AT_ONCE = 1 << 14  # characters that `look` takes at once: all finders together take some milliseconds for them


class Placed(NamedTuple):
    """Where a piece is in a window. Positions are of the window's whole text."""

    window: Window
    start: int
    end: int
    piece: Piece

    @property
    def is_decided(self) -> bool:
        return self.end <= self.window.decided


@dataclass(slots=True)
class Piece:
    """Part of a text, which lies in an event."""

    at: Text
    placed: list[Placed] = field(default_factory=list)  # one for each window that reads it
    cuts: list[tuple[int, int, str]] = field(default_factory=list)  # positions in it; below 0: begun before it

    @property
    def is_decided(self) -> bool:
        return all(each.is_decided for each in self.placed)

    def edit(self) -> bool:
        """In its event, in place. False: nothing of it was cut."""
        if not self.cuts:
            return False
        text, parts, at = self.at.text, [], 0
        for start, end, label in sorted(self.cuts):
            if start >= at:
                parts += [text[at:start], label]
            at = max(at, min(len(text), end))
        self.at.holder[self.at.key] = "".join([*parts, text[at:]])
        return True


class Window:
    def __init__(self, scanner: Scanner, joint: str = "") -> None:
        """`joint`: what stands between two parts."""
        self._scanner, self._joint = scanner, joint
        self._text = ""
        self._base = 0  # where it begins
        self._decided = 0
        self._from = 0  # where to look from: what went in a pause is looked at again with what follows
        self._placed: list[Placed] = []  # not wholly decided
        self._coming: deque[str] = deque()  # has been added, and not been looked at
        self._end = 0  # of all that was added

    @property
    def decided(self) -> int:
        return self._decided

    def joined_by(self, joint: str) -> Window:
        """The same text so far, to be continued with another joint."""
        made = Window(self._scanner, joint)
        made._text, made._base, made._decided, made._from = self._text, self._base, self._decided, self._from
        made._coming, made._end = self._coming.copy(), self._end
        for each in self._placed:
            made._place(each.piece, each.start)
        return made

    def add(self, piece: Piece, *, is_new_part: bool = False) -> int:
        """Return where it begins."""
        text = piece.at.text
        if is_new_part:
            self._coming.append(self._joint)
            self._end += len(self._joint)
        start = self._end
        self._coming += (text[at : at + AT_ONCE] for at in range(0, len(text), AT_ONCE))
        self._end += len(text)
        self._place(piece, start)
        return start

    @property
    def is_behind(self) -> bool:
        """`look` has taken part of what was added, and is to be called again."""
        return bool(self._coming)

    def _place(self, piece: Piece, start: int) -> None:
        placed = Placed(self, start, start + len(piece.at.text), piece)
        self._placed.append(placed)
        piece.placed.append(placed)

    def look(self, *, last: bool = False) -> list[Span]:
        """What has been found by now and cannot change. `last`: nothing follows, or not before this must go."""
        taken = 0
        while self._coming and taken + len(self._coming[0]) <= AT_ONCE:
            taken += len(self._coming[0])
            self._text += self._coming.popleft()
        last = last and not self._coming
        text, start = self._text, self._from - self._base
        found = self._scanner.find(text, start)
        undecided = self._before_findings(found, self._scanner.undecided(text, start), len(text))
        until = len(text) if last else undecided
        done = [span for span in found if span.end <= until and span.end + self._base > self._decided]
        for cut_start, cut_end, label in cuts(done):
            self._cut(self._base + cut_start, self._base + cut_end, label)
        spans = [span._replace(start=span.start + self._base, end=span.end + self._base) for span in done]
        self._go(max(until, self._decided - self._base), undecided)
        return spans

    def release(self) -> None:
        """Nothing in it is held back any longer: another window decides about the same text."""
        self._decided = sys.maxsize

    @property
    def looks_from(self) -> int:
        return self._from

    @staticmethod
    def _before_findings(found: list[Span], until: int, end: int) -> int:
        """The last position up to `until` that lies in no finding. One that reaches the text's end may go on."""
        while open_ := [s.start for s in found if s.start < until and (s.end > until or s.end == end)]:
            until = min(open_)
        return until

    def _cut(self, start: int, end: int, label: str) -> None:
        for placed in self._placed:
            if placed.start < end and start < placed.end:
                first = start >= placed.start or placed is self._placed[0]
                begin = max(start - placed.start, 0 if first else -1)
                placed.piece.cuts.append((begin, end - placed.start, label))

    def _go(self, until: int, undecided: int) -> None:
        self._decided, self._from = self._base + until, self._base + min(until, undecided)
        self._placed = [placed for placed in self._placed if placed.end > self._decided]
        gone = max(0, min(until, undecided) - CONTEXT)
        self._text, self._base = self._text[gone:], self._base + gone


class Series:
    def __init__(self, scanner: Scanner) -> None:
        self.windows = [Window(scanner)]  # for a while after a part began a second one, with a line between
        self._part: Path | None = None
        self._began = 0  # where the part did, in the second window

    def add(self, text: Text) -> Piece:
        is_new_part = self._part is not None and self._part != text.path
        self._part, piece = text.path, Piece(text)
        if is_new_part and len(self.windows) == 1:
            self.windows.append(self.windows[0].joined_by("\n"))
        starts = [window.add(piece, is_new_part=is_new_part) for window in self.windows]
        if is_new_part:
            self._began = starts[-1]
        return piece

    @property
    def is_behind(self) -> bool:
        return any(window.is_behind for window in self.windows)

    def look(self, *, last: bool = False) -> list[tuple[Window, Span]]:
        found = [(window, span) for window in self.windows for span in window.look(last=last)]
        if len(self.windows) > 1 and self.windows[1].looks_from > self._began:
            self.windows.pop().release()
        return found
