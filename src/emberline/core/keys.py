"""Checks of API keys and cluster keys, and API keys from the environment, which the process list does not show."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from emberline.core.errors import InvalidRequest

API_KEY_VARIABLE = "EMBERLINE_API_KEY"  # of servers, workers and routers
ADMIN_KEY_VARIABLE = "EMBERLINE_ADMIN_KEY"  # of gateways

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


def add_key_from_environment(keys: Iterable[str], variable_name: str = API_KEY_VARIABLE) -> tuple[str, ...]:
    """Return the keys, and the one in the environment variable if it is set and not empty."""
    return tuple(dict.fromkeys((*keys, *filter(None, [os.environ.get(variable_name)]))))
