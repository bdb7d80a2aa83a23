"""compile_linear_regex: compiles regular expressions from untrusted files and settings with RE2.

RE2 does not backtrack: the time of a search is at most proportional to the length of the text times the size of the
compiled pattern. For that reason RE2 supports neither backreferences nor lookaround.
"""

from __future__ import annotations

from typing import Any

MAX_PATTERN_CHARS = 512
MAX_PATTERN_MEMORY_BYTES = 8 << 20  # of the compiled pattern and of the states that RE2 caches; \w{256} fits


def compile_linear_regex(pattern: str) -> Any:
    """Return the compiled pattern, with `search` and `match`; RE2 has no type annotations.

    Raise ValueError with the reason if the pattern is unsupported or too large."""
    import re2  # takes 5 ms, and most processes compile no pattern

    options = re2.Options()
    options.log_errors = False
    options.never_capture = True  # groups are not read, and a search without them is faster
    options.max_mem = MAX_PATTERN_MEMORY_BYTES
    try:
        return re2.compile(pattern, options=options)
    except UnicodeEncodeError:
        raise ValueError("the pattern contains half of a surrogate pair") from None
    except re2.error as e:
        raise ValueError(f"RE2 reports {e.args[0].decode(errors='replace')!r}") from None
