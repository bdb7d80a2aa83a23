r"""Pattern: a regular expression of a route, compiled by RE2.

RE2's \d, \w and \s are ASCII only. They are translated to Unicode classes with the same meaning as in Python's `re`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from emberline.core.linear_regex import MAX_PATTERN_CHARS, compile_linear_regex

MAX_TEXT_CHARS = 16_384  # the rest of a text is not searched

# A replacement inside brackets begins and ends with \p{..} or a range, so that a - beside it cannot form a new range.
_POSITIVE_CLASSES = {
    "d": r"\p{Nd}",
    "w": r"\p{L}_\p{N}",
    "s": r"\p{Zs}\t-\r\x1c-\x1f\x85\p{Zl}\p{Zp}",
}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_BRACKETS_OR_ESCAPE = re.compile(r"\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*(?:\]|\Z)|\\(.)", re.DOTALL)
_END_OF_LETTERS = 0x40000  # no code point from here on is a letter, a digit or a space
_COMBINING_IOTA = "\u0345"


@dataclass(frozen=True, slots=True)
class Pattern:
    compiled: Any  # RE2's object, which has no type annotations

    def is_found_in(self, text: str) -> bool:
        """Return whether the pattern matches somewhere in the first MAX_TEXT_CHARS characters of the text."""
        return self.compiled.search(_encode_text(text[:MAX_TEXT_CHARS])) is not None


def compile_pattern(pattern: str) -> Pattern:
    """Compile a regular expression. Raise ValueError with the reason if it is unsupported or too large."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ValueError(f"the pattern must have at most {MAX_PATTERN_CHARS} characters, not {len(pattern)}")
    translated = _translate_to_re2(pattern)
    try:
        return Pattern(compile_linear_regex(translated))
    except ValueError:
        compile_linear_regex(pattern)  # whose error quotes the pattern as it was written, not its translation
        raise


def _encode_text(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # JSON may contain half of a surrogate pair; it is searched as U+FFFD
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _translate_to_re2(pattern: str) -> str:
    r"""Return the pattern with Unicode classes instead of \d, \w, \s, \D, \W and \S."""

    def replace(found: re.Match[str]) -> str:
        if found[1] is None:
            return _ESCAPE.sub(lambda escape: _translate_in_brackets(escape[1]), found[0])
        return _translate_escape(found[1])

    return _BRACKETS_OR_ESCAPE.sub(replace, pattern)


def _translate_escape(letter: str) -> str:
    if letter in _POSITIVE_CLASSES:
        return f"[{_POSITIVE_CLASSES[letter]}]"
    if letter in ("D", "W", "S"):
        return f"[^{_POSITIVE_CLASSES[letter.lower()]}]"
    if letter in ("C", "Q"):  # RE2 knows them: one byte, and text without special characters up to \E
        raise ValueError(f"the escape \\{letter} is not supported")
    return _keep_escape(letter)


def _translate_in_brackets(letter: str) -> str:
    if letter == "D":
        return r"\P{Nd}"
    if letter in ("W", "S"):
        return _complement_ranges(letter)
    return _POSITIVE_CLASSES.get(letter) or _keep_escape(letter)


def _keep_escape(letter: str) -> str:
    if letter.isascii() or letter.isalnum():
        return f"\\{letter}"
    return letter  # RE2 rejects a backslash before a non-ASCII character


@cache
def _complement_ranges(letter: str) -> str:
    r"""Return the characters of \W or \S as ranges, because RE2 cannot negate a part of a class."""
    characters = "".join(map(chr, range(_END_OF_LETTERS)))
    if letter == "W":
        # (?i) would add the letter iota to \W, because it is the combining iota's other case.
        characters = characters.replace(_COMBINING_IOTA, "a")
    spans = [found.span() for found in re.finditer(rf"\{letter}+", characters)]
    ranges = "".join(rf"\x{{{start:x}}}-\x{{{end - 1:x}}}" for start, end in spans)
    edge = r"\p{Zs}" if letter == "W" else r"\p{L}"
    return rf"{edge}{ranges}\x{{{_END_OF_LETTERS:x}}}-\x{{10ffff}}{edge}"
