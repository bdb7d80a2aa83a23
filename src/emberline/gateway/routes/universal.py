"""Universal: a body that is a list of steps, each with its own provider, endpoint, headers and query."""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.body import peek
from emberline.gateway.call import Step
from emberline.gateway.keys.keys import is_ours
from emberline.gateway.options import Options
from emberline.gateway.paths import check_path
from emberline.gateway.providers.base import CREDENTIALS
from emberline.gateway.providers.registry import Registry
from emberline.gateway.settings import Settings
from emberline.net.notjson import NOT_JSON

MOST = 10
_CONFIG = {
    "requestTimeout": "cf-aig-request-timeout",
    "maxAttempts": "cf-aig-max-attempts",
    "retryDelay": "cf-aig-retry-delay",
    "backoff": "cf-aig-backoff",
    "cacheTtl": "cf-aig-cache-ttl",
    "skipCache": "cf-aig-skip-cache",
    "cacheKey": "cf-aig-cache-key",
    "collectLog": "cf-aig-collect-log",
    "customCost": "cf-aig-custom-cost",
    "metadata": "cf-aig-metadata",
}


class _Step(msgspec.Struct, forbid_unknown_fields=True):
    provider: str
    endpoint: str
    query: msgspec.Raw
    headers: dict[str, str] = {}
    authorization: str | None = None
    config: dict[str, Any] = {}


_STEPS = msgspec.json.Decoder(list[_Step])


def read_steps(body: bytes, asked: Options, settings: Settings, registry: Registry) -> tuple[Step, ...]:
    try:
        steps = _STEPS.decode(body)
    except NOT_JSON as e:
        raise InvalidRequest(f"the body is not a list of steps: {e}") from e
    if not 1 <= len(steps) <= MOST:
        raise InvalidRequest(f"there are {len(steps)} steps; there must be 1 to {MOST}")
    return tuple(_step(step, asked, settings, registry) for step in steps)


def _step(step: _Step, asked: Options, settings: Settings, registry: Registry) -> Step:
    headers = {name.lower(): value for name, value in step.headers.items()}
    if step.authorization is not None:
        headers["authorization"] = step.authorization
    if any(is_ours(headers.get(name, "").rpartition(" ")[2]) for name in CREDENTIALS):
        raise InvalidRequest("a step's key is its provider's", hint="the gateway's comes with the request itself")
    headers.setdefault("content-type", "application/json")
    query = bytes(step.query)
    seen = peek(query)
    endpoint = step.endpoint.strip("/")
    path, _, asked_of = endpoint.partition("?")
    check_path(f"{step.provider}/{path}", param="endpoint")
    provider = registry.find(step.provider, settings)
    return Step(
        step.provider,
        provider.model_in(path) or (seen.model if isinstance(seen.model, str) else ""),
        endpoint=endpoint,
        dialect=provider.dialect_of(path, asked_of),
        headers=headers,
        body=query,
        stream=seen.stream is True or provider.streams_at(path, asked_of),
        options=Options.read(headers).over(_config(step.config)).over(asked),
    )


def _config(config: dict[str, Any]) -> Options:
    if unknown := sorted(set(config) - set(_CONFIG)):
        raise InvalidRequest(
            f"config has {unknown[0]!r}, which is not known", param="config", hint=f"known: {sorted(_CONFIG)}"
        )
    return Options.read({_CONFIG[name]: _written(value) for name, value in config.items()})


def _written(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
