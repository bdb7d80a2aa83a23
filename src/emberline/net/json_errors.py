"""The exceptions that decoding invalid JSON may raise: malformed, not UTF-8, or nested too deep."""

from __future__ import annotations

import msgspec

JSON_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeError, RecursionError)
