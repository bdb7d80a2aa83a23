"""check_key: refuses API keys and cluster keys that a request's header cannot carry, or that anyone could present."""

from __future__ import annotations

import re

from emberline.core.errors import InvalidRequest

_KEY = re.compile("[!-~]([ -~]*[!-~])?")


def check_key(key: str, param: str) -> str:
    """Return the key. Raises InvalidRequest, without the key in its message, if it is empty or not usable in a header.

    A request without a key presents the empty one, so an empty key would let every caller in."""
    if _KEY.fullmatch(key):
        return key
    if not key.strip():
        raise InvalidRequest(f"the key of {param} is empty", param=param, hint="make a key with: openssl rand -hex 32")
    if key != key.strip():
        message = f"the key of {param} begins or ends with a space or a line break"
        raise InvalidRequest(message, param=param, hint="write key files with printf, as echo appends a line break")
    message = f"the key of {param} has a character other than printable ASCII"
    raise InvalidRequest(message, param=param, hint="make a key with: openssl rand -hex 32")
