"""Checks of API keys and cluster keys, and keys from the environment, which the process list does not show."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from emberline.core.errors import InvalidRequest

API_KEY_VARIABLE = "EMBERLINE_API_KEY"  # of servers, workers and routers
ADMIN_KEY_VARIABLE = "EMBERLINE_ADMIN_KEY"  # of gateways and servers
CLUSTER_KEY_VARIABLE = "EMBERLINE_CLUSTER_KEY"  # of routers, workers and nodes

_KEY = re.compile("[!-~]([ -~]*[!-~])?")


def check_key(key: str, param: str) -> str:
    """Return the key. Raises InvalidRequest, without the key in its message, if it is empty or not usable in a header.

    A request without a key counts as one with the empty key, so an empty key would let every caller in."""
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
    """Return `keys` and the keys in the environment variable, which holds one key or several lines of one key each."""
    return tuple(dict.fromkeys((*keys, *_read_lines(variable_name))))


def make_key_environment(keys: Iterable[str], variable_name: str = API_KEY_VARIABLE) -> dict[str, str]:
    """Return the environment variable that passes these keys to a child process; {} if there are no keys."""
    value = "\n".join(keys)
    return {variable_name: value} if value else {}


def read_cluster_keys(option: str | None = None) -> tuple[str, ...]:
    """Return the cluster keys: first the one that this process sends, then others that it accepts.

    Return () if no key is set. `option`, if it is not empty, is the only key. Otherwise the keys are the lines of
    EMBERLINE_CLUSTER_KEY. Raises InvalidRequest if a key is not usable in an HTTP header."""
    if option:
        return (check_key(option, "cluster_key"),)
    return tuple(check_key(key, CLUSTER_KEY_VARIABLE) for key in dict.fromkeys(_read_lines(CLUSTER_KEY_VARIABLE)))


def _read_lines(variable_name: str) -> list[str]:
    value = os.environ.get(variable_name, "")
    # A single key keeps its line break, which is an error: the other side's key may lack it.
    return [line for line in (value.splitlines() if "\n" in value.strip("\n") else [value]) if line]
