"""Checks of HTTP headers in settings."""

from __future__ import annotations

import re
from collections.abc import Mapping

from emberline.core.errors import InvalidRequest

HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def check_header_texts(headers: Mapping[str, object], param: str) -> None:
    """Raise InvalidRequest if a header's name or value cannot be sent.

    The error does not contain the value, which may be a key."""
    for name, value in headers.items():
        if not HEADER_NAME.fullmatch(name):
            message = f"{param} has the header {name[:80]!r}, a name that HTTP does not allow"
            raise InvalidRequest(message, param=param, hint="use letters, digits and -, such as x-api-key")
        if not isinstance(value, str):
            message = f"{param}.{name} is of type {type(value).__name__}; it must be text"
            raise InvalidRequest(message, param=param, hint=f'write {name} = "VALUE", in quotation marks')
        if not (value.isascii() and value.isprintable()):
            message = f"the value of {param}.{name} has a character other than printable ASCII"
            raise InvalidRequest(message, param=param, hint="write the value as one line of ASCII")
