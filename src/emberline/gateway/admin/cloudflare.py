"""The management API with Cloudflare's paths, names, pages and envelope, over the same store.

Fields for features that the gateway does not have (log push, a limit of log rows, ...) are accepted only with the value
that turns the feature off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec

from emberline.core.errors import EmberlineError, InvalidRequest
from emberline.gateway.admin import logquery
from emberline.gateway.admin.ask import Ask, converted, decoded, named
from emberline.gateway.admin.desk import Desk
from emberline.gateway.admin.endpoint import Endpoint
from emberline.gateway.admin.gateways import CustomProviders, Gateways
from emberline.gateway.admin.logs import ORDER, LogDesk, view
from emberline.gateway.admin.shapes import CustomProvider, FeedbackWish, Strict
from emberline.gateway.admin.shelf import Stored
from emberline.gateway.settings import Backoff, Logging, Retries, Settings
from emberline.net.notjson import NOT_JSON

ROOT = "/accounts/{account}/ai-gateway"
PAGES = ("page", "per_page")
DEEPEST = 10_000  # reachable by page number; further ones by cursor
RATE_LIMIT = "rate_limiting"  # name of the rule for Cloudflare's three rate_limiting fields
_CODES = {400: 7001, 404: 7002, 401: 10000, 403: 10000}  # HTTP status -> Cloudflare's error code


class Paged(msgspec.Struct, frozen=True):
    """A result with a `result_info` beside it."""

    result: list[Any]
    info: dict[str, Any]


class Beside(msgspec.Struct, frozen=True):
    """A result that Cloudflare's clients also expect under another name."""

    name: str
    result: Any


class GatewayWish(Strict, frozen=True, kw_only=True):
    id: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = None
    cache_ttl: Annotated[int, msgspec.Meta(ge=0)] | None = None
    cache_invalidate_on_update: bool | None = None
    collect_logs: bool | None = None
    rate_limiting_interval: Annotated[int, msgspec.Meta(ge=0)] | None = None
    rate_limiting_limit: Annotated[int, msgspec.Meta(ge=0)] | None = None
    rate_limiting_technique: Literal["fixed", "sliding"] | None = None
    authentication: bool | None = None
    retry_max_attempts: Annotated[int, msgspec.Meta(ge=1, le=5)] | None = None
    retry_delay: Annotated[int, msgspec.Meta(ge=0, le=5000)] | None = None  # ms
    retry_backoff: Backoff | None = None
    zdr: bool | None = None
    logpush: Literal[False] | None = None
    logpush_public_key: None = None
    log_management: None = None
    log_management_strategy: None = None
    store_id: None = None
    workers_ai_billing_mode: Literal["postpaid"] | None = None  # the provider bills, not the gateway

    def over(self, old: Settings) -> Settings:
        rates, retries = self._rates(old), old.retries
        return msgspec.structs.replace(
            old,
            cache_ttl=_or(self.cache_ttl, old.cache_ttl),
            cache_invalidate_on_update=_or(self.cache_invalidate_on_update, old.cache_invalidate_on_update),
            authentication=_or(self.authentication, old.authentication),
            zdr=_or(self.zdr, old.zdr),
            logs=msgspec.structs.replace(old.logs, collect=_or(self.collect_logs, old.logs.collect)),
            limits=rates,
            retries=Retries(
                attempts=_or(self.retry_max_attempts, retries.attempts),
                delay=retries.delay if self.retry_delay is None else self.retry_delay / 1e3,
                backoff=_or(self.retry_backoff, retries.backoff),
            ),
        )

    def _rates(self, old: Settings) -> tuple[dict[str, Any], ...]:
        """Return the rules with the rate limit changed; a limit of 0 removes it."""
        rule = _rate_rule(old)
        limit = _or(self.rate_limiting_limit, rule.get("limit", 0))
        interval = _or(self.rate_limiting_interval, rule.get("per", 0))
        technique = _or(self.rate_limiting_technique, rule.get("technique", "fixed"))
        if bool(limit) != bool(interval):
            raise InvalidRequest(
                f"a rate limit needs both values: rate_limiting_limit is {limit}, rate_limiting_interval is {interval}",
                param=RATE_LIMIT,
                hint="set both above 0, or both to 0 for no limit",
            )
        others = tuple(each for each in old.limits if each.get("name") != RATE_LIMIT)
        own = {"name": RATE_LIMIT, "limit": limit, "per": interval, "technique": technique}
        return (own, *others) if limit else others


