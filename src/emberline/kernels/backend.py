"""Backend: what computes on a CPU: the native library, or torch and why."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backend:
    library: ctypes.CDLL | None
    isa: str
    reason: str = ""  # why there is no library

    def __str__(self) -> str:
        return f"native ({self.isa})" if self.library else f"torch ({self.reason})"
