"""DoctorFinding: one line of `emberline doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    subject: str
    detail: str
    is_ok: bool | None = True  # None: information, no problem
    hint: str = ""
