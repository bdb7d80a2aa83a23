"""RequestAttributes: the attributes of a request that conditions of routes can use.

The body is decoded on first use. Conditions on a large body are evaluated in a child process.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec

from emberline.core.offload import LARGE_INPUT_BYTES, offload
from emberline.gateway.core.request import GatewayRequest
from emberline.gateway.providers.base import CREDENTIAL_HEADERS
from emberline.gateway.routes.condition import compile_condition
from emberline.net.json_errors import JSON_DECODE_ERRORS


class RequestAttributes:
    def __init__(self, call: GatewayRequest) -> None:
        self._call = call

    def get(self, path: str) -> Any:
        source, _, rest = path.partition(".")
        call = self._call
        match source:
            case "body":
                return _value_at_path(self._body, rest)
            case "headers":
                name = rest.lower()
                return None if name in CREDENTIAL_HEADERS else call.headers.get(name)
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
        raise AssertionError(f"a validated condition reads an unknown path {path!r}")

    @cached_property
    def _metadata(self) -> Mapping[str, Any]:
        return self._call.metadata

    @cached_property
    def _body(self) -> Any:
        try:
            return msgspec.json.decode(self._call.body)
        except JSON_DECODE_ERRORS:
            return None


async def evaluate_body_conditions(
    call: GatewayRequest, conditions: Mapping[str, Mapping[str, Any]]
) -> dict[str, bool]:
    """If the body is large, evaluate the conditions that read it, in a child process.

    Return the results by condition id. Return {} if the body is small.
    """
    selected = {id: each for id, each in conditions.items() if _reads_body(each)}
    if len(call.body) < LARGE_INPUT_BYTES or not selected:
        return {}
    bare = call.with_changes(body=b"", steps=(), redacted_bodies=[], attempts=[], body_summary=None)
    return await offload.run(len(call.body), evaluate_conditions, bare, call.body, selected)


def evaluate_conditions(
    call: GatewayRequest, body: bytes, conditions: Mapping[str, Mapping[str, Any]]
) -> dict[str, bool]:
    """Return the result of each condition by its id. This function runs in a child process."""
    facts = RequestAttributes(call.with_changes(body=body))
    return {id: compile_condition(each)(facts) for id, each in conditions.items()}


def _reads_body(condition: Any) -> bool:
    if isinstance(condition, Mapping):
        return any(name.partition(".")[0] == "body" or _reads_body(each) for name, each in condition.items())
    return isinstance(condition, list) and any(map(_reads_body, condition))


def _value_at_path(value: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list) and name.lstrip("-").isdecimal() and -len(value) <= int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value
