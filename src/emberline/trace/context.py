"""Context: which trace something belongs to, and which span of it: W3C's `traceparent`, read and written."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

HEADERS = (PARENT, STATE) = ("traceparent", "tracestate")

_SHAPE = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1  # of the flags


@dataclass(frozen=True, slots=True)
class Context:
    trace: str  # 32 digits
    span: str  # 16 digits; "": none yet
    sampled: bool = True  # its spans are wanted

    @staticmethod
    def read(header: str) -> Context | None:
        """None: there is none that is valid. Versions to come may say more behind what this one says."""
        found = _SHAPE.fullmatch(header.strip())
        if found is None:
            return None
        version, trace, span, flags, more = found.groups()
        if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(span, 16):
            return None
        return Context(trace, span, bool(int(flags, 16) & _SAMPLED))

    @staticmethod
    def new(share: float) -> Context:
        """Of a trace that begins here. Whether it is wanted follows from its id: of all, this share is."""
        trace = os.urandom(16).hex()
        return Context(trace, "", int(trace[16:], 16) < share * 2.0**64)

    def below(self) -> Context:
        """Of another span of the same trace."""
        return Context(self.trace, os.urandom(8).hex(), self.sampled)

    def __str__(self) -> str:
        return f"00-{self.trace}-{self.span}-{_SAMPLED if self.sampled else 0:02x}"
