"""TextWindow: a text that arrives in pieces, of which the decided part can be released.

What may still become part of a match is held back, so that not one character of a match is released, however the text
was split. `stream.py` uses it.

TextSeries: texts that clients concatenate, such as the parts of one message. They are searched as one text, with and
without a line break between two parts, as those of a whole reply are (`inspection.py`)."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from emberline.gateway.guardrails.scanner import Scanner, Span, cuts
from emberline.gateway.guardrails.texts import Path, Text

CONTEXT = 16  # kept of the released text, because finders look at what precedes a match
AT_ONCE = 1 << 14  # scanned in one step; all finders together take some milliseconds for it


class Placed(NamedTuple):
    """The position of a piece in a window, counted from the start of the window's whole text."""

    window: Window
    start: int
    end: int
    piece: Piece

    @property
    def is_decided(self) -> bool:
        return self.end <= self.window.decided


@dataclass(slots=True)
class Piece:
    """A part of a text, contained in one event."""

    at: Text
    placed: list[Placed] = field(default_factory=list)  # one for each window that scans it
    cuts: list[tuple[int, int, str]] = field(default_factory=list)  # positions in the piece; negative: begun before it

    @property
    def is_decided(self) -> bool:
        return all(each.is_decided for each in self.placed)

    def edit(self) -> bool:
        """Cut the redacted ranges from the event, in place. Returns False if there are none."""
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
        """`separator` is put between two parts."""
        self._scanner, self._joint = scanner, joint
        self._text = ""
        self._base = 0  # position at which `_text` begins
        self._decided = 0
        self._from = 0  # text released at an interruption is scanned again with what follows
        self._placed: list[Placed] = []  # of pieces that are not wholly decided
        self._coming: deque[str] = deque()  # added, but not scanned yet
        self._end = 0  # position after all added text

    @property
    def decided(self) -> int:
        return self._decided

    def joined_by(self, joint: str) -> Window:
        """Return a window with the same text so far that continues with another separator."""
        copy = Window(self._scanner, joint)
        copy._text, copy._base, copy._decided, copy._from = self._text, self._base, self._decided, self._from
        copy._coming, copy._end = self._coming.copy(), self._end
        for each in self._placed:
            copy._place(each.piece, each.start)
        return copy

    def add(self, piece: Piece, *, is_new_part: bool = False) -> int:
        """Append a piece and return the position at which it begins."""
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
        """Whether `scan` must be called again, because it scanned only a part of the added text."""
        return bool(self._coming)

    def _place(self, piece: Piece, start: int) -> None:
        placed = Placed(self, start, start + len(piece.at.text), piece)
        self._placed.append(placed)
        piece.placed.append(placed)

    def look(self, *, last: bool = False) -> list[Span]:
        """Return the matches that are now decided; with `last` the whole text is, even if more may follow."""
        scanned = 0
        while self._coming and scanned + len(self._coming[0]) <= AT_ONCE:
            scanned += len(self._coming[0])
            self._text += self._coming.popleft()
        last = last and not self._coming
        text, start = self._text, self._from - self._base
        matches = self._scanner.find(text, start)
        undecided = self._before_findings(matches, self._scanner.undecided(text, start), len(text))
        until = len(text) if last else undecided
        decided = [match for match in matches if match.end <= until and match.end + self._base > self._decided]
        for cut_start, cut_end, label in cuts(decided):
            self._cut(self._base + cut_start, self._base + cut_end, label)
        moved = [match._replace(start=match.start + self._base, end=match.end + self._base) for match in decided]
        self._go(max(until, self._decided - self._base), undecided)
        return moved

    def release(self) -> None:
        """Hold nothing back any longer: another window decides about the same text."""
        self._decided = sys.maxsize

    @property
    def looks_from(self) -> int:
        return self._from

    @staticmethod
    def _before_findings(found: list[Span], until: int, end: int) -> int:
        """Return the last position up to `until` in no match; one at the end of the text may continue."""
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
        dropped = max(0, min(until, undecided) - CONTEXT)
        self._text, self._base = self._text[dropped:], self._base + dropped


class Series:
    def __init__(self, scanner: Scanner) -> None:
        self.windows = [Window(scanner)]  # for a while after a new part also one with a line break between
        self._part: Path | None = None
        self._began = 0  # of the newest part, in the second window

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
        matches = [(window, match) for window in self.windows for match in window.look(last=last)]
        if len(self.windows) > 1 and self.windows[1].looks_from > self._began:
            self.windows.pop().release()
        return matches
