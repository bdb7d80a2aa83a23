"""Window: a text that comes in pieces. What is decided can go; what may still become part of a finding is held back, so
that not one character of one ever leaves, however the text was cut. `stream.py` lets events go by it."""

from __future__ import annotations

from dataclasses import dataclass, field

from emberline.gateway.guardrails.scanner import Scanner, Span, cuts
from emberline.gateway.guardrails.texts import Text

CONTEXT = 16  # characters that are kept of what has gone: finders look at what stands before


@dataclass(slots=True)
class Piece:
    """Part of the text, which lies in an event. Positions are of the whole text."""

    at: Text
    start: int
    cuts: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.at.text)

    def edit(self) -> bool:
        """In its event, in place. False: nothing of it was cut."""
        if not self.cuts:
            return False
        parts, at = [], 0
        for start, end, label in self.cuts:
            parts += [self.at.text[at : max(0, start - self.start)], label if start >= self.start else ""]
            at = min(len(self.at.text), end - self.start)
        self.at.holder[self.at.key] = "".join([*parts, self.at.text[at:]])
        return True


class Window:
    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self._text = ""
        self._base = 0  # where it begins
        self._decided = 0
        self._pieces: list[Piece] = []  # not wholly decided

    @property
    def decided(self) -> int:
        return self._decided

    def add(self, text: Text) -> Piece:
        piece = Piece(text, self._base + len(self._text))
        self._text += text.text
        self._pieces.append(piece)
        return piece

    def look(self, *, last: bool = False) -> list[Span]:
        """What has been found by now and cannot change. `last`: nothing follows."""
        text, start = self._text, self._decided - self._base
        found = self._scanner.find(text, start)
        until = len(text) if last else self._scanner.undecided(text, start)
        growing = len(text) if not last else -1  # what reaches the end may not have ended
        while open_ := [s.start for s in found if s.start < until and (s.end > until or s.end == growing)]:
            until = min(open_)
        done = [span for span in found if span.end <= until]
        for cut_start, cut_end, label in cuts(done):
            self._cut(self._base + cut_start, self._base + cut_end, label)
        spans = [span._replace(start=span.start + self._base, end=span.end + self._base) for span in done]
        self._go(until)
        return spans

    def _cut(self, start: int, end: int, label: str) -> None:
        for piece in self._pieces:
            if piece.start < end and start < piece.end:
                piece.cuts.append((start, end, label))

    def _go(self, until: int) -> None:
        self._decided = self._base + until
        self._pieces = [piece for piece in self._pieces if piece.end > self._decided]
        gone = max(0, until - CONTEXT)
        self._text, self._base = self._text[gone:], self._base + gone
