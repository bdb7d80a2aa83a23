"""GuardrailFinding: what a guardrail found, where in a request or reply, and what action follows.

A finding never contains the matched text.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Action = Literal["flag", "redact", "block"]
Check = Literal["REQUEST", "RESPONSE"]


class GuardrailFinding(msgspec.Struct, frozen=True):
    policy: str  # the name of the rule or judge
    entry: str  # the kind of pattern, the judge's category, or "unchecked"
    check: Check
    action: Action

    def __str__(self) -> str:
        return f"{self.check.lower()}:{self.entry}:{self.action}"
