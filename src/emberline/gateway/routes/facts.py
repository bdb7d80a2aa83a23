"""CallFacts: what a route may ask about a call. The body is read when the first question is about it; what is asked
about a large one is answered in another process."""

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


async def answers_about_body(call: Call, conditions: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """Whether each condition holds that looks into a large body; nothing for a small body or other conditions."""
    asked = {id: each for id, each in conditions.items() if _looks_into_body(each)}
    if len(call.body) < LARGE or not asked:
        return {}
    bare = call.moved(body=b"", steps=(), redacted=[], trail=[], surveyed=None)
    return await offload.run(len(call.body), answers, bare, call.body, asked)


def answers(call: Call, body: bytes, conditions: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
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
