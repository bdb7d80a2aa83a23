"""CallFacts: what a route may ask about a call. The body is read when the first question is about it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec

from emberline.gateway.call import Call
from emberline.gateway.providers.base import CREDENTIALS
from emberline.net.notjson import NOT_JSON


class CallFacts:
    def __init__(self, call: Call) -> None:
        self._call = call

    def get(self, path: str) -> Any:
        source, _, rest = path.partition(".")
        call = self._call
        match source:
            case "body":
                return _within(self._body, rest)
            case "headers":
                name = rest.lower()
                return None if name in CREDENTIALS else call.headers.get(name)
            case "metadata":
                return self._metadata.get(rest)
            case "model":
                return call.model
            case "provider":
                return call.provider
            case "key":
                return call.identity.key_id or None
            case "user":
                return call.identity.user or None
        raise AssertionError(f"{path} was not checked")

    @cached_property
    def _metadata(self) -> Mapping[str, Any]:
        return self._call.metadata

    @cached_property
    def _body(self) -> Any:
        try:
            return msgspec.json.decode(self._call.body)
        except NOT_JSON:
            return None


def _within(value: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list) and name.lstrip("-").isdecimal() and -len(value) <= int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value
