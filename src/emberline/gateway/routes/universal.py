"""Reads the body of the universal endpoint, which is a list of steps.

Each step has its provider, endpoint, headers and query."""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.core.offload import LARGE, offload
from emberline.gateway.body import Peek, peek
from emberline.gateway.call import VIRTUAL, Step
from emberline.gateway.keys.keys import is_ours
from emberline.gateway.options import Options
from emberline.gateway.paths import ARN_PROVIDER, COUNT_TOKENS, PLAIN, check_path
from emberline.gateway.providers.base import CREDENTIALS
from emberline.gateway.providers.registry import Registry
from emberline.gateway.routes.named import resolve
from emberline.gateway.settings import Settings
from emberline.gateway.survey import Survey, survey
from emberline.net.notjson import NOT_JSON

MOST = 10
LARGEST_PLACE = 1 << 16  # of the headers and config of a step
COMPAT = "compat"  # in place of a provider, which the model name then contains
COMPAT_ENDPOINTS = tuple(endpoint for endpoint in PLAIN if endpoint != COUNT_TOKENS)
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


class _Place(msgspec.Struct, forbid_unknown_fields=True):
    provider: str
    endpoint: str
    headers: dict[str, str] = {}
    authorization: str | None = None
    config: dict[str, Any] = {}


class _Step(_Place, forbid_unknown_fields=True, kw_only=True):
    query: msgspec.Raw


class ReadStep(msgspec.Struct):
    """A step as read by another process."""

    place: _Place
    query: bytes
    seen: Peek
    surveyed: Survey | None = None  # only for a large query


_STEPS = msgspec.json.Decoder(list[_Step])


async def read_steps(body: bytes, asked: Options, settings: Settings, registry: Registry) -> tuple[Step, ...]:
    """Return the steps of the body. A large body is parsed in another process. Raises InvalidRequest."""
    parsed = await offload.run_by_size(len(body), decode_steps, body)
    steps = tuple(_step(step, asked, settings, registry) for step in parsed)
    if virtual := [step for step in steps if step.provider in VIRTUAL and len(steps) > 1]:
        raise InvalidRequest(
            f"{virtual[0].provider}/{virtual[0].model[:80]} is a route or a pool, which must be the only step",
            param="model",
            hint="send it as the only step",
        )
    return steps


def decode_steps(body: bytes) -> list[ReadStep]:
    try:
        steps = _STEPS.decode(body)
    except NOT_JSON as e:
        raise InvalidRequest(f"the body is not a list of steps: {e}") from e
    if not 1 <= len(steps) <= MOST:
        raise InvalidRequest(f"the body has {len(steps)} steps; 1 to {MOST} are allowed")
    return [_read(step) for step in steps]


def _read(step: _Step) -> ReadStep:
    size = len(msgspec.json.encode((step.headers, step.config)))
    if size > LARGEST_PLACE:
        raise InvalidRequest(
            f"headers and config of a step have {size} bytes; at most {LARGEST_PLACE} are allowed", param="headers"
        )
    target = _Place(step.provider, step.endpoint, step.headers, step.authorization, step.config)
    query = bytes(step.query)
    if len(query) < LARGE:
        return ReadStep(target, query, peek(query))
    surveyed = survey(query)
    if surveyed.seen is None:
        raise InvalidRequest(surveyed.error)
    return ReadStep(target, query, surveyed.seen, surveyed)


def _step(read: ReadStep, asked: Options, settings: Settings, registry: Registry) -> Step:
    target, query, seen = read.place, read.query, read.seen
    headers = {name.lower(): value for name, value in target.headers.items()}
    if target.authorization is not None:
        headers["authorization"] = target.authorization
    if any(is_ours(headers.get(name, "").rpartition(" ")[2]) for name in CREDENTIALS):
        raise InvalidRequest(
            f"the step for {target.provider[:80]!r} has a key of the gateway where its provider's key belongs",
            hint="send the gateway's key in the headers of the request",
        )
    headers.setdefault("content-type", "application/json")
    endpoint = target.endpoint.strip("/")
    path, _, url_query = endpoint.partition("?")
    check_path(f"{target.provider}/{path}", path.split("/") if target.provider == ARN_PROVIDER else (), "endpoint")
    options = Options.read(headers).over(_config(target.config)).over(asked)
    if target.provider == COMPAT:
        return _compat_step(path, headers, read, options, settings)
    provider = registry.find(target.provider, settings)
    return Step(
        target.provider,
        provider.model_in(path) or (seen.model if isinstance(seen.model, str) else ""),
        endpoint=endpoint,
        dialect=provider.dialect_of(path, url_query),
        headers=headers,
        body=query,
        stream=seen.stream is True or provider.streams_at(path, url_query),
        options=options,
        seen=seen,
        surveyed=read.surveyed,
    )


def _compat_step(path: str, headers: dict[str, str], read: ReadStep, options: Options, settings: Settings) -> Step:
    """Return a step in one of the gateway's own protocols; its model is PROVIDER/MODEL."""
    seen = read.seen
    endpoint = path.removeprefix("v1/")
    if endpoint not in COMPAT_ENDPOINTS:
        hint = f"endpoints: {', '.join(COMPAT_ENDPOINTS)}"
        raise InvalidRequest(f"compat steps do not support endpoint {path[:80]!r}", param="endpoint", hint=hint)
    if not isinstance(seen.model, str) or not seen.model:
        raise InvalidRequest("the query of a compat step has no model", param="model", hint="set it to PROVIDER/MODEL")
    provider, model = resolve(seen.model, settings, named=True)
    return Step(
        provider,
        model,
        endpoint=endpoint,
        dialect=PLAIN[endpoint],
        headers=headers,
        body=read.query,
        stream=seen.stream is True,
        options=options,
        plain=True,
        seen=seen,
        surveyed=read.surveyed,
    )


def _config(config: dict[str, Any]) -> Options:
    if unknown := sorted(set(config) - set(_CONFIG)):
        raise InvalidRequest(
            f"config has an unknown field {unknown[0]!r}", param="config", hint=f"fields: {', '.join(sorted(_CONFIG))}"
        )
    return Options.read({_CONFIG[name]: _written(value) for name, value in config.items()})


def _written(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
