"""Backend: the library that computes on a CPU, either the native one or torch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backend:
    library: ctypes.CDLL | None
    isa: str
    reason: str = ""  # why there is no native library; empty if there is one

    def __str__(self) -> str:
        return f"native ({self.isa})" if self.library else f"torch ({self.reason})"
