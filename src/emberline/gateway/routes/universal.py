"""Reads the body of the universal endpoint, which is a list of steps (providers to try in order).

Each step has its own provider, endpoint, headers and query.
"""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.core.offload import LARGE_INPUT_BYTES, offload
from emberline.gateway.core.body_summary import BodySummary, summarize_body
from emberline.gateway.core.options import RequestOptions
from emberline.gateway.core.paths import ARN_PROVIDER, check_path
from emberline.gateway.core.request import VIRTUAL_PROVIDERS, RequestStep
from emberline.gateway.core.request_body import BodyFields, read_body_fields
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.core.unified_endpoints import find_unified_endpoint
from emberline.gateway.keys.key_store import is_gateway_key
from emberline.gateway.providers.base import CREDENTIAL_HEADERS
from emberline.gateway.providers.registry import ProviderRegistry
from emberline.gateway.routes.model_names import resolve_model
from emberline.net.json_errors import JSON_DECODE_ERRORS

STEPS_HINT = 'send [{"provider": "NAME", "endpoint": "PATH", "headers": {}, "query": {}}, ...]'
MAX_STEPS = 10
MAX_STEP_OPTIONS_BYTES = 1 << 16  # of the headers and config of a step
COMPAT = "compat"  # in place of a provider, which the model name then contains
COMPAT_ENDPOINTS = ("chat/completions", "responses", "embeddings", "messages", "completions")
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


class _StepTarget(msgspec.Struct, forbid_unknown_fields=True):
    provider: str
    endpoint: str
    headers: dict[str, str] = {}
    authorization: str | None = None
    config: dict[str, Any] = {}


class _StepJSON(_StepTarget, forbid_unknown_fields=True, kw_only=True):
    query: msgspec.Raw


class ParsedStep(msgspec.Struct):
    """A step of the universal endpoint, as parsed in a child process."""

    target: _StepTarget
    query: bytes
    body_fields: BodyFields
    body_summary: BodySummary | None = None  # only for a large query


_STEPS_DECODER = msgspec.json.Decoder(list[_StepJSON])


async def read_steps(
    body: bytes, request_options: RequestOptions, settings: GatewaySettings, registry: ProviderRegistry
) -> tuple[RequestStep, ...]:
    """Return the steps in a body.

    A large body is parsed in a child process. Raise InvalidRequest if the body is invalid.
    """
    parsed = await offload.run_inline_if_small(len(body), decode_steps, body)
    steps = tuple(_build_step(step, request_options, settings, registry) for step in parsed)
    if virtual := [step for step in steps if step.provider in VIRTUAL_PROVIDERS and len(steps) > 1]:
        raise InvalidRequest(
            f"{virtual[0].provider}/{virtual[0].model[:80]}, a dynamic route or a pool, must be the only step",
            param="model",
            hint="remove the other steps",
        )
    return steps


def decode_steps(body: bytes) -> list[ParsedStep]:
    try:
        steps = _STEPS_DECODER.decode(body)
    except JSON_DECODE_ERRORS as e:
        raise InvalidRequest(f"the body must be a list of steps: {e}", hint=STEPS_HINT) from e
    if not 1 <= len(steps) <= MAX_STEPS:
        raise InvalidRequest(f"the body must have 1 to {MAX_STEPS} steps, not {len(steps)}", hint=STEPS_HINT)
    return [_parse_step(step) for step in steps]


def _parse_step(step: _StepJSON) -> ParsedStep:
    size = len(msgspec.json.encode((step.headers, step.config)))
    if size > MAX_STEP_OPTIONS_BYTES:
        raise InvalidRequest(
            f"headers and config of a step must have at most {MAX_STEP_OPTIONS_BYTES} bytes, not {size}",
            param="headers",
        )
    target = _StepTarget(step.provider, step.endpoint, step.headers, step.authorization, step.config)
    query = bytes(step.query)
    if len(query) < LARGE_INPUT_BYTES:
        return ParsedStep(target, query, read_body_fields(query))
    summary = summarize_body(query)
    if summary.body_fields is None:
        raise InvalidRequest(summary.error)
    return ParsedStep(target, query, summary.body_fields, summary)


def _build_step(
    parsed: ParsedStep, request_options: RequestOptions, settings: GatewaySettings, registry: ProviderRegistry
) -> RequestStep:
    target, query, fields = parsed.target, parsed.query, parsed.body_fields
    headers = {name.lower(): value for name, value in target.headers.items()}
    if target.authorization is not None:
        headers["authorization"] = target.authorization
    if any(is_gateway_key(headers.get(name, "").rpartition(" ")[2]) for name in CREDENTIAL_HEADERS):
        raise InvalidRequest(
            f"the step for provider {target.provider[:80]!r} contains a gateway key in place of the provider's key",
            hint="send the gateway's key in the headers of the request",
        )
    headers.setdefault("content-type", "application/json")
    endpoint = target.endpoint.strip("/")
    path, _, url_query = endpoint.partition("?")
    check_path(f"{target.provider}/{path}", path.split("/") if target.provider == ARN_PROVIDER else (), "endpoint")
    options = (
        RequestOptions.from_headers(headers)
        .with_defaults(_parse_config_options(target.config))
        .with_defaults(request_options)
    )
    if target.provider == COMPAT:
        return _build_compat_step(path, headers, parsed, options, settings)
    provider = registry.find_provider(target.provider, settings)
    return RequestStep(
        target.provider,
        provider.model_of(path, fields.model if isinstance(fields.model, str) else ""),
        endpoint=endpoint,
        dialect=provider.dialect_at(path, url_query),
        headers=headers,
        body=query,
        stream=fields.stream is True or provider.is_stream_path(path, url_query),
        options=options,
        body_fields=fields,
        body_summary=parsed.body_summary,
    )


def _build_compat_step(
    path: str, headers: dict[str, str], parsed: ParsedStep, options: RequestOptions, settings: GatewaySettings
) -> RequestStep:
    """Return the step for an entry with the provider `compat`, a placeholder.

    The real provider is named in the entry's model, PROVIDER/MODEL.
    """
    fields = parsed.body_fields
    endpoint = path.removeprefix("v1/")
    unified = find_unified_endpoint(endpoint)
    if endpoint not in COMPAT_ENDPOINTS or unified is None:
        hint = f"endpoints: {', '.join(COMPAT_ENDPOINTS)}"
        raise InvalidRequest(
            f"endpoint {path[:80]!r} is not supported in a step with provider compat", param="endpoint", hint=hint
        )
    if not isinstance(fields.model, str) or not fields.model:
        raise InvalidRequest(
            "query.model must be set in a step with provider compat", param="model", hint="set it to PROVIDER/MODEL"
        )
    provider, model = resolve_model(fields.model, settings, require_provider=True)
    return RequestStep(
        provider,
        model,
        endpoint=endpoint,
        dialect=unified.dialect,
        headers=headers,
        body=parsed.query,
        stream=fields.stream is True,
        options=options,
        is_dialect_endpoint=True,
        body_fields=fields,
        body_summary=parsed.body_summary,
    )


def _parse_config_options(config: dict[str, Any]) -> RequestOptions:
    if unknown := sorted(set(config) - set(_CONFIG)):
        raise InvalidRequest(
            f"config of a step has an unknown field {unknown[0]!r}",
            param="config",
            hint=f"fields: {', '.join(sorted(_CONFIG))}",
        )
    return RequestOptions.from_headers({_CONFIG[name]: _to_header_value(value) for name, value in config.items()})


def _to_header_value(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