class CloudflareDesk:
    def __init__(self, context: Desk) -> None:
        self._context = context
        self._gateways = Gateways(context)
        self._providers = CustomProviders(context)
        self._logs = LogDesk(context)

    def endpoints(self) -> list[Endpoint]:
        gateways, logs = f"{ROOT}/gateways", f"{ROOT}/gateways/{{gateway}}/logs"
        custom = f"{ROOT}/custom-providers"
        list_query = (*PAGES, "search", "enable", "beta")
        logs_query = (*PAGES, *ORDER, *logquery.QUERY, "before", "meta_info", "dataset")
        erase_query = (*logquery.QUERY, *ORDER, "limit")
        endpoints = [
            Endpoint("GET", gateways, "List gateways", self.gateways, query=(*PAGES, "search")),
            Endpoint("POST", gateways, "Create a gateway", self.create_gateway, GatewayWish),
            Endpoint("GET", f"{gateways}/{{gateway}}", "Get a gateway", self.gateway),
            Endpoint("PUT", f"{gateways}/{{gateway}}", "Change a gateway", self.change_gateway, GatewayWish),
            Endpoint("DELETE", f"{gateways}/{{gateway}}", "Delete a gateway", self.delete_gateway),
            Endpoint("GET", logs, "List a gateway's log records", self.logs, query=logs_query),
            Endpoint("DELETE", logs, "Delete records that match the filters", self._logs.erase, query=erase_query),
            Endpoint("GET", f"{logs}/{{id}}", "Get a log record", self._logs.get),
            Endpoint("PATCH", f"{logs}/{{id}}", "Add feedback to a log record", self.edit_log, FeedbackWish),
            Endpoint("GET", f"{logs}/{{id}}/request", "Get a record's request body", self._logs.request),
            Endpoint("GET", f"{logs}/{{id}}/response", "Get a record's response body", self._logs.response),
            Endpoint("GET", custom, "List custom providers", self.providers, query=list_query),
            Endpoint("POST", custom, "Create a custom provider", self.create_provider, CustomProvider),
            Endpoint("GET", f"{custom}/{{slug}}", "Get a custom provider", self.provider),
            Endpoint("PATCH", f"{custom}/{{slug}}", "Change a custom provider", self.patch_provider),
            Endpoint("DELETE", f"{custom}/{{slug}}", "Delete a custom provider", self.delete_provider),
        ]
        return [replace(each, cloudflare=True) for each in endpoints]

    # Gateways

    async def gateways(self, request: Ask) -> Paged:
        stored = [self._gateways.view(each) for each in await self._context.all("gateway", request.account)]
        configured = [
            Stored(id=name, version=0, updated=0, value=settings)
            for (account, name), settings in self._context.fixed.items()
            if account == request.account
        ]
        search = request.query.get("search", "")
        return numbered(request, [gateway_view(each) for each in (*configured, *stored) if search in each.id])

    async def gateway(self, request: Ask) -> dict[str, Any]:
        return gateway_view(await self._gateways.get(request))

    async def create_gateway(self, request: Ask) -> dict[str, Any]:
        spec = request.read(GatewayWish)
        if spec.id is None:
            raise InvalidRequest("the new gateway has no id", param="id", hint="set id, the gateway's name")
        create = with_parts(request, {"gateway": spec.id}, spec.over(Settings(logs=Logging())))
        return gateway_view(await self._gateways.create(create))

    async def change_gateway(self, request: Ask) -> dict[str, Any]:
        spec, old = request.read(GatewayWish), await self._gateways.get(request)
        if spec.id not in (None, old.id):
            raise InvalidRequest(
                f"the id of gateway {old.id!r} cannot be changed to {spec.id!r}", param="id", hint="leave id out"
            )
        return gateway_view(await self._gateways.put(with_parts(request, {}, spec.over(old.value))))

    async def delete_gateway(self, request: Ask) -> dict[str, Any]:
        return await self._gateways.delete(request)

    # Logs

    async def logs(self, request: Ask) -> Paged:
        if request.flag("meta_info"):
            raise InvalidRequest(
                "meta_info=true is not supported: the gateway does not count the matching records",
                param="meta_info",
                hint="leave meta_info out; /admin/accounts/ACCOUNT/rollups has counts",
            )
        page, per_page = page_of(request, 20)
        if page * per_page > DEEPEST:
            raise InvalidRequest(
                f"page {page} with {per_page} records per page is beyond the first {DEEPEST} records",
                param="page",
                hint="continue with `before`, the `cursor` of the last page",
            )
        gateway = named(request.parts["gateway"], "gateway")
        saved = await self._saved_filters(request, gateway)
        found = await self._logs.ordered(request, gateway, page * per_page, saved)
        records = found.records[(page - 1) * per_page :]
        info = {
            "count": len(records),
            "page": page,
            "per_page": per_page,
            "has_more": found.has_more,
            "cursor": found.cursor,
            "complete": found.complete,
        }
        return Paged([view(each) for each in records], info)

    async def edit_log(self, request: Ask) -> dict[str, Any]:
        """Add feedback. Unlike LogEndpoints.patch it accepts a body without fields, which changes nothing."""
        return await (
            self._logs.get(request) if request.read(FeedbackWish) == FeedbackWish() else self._logs.patch(request)
        )

    async def _saved_filters(self, request: Ask, gateway: str) -> list[logquery.Asked]:
        """Return the filters of the dataset that the query names."""
        if not (id := request.query.get("dataset")):
            return []
        document = await self._context.found("dataset", request.account, f"{gateway}/{id}")
        return decoded(document.body, logquery.SavedFilters).filters

    # Custom providers

    async def providers(self, request: Ask) -> Paged:
        found = [
            provider_view(self._providers.view(d)) for d in await self._context.all("custom_provider", request.account)
        ]
        for name in ("enable", "beta"):
            if (value := request.flag(name)) is not None:
                found = [each for each in found if each[name] == value]
        search = request.query.get("search", "").lower()
        return numbered(request, [each for each in found if search in f"{each['name']} {each['slug']}".lower()])

    async def provider(self, request: Ask) -> dict[str, Any]:
        return provider_view(await self._providers.get(request))

    async def create_provider(self, request: Ask) -> dict[str, Any]:
        create = _with_decoded_headers(request)
        slug = create.read(CustomProvider).slug
        return provider_view(await self._providers.create(with_parts(create, {"slug": slug})))

    async def patch_provider(self, request: Ask) -> dict[str, Any]:
        return provider_view(await self._providers.patch(_with_decoded_headers(request)))

    async def delete_provider(self, request: Ask) -> dict[str, Any]:
        return await self._providers.delete(request)


