"""The exceptions that decoding invalid JSON may raise: malformed, not UTF-8, or nested too deep."""

from __future__ import annotations

import msgspec

NOT_JSON = (msgspec.MsgspecError, UnicodeError, RecursionError)
