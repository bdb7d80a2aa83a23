"""CallFacts: the attributes of a call that conditions of routes can use. The body is decoded on first use.

Conditions on a large body are evaluated in another process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec

from emberline.core.offload import LARGE, offload
from emberline.gateway.call import Call
from emberline.gateway.providers.base import CREDENTIALS
from emberline.gateway.routes.condition import compiled
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
        raise AssertionError(f"condition on unknown path {path} was not validated")

    @cached_property
    def _metadata(self) -> Mapping[str, Any]:
        return self._call.metadata

    @cached_property
    def _body(self) -> Any:
        try:
            return msgspec.json.decode(self._call.body)
        except NOT_JSON:
            return None


async def answers_about_body(call: Call, conditions: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """Return the results of the conditions that read a large body, by id; {} if the body is small."""
    selected = {id: each for id, each in conditions.items() if _looks_into_body(each)}
    if len(call.body) < LARGE or not selected:
        return {}
    bare = call.moved(body=b"", steps=(), redacted=[], trail=[], surveyed=None)
    return await offload.run(len(call.body), answers, bare, call.body, selected)


def answers(call: Call, body: bytes, conditions: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """Return the result of each condition, by id; for another process."""
    facts = CallFacts(call.moved(body=body))
    return {id: compiled(each)(facts) for id, each in conditions.items()}


def _looks_into_body(condition: Any) -> bool:
    if isinstance(condition, Mapping):
        return any(name.partition(".")[0] == "body" or _looks_into_body(each) for name, each in condition.items())
    return isinstance(condition, list) and any(map(_looks_into_body, condition))


def _within(value: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list) and name.lstrip("-").isdecimal() and -len(value) <= int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value
