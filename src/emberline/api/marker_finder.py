"""MarkerFinder: finds markers in streamed text, whose last characters may be the start of a marker."""

from __future__ import annotations

import re
from collections.abc import Sequence


class MarkerFinder:
    def __init__(self, markers: Sequence[str]) -> None:
        """Create a finder. If two of the markers begin at the same position, it finds the longer one."""
        self._markers = sorted((marker for marker in markers if marker), key=len, reverse=True)
        self._first_chars = frozenset(marker[0] for marker in self._markers)
        self._pattern = re.compile("|".join(map(re.escape, self._markers)) or r"(?!)")

    def find(self, text: str, start: int) -> tuple[int, str | None]:
        """Return the position of the first marker and the marker.

        Without a marker, return (position, None): where an incomplete last marker may begin, or the end of the text.
        """
        if found := self._pattern.search(text, start):
            return found.start(), found[0]
        longest = max((len(marker) for marker in self._markers), default=1) - 1
        for at in range(max(start, len(text) - longest), len(text)):
            if text[at] in self._first_chars and self.is_prefix(text[at:]):
                return at, None
        return len(text), None

    def match(self, text: str, start: int) -> str | None:
        """Return the marker at `start`, "" if more text may complete a marker there, or None."""
        if found := self._pattern.match(text, start):
            return found[0]
        return "" if self.is_prefix(text[start:]) else None

    def is_prefix(self, text: str) -> bool:
        """Return whether a marker begins with the text."""
        return any(marker.startswith(text) for marker in self._markers)
