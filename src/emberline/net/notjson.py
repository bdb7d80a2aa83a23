"""NOT_JSON: what reading a text that should be JSON may raise: it is none, is not in UTF-8, or is nested too deep."""

from __future__ import annotations

import msgspec

NOT_JSON = (msgspec.MsgspecError, UnicodeError, RecursionError)
