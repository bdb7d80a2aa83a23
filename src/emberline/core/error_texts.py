"""printable_error: an error message in the form in which logs show it: one line, bounded, without keys."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_MESSAGE_CHARS = 500
MIN_SECRET_CHARS = 8  # shorter texts may be ordinary words
MASK = "[key]"

_KEYS = re.compile(
    r"(?i:\bbearer +)[^\s\"',]{8,}"
    r"|\b(?:sk|pk|rk|gsk|xai|hf|npm|r8|egt|evk|csk|pplx|nvapi|key|ghp|gho|ghs|glpat|pypi)[-_][A-Za-z0-9_*.-]{8,}"
    r"|\bAIza[A-Za-z0-9_-]{16,}|\b(?:AKIA|ASIA)[A-Z0-9]{12,}"
)


def printable_error(message: str, secrets: Iterable[str] = ()) -> str:
    """Return the message without line breaks and keys. `secrets` are further texts that must not appear in it."""
    for secret in secrets:
        if len(secret) >= MIN_SECRET_CHARS:
            message = message.replace(secret, MASK)
    visible = "".join(c if c.isprintable() else " " for c in _KEYS.sub(MASK, message[: 2 * MAX_MESSAGE_CHARS]))
    return " ".join(visible.split())[:MAX_MESSAGE_CHARS]
