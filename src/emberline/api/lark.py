"""Terms of a Lark grammar, written safely: literals, patterns, and markers that are tokens of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping


def literal(text: str, special: Mapping[str, int] | None = None) -> str:
    """Matches exactly this text; markers in `special` match their token, which text does not spell."""
    if not special:
        return json.dumps(text)
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text)
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)


def pattern(regex: str) -> str:
    """The regex between slashes."""
    escaped = re.sub(r"\\.|/|\n", lambda m: {"/": r"\/", "\n": r"\n"}.get(m[0], m[0]), regex, flags=re.DOTALL)
    return f"/{escaped}/"
