"""JSON_DECODE_ERRORS: the exceptions for JSON that is malformed, not UTF-8 or nested too deeply."""

from __future__ import annotations

import msgspec

JSON_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeError, RecursionError)
