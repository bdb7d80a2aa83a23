r"""Rewrites regular expressions so that \d, \w and \s match ASCII characters only, as in vLLM and OpenAI's API.

The library's classes are Unicode's: a small model often writes digits of other scripts where they are allowed."""

from __future__ import annotations

import re

_CLASSES = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
    r"\s": r"[\t\n\v\f\r\x20]",
    r"\S": r"[^\t\n\v\f\r\x20]",
}
_ESCAPE = re.compile(r"\\.", re.DOTALL)
# What a Lark grammar consists of besides names and operators; only the regexes are rewritten.
_LARK_TOKEN = re.compile(
    r"""(?P<comment>(?://|\#)[^\n]*)
      | (?P<string>"(?:\\.|[^"\\])*")
      | (?P<regex>/(?:\\.|[^/\\])+/)""",
    re.DOTALL | re.VERBOSE,
)


def rewrite_regex(pattern: str) -> str:
    """Return the regex (Rust syntax) with ASCII classes. A class may stand inside another: `[a[0-9]]`."""
    return _ESCAPE.sub(lambda escape: _CLASSES.get(escape[0], escape[0]), pattern)


def rewrite_lark(grammar: str) -> str:
    """Return the Lark grammar with ASCII classes in its regexes."""
    return _LARK_TOKEN.sub(lambda token: rewrite_regex(token[0]) if token["regex"] else token[0], grammar)
