"""NormalizedText: a text in the form in which the patterns search it.

Digits and letters of other widths and scripts become ASCII. All kinds of spaces become one kind, and so do dashes and
dots. Invisible characters are removed. A position in the normalized text can be mapped to the original text, so that
redactions are cut out of the original.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right

_ESCAPE = re.compile(
    r"\\(?:u([0-9A-Fa-f]{4})|[\"\\/bfnrt])"
)  # of JSON within text, such as the arguments of a tool call
_HIDDEN = "\u200b"  # any character that is removed
# Invisible: format characters (zero-width space and joiners, soft hyphen, direction marks, tags), variation selectors,
# the frame of a keycap and the grapheme joiner.
_INVISIBLE = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u20e3\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff"
)
_REMOVED = re.compile(f"[{_INVISIBLE}]")
_DOTS = "\u00b7\u2022\u2024\u2027\u2219\u22c5\u3002\u30fb\uff0e\uff61\uff65"
_DASHES = "\u2043\u207b\u208b\u2212\u30fc\uff0d\uff70"  # in addition to Unicode's category of dashes
# Letters, digits and signs of other widths, in circles and in mathematical alphabets.
_COMPATIBLE = ((0x2070, 0x208F), (0x2460, 0x24FF), (0xFE50, 0xFE70), (0xFF01, 0xFF5F), (0x1D400, 0x1D800))


class _TranslationTable(dict[int, "int | str | None"]):
    """A table for `str.translate` that computes the entry of a character when the character first occurs."""

    def __missing__(self, code: int) -> int | str | None:
        folded = self[code] = code if code < 0x80 else _normalize_character(chr(code))
        return folded


_TABLE = _TranslationTable()


def _normalize_character(character: str) -> int | str | None:
    """Return the replacement of a character, or None if the character is removed."""
    code = ord(character)
    if _REMOVED.match(character):
        return None
    if character in _DOTS:
        return "."
    if character in _DASHES:
        return "-"
    if code == 0x85:
        return "\n"
    match unicodedata.category(character):
        case "Nd":
            return str(unicodedata.decimal(character))
        case "Zs" | "Zl" | "Zp":
            return " "
        case "Pd":
            return "-"
    if any(first <= code < last for first, last in _COMPATIBLE):
        plain = unicodedata.normalize("NFKC", character).strip("()")
        if len(plain) == 1 and plain.isascii():
            return plain
    return code


class NormalizedText:
    __slots__ = ("_removed", "_shifted", "text")

    def __init__(self, original: str) -> None:
        if "\\" in original:
            original = _ESCAPE.sub(_decode_escape, original)  # keeps the length
        self._removed: list[int] = []  # positions in the original text
        if not original.isascii():
            self._removed = [found.start() for found in _REMOVED.finditer(original)]
            original = original.translate(_TABLE)
        self.text = original
        self._shifted = [at - number for number, at in enumerate(self._removed)]

    def to_original(self, position: int) -> int:
        """Return the position in the original text of a position in the normalized text."""
        return position + bisect_right(self._shifted, position) if self._shifted else position

    def to_normalized(self, original_position: int) -> int:
        """Return the normalized position of an original position.

        If the character there was removed, return the position of the next character that was not removed.
        """
        return original_position - bisect_left(self._removed, original_position) if self._removed else original_position


def _decode_escape(match: re.Match[str]) -> str:
    """Return the character that a JSON escape stands for.

    It is padded with invisible characters to the length of the escape, so that positions do not shift.
    """
    if match[1] is not None:
        return chr(int(match[1], 16)) + _HIDDEN * 5
    return ("\n" if match[0] in (r"\n", r"\r") else " ") + _HIDDEN