def gateway_view(stored: Stored) -> dict[str, Any]:
    settings = converted(msgspec.to_builtins(stored.value), Settings)
    rate = _rate_rule(settings)
    return {
        "id": stored.id,
        "modified_at": iso(stored.updated),
        "authentication": settings.authentication,
        "cache_ttl": settings.cache_ttl,
        "cache_invalidate_on_update": settings.cache_invalidate_on_update,
        "collect_logs": settings.logs.collect,
        "rate_limiting_interval": rate.get("per", 0),
        "rate_limiting_limit": rate.get("limit", 0),
        "rate_limiting_technique": rate.get("technique", "fixed"),
        "retry_max_attempts": settings.retries.attempts,
        "retry_delay": round(settings.retries.delay * 1e3),
        "retry_backoff": settings.retries.backoff,
        "zdr": settings.zdr,
        "logpush": False,
    }


def provider_view(stored: Stored) -> dict[str, Any]:
    return {"id": stored.id, "modified_at": iso(stored.updated), **msgspec.to_builtins(stored.value)}


def envelope(result: Any) -> dict[str, Any]:
    """Return Cloudflare's envelope for a result, with the extra fields of PagedResult and NamedResult."""
    success = {"success": True, "errors": [], "messages": []}
    if isinstance(result, Paged):
        return {**success, "result": result.result, "result_info": result.info}
    if isinstance(result, Beside):
        return {**success, "result": result.result, result.name: result.result}
    return {**success, "result": result}


def error_envelope(error: EmberlineError) -> dict[str, Any]:
    param, message = getattr(error, "param", None), str(error)
    if param and param not in message:
        message = f"{param}: {message}"
    fields = {"code": _CODES.get(error.status, 7000), "message": message}
    return {"success": False, "errors": [fields], "messages": [], "result": None}


def with_parts(request: Ask, added: dict[str, str], body: Any = None) -> Ask:
    """Return the request with more path parameters and, unless it is None, another body."""
    raw = request.body if body is None else msgspec.json.encode(body)
    return replace(request, parts={**request.parts, **added}, body=raw)


def numbered(request: Ask, found: Sequence[Any]) -> Paged:
    """Return the page of `found` that the query asks for by number."""
    page, per_page = page_of(request, 20)
    items = list(found[(page - 1) * per_page : page * per_page])
    return Paged(items, {"count": len(items), "page": page, "per_page": per_page, "total_count": len(found)})


def page_of(request: Ask, default: int) -> tuple[int, int]:
    """Return the query parameters page and per_page."""
    return request.number("page", 1, 1, 10_000), request.number("per_page", default, 1, 100)


def _with_decoded_headers(request: Ask) -> Ask:
    """Decode `headers` of a custom provider, which Cloudflare's clients send as a string of JSON."""
    body = request.read(dict[str, Any])
    if not isinstance(headers := body.get("headers"), str):
        return request
    try:
        found = msgspec.json.decode(headers or "{}", type=dict[str, str])
    except NOT_JSON as e:
        hint = 'send an object such as {"x-name": "value"}, or the same as a string'
        raise InvalidRequest(
            f"headers is {headers[:80]!r}, which is not a JSON object of strings: {e}", param="headers", hint=hint
        ) from e
    return with_parts(request, {}, {**body, "headers": found})


def _rate_rule(settings: Settings) -> dict[str, Any]:
    return next((dict(each) for each in settings.limits if each.get("name") == RATE_LIMIT), {})


def iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1e3, UTC).isoformat(timespec="milliseconds")


def _or(new: Any, old: Any) -> Any:
    return old if new is None else new
