"""TextWindow: a text that arrives in pieces. The part of it that is decided can be passed on.

Text that may still become part of a match is held back. So no character of a match is passed on, however the text is
split into pieces.

TextSeries: texts that clients show as one text, such as the parts of one message. They are searched as one text, with
and without a line break between two parts. `inspection.py` does the same for replies that are not streamed.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from emberline.gateway.guardrails.scanner import PatternMatch, PatternScanner, merge_redaction_ranges
from emberline.gateway.guardrails.texts import JsonText, TextPath

CONTEXT_CHARS = 16  # kept of the released text, because finders look at what precedes a match
MAX_SCAN_CHARS = 1 << 14  # scanned in one step; all finders together take some milliseconds for it


class PiecePosition(NamedTuple):
    """The range of a piece in a window, in characters from the start of the window's whole text."""

    window: TextWindow
    start: int
    end: int
    piece: WindowPiece

    @property
    def can_be_released(self) -> bool:
        return self.end <= self.window.releasable_end


@dataclass(slots=True)
class WindowPiece:
    """The part of a text that one event contains."""

    source: JsonText
    positions: list[PiecePosition] = field(default_factory=list)  # one for each window that scans it
    redactions: list[tuple[int, int, str]] = field(
        default_factory=list
    )  # positions in the piece; negative: begun before it

    @property
    def can_be_released(self) -> bool:
        return all(each.can_be_released for each in self.positions)

    def apply_redactions(self) -> bool:
        """Cut the redacted ranges out of the event, in place. Return False if there are none."""
        if not self.redactions:
            return False
        text, parts, at = self.source.text, [], 0
        for start, end, label in sorted(self.redactions):
            if start >= at:
                parts += [text[at:start], label]
            at = max(at, min(len(text), end))
        self.source.replace("".join([*parts, text[at:]]))
        return True


class TextWindow:
    def __init__(self, scanner: PatternScanner, separator: str = "") -> None:
        """Create an empty window. `separator` is inserted between two parts of a message."""
        self._scanner, self._separator = scanner, separator
        self._text = ""
        self._base = 0  # position at which `_text` begins
        self._decided = 0
        self._scan_from = 0  # text released at an interruption is scanned again with what follows
        self._undecided_positions: list[PiecePosition] = []  # of pieces that are not wholly decided
        self._unscanned: deque[str] = deque()  # added, but not scanned yet
        self._end = 0  # position after all added text

    @property
    def releasable_end(self) -> int:
        return self._decided

    def copy_with_separator(self, separator: str) -> TextWindow:
        """Return a copy of the window that inserts a different separator before the next part."""
        copy = TextWindow(self._scanner, separator)
        copy._text, copy._base, copy._decided, copy._scan_from = self._text, self._base, self._decided, self._scan_from
        copy._unscanned, copy._end = self._unscanned.copy(), self._end
        for each in self._undecided_positions:
            copy._add_position(each.piece, each.start)
        return copy

    def add_piece(self, piece: WindowPiece, *, is_new_part: bool = False) -> int:
        """Append a piece and return its start in the window's whole text."""
        text = piece.source.text
        if is_new_part:
            self._unscanned.append(self._separator)
            self._end += len(self._separator)
        start = self._end
        self._unscanned += (text[at : at + MAX_SCAN_CHARS] for at in range(0, len(text), MAX_SCAN_CHARS))
        self._end += len(text)
        self._add_position(piece, start)
        return start

    @property
    def has_unscanned_text(self) -> bool:
        """Whether a part of the added text was not scanned yet, so that `scan` must be called again."""
        return bool(self._unscanned)

    def _add_position(self, piece: WindowPiece, start: int) -> None:
        position = PiecePosition(self, start, start + len(piece.source.text), piece)
        self._undecided_positions.append(position)
        piece.positions.append(position)

    def scan(self, *, is_last: bool = False) -> list[PatternMatch]:
        """Scan more of the added text, and return the matches that later text can no longer change.

        With `is_last` all matches are returned, even if more text may follow.
        """
        scanned = 0
        while self._unscanned and scanned + len(self._unscanned[0]) <= MAX_SCAN_CHARS:
            scanned += len(self._unscanned[0])
            self._text += self._unscanned.popleft()
        is_last = is_last and not self._unscanned
        text, start = self._text, self._scan_from - self._base
        matches = self._scanner.find_matches(text, start)
        undecided = self._last_position_outside_matches(
            matches, self._scanner.find_undecided_start(text, start), len(text)
        )
        until = len(text) if is_last else undecided
        decided = [match for match in matches if match.end <= until and match.end + self._base > self._decided]
        for cut_start, cut_end, label in merge_redaction_ranges(decided):
            self._add_redaction(self._base + cut_start, self._base + cut_end, label)
        moved = [match._replace(start=match.start + self._base, end=match.end + self._base) for match in decided]
        self._set_releasable_end(max(until, self._decided - self._base), undecided)
        return moved

    def mark_all_releasable(self) -> None:
        """Stop this window from holding back text: a different window scans the same text from now on.

        The other window still holds back text that may become part of a match.
        """
        self._decided = sys.maxsize

    @property
    def scan_start(self) -> int:
        return self._scan_from

    @staticmethod
    def _last_position_outside_matches(matches: list[PatternMatch], until: int, text_end: int) -> int:
        """Return the last position up to `until` that is not inside a match.

        A match that ends at the end of the text counts as open, because it may continue.
        """
        while open_ := [s.start for s in matches if s.start < until and (s.end > until or s.end == text_end)]:
            until = min(open_)
        return until

    def _add_redaction(self, start: int, end: int, label: str) -> None:
        for position in self._undecided_positions:
            if position.start < end and start < position.end:
                first = start >= position.start or position is self._undecided_positions[0]
                begin = max(start - position.start, 0 if first else -1)
                position.piece.redactions.append((begin, end - position.start, label))

    def _set_releasable_end(self, releasable_end: int, undecided_start: int) -> None:
        self._decided, self._scan_from = self._base + releasable_end, self._base + min(releasable_end, undecided_start)
        self._undecided_positions = [position for position in self._undecided_positions if position.end > self._decided]
        dropped = max(0, min(releasable_end, undecided_start) - CONTEXT_CHARS)
        self._text, self._base = self._text[dropped:], self._base + dropped


class TextSeries:
    def __init__(self, scanner: PatternScanner) -> None:
        self.windows = [TextWindow(scanner)]  # for a while after a new part, a second one has a line break before it
        self._part: TextPath | None = None
        self._part_start = 0  # of the newest part, in the second window

    def add_text(self, text: JsonText) -> WindowPiece:
        is_new_part = self._part is not None and self._part != text.path
        self._part, piece = text.path, WindowPiece(text)
        if is_new_part and len(self.windows) == 1:
            self.windows.append(self.windows[0].copy_with_separator("\n"))
        starts = [window.add_piece(piece, is_new_part=is_new_part) for window in self.windows]
        if is_new_part:
            self._part_start = starts[-1]
        return piece

    @property
    def has_unscanned_text(self) -> bool:
        return any(window.has_unscanned_text for window in self.windows)

    def scan(self, *, is_last: bool = False) -> list[tuple[TextWindow, PatternMatch]]:
        matches = [(window, match) for window in self.windows for match in window.scan(is_last=is_last)]
        if len(self.windows) > 1 and self.windows[1].scan_start > self._part_start:
            self.windows.pop().mark_all_releasable()
        return matches
