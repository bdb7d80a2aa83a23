"""Records for tests of the gateway's log."""

from __future__ import annotations

import os
from typing import Any

from emberline.gateway.core.log_record import LogRecord

NOON = 1_780_000_000_000 - 1_780_000_000_000 % 86_400_000 + 43_200_000  # some day
DAY = 86_400_000


def new_record_id(time_ms: int) -> str:
    """Return a new record id in hex, with 48 bits of time and 80 random bits."""
    return f"{time_ms:012x}{os.urandom(10).hex()}"


def make_record(at: int = NOON, **fields: Any) -> LogRecord:
    given: dict[str, Any] = {
        "id": new_record_id(at),
        "account": "acme",
        "gateway": "main",
        "provider": "openai",
        "model": "gpt-4o",
        "status": 200,
        "success": True,
    }
    return LogRecord(**given | fields)
