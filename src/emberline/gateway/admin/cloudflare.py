"""The management API as Cloudflare's clients speak it: its paths, names, pages and envelope, over the same store.

What a field asks for that is not done here (log push, a limit of rows, ...) is refused unless it asks for nothing.
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
DEEPEST = 10_000  # records that can be reached by numbered pages; beyond, and better, by cursor
RATE_LIMIT = "rate_limiting"  # the name of the rule that stands for its three fields
_CODES = {400: 7001, 404: 7002, 401: 10000, 403: 10000}


class Paged(msgspec.Struct, frozen=True):
    """A result with something to say about it."""

    result: list[Any]
    info: dict[str, Any]


class Beside(msgspec.Struct, frozen=True):
    """A result that Cloudflare's clients look for under another name."""

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
        """Other rules stay as they are; 0 is no limit."""
        rule = _rate_rule(old)
        limit = _or(self.rate_limiting_limit, rule.get("limit", 0))
        interval = _or(self.rate_limiting_interval, rule.get("per", 0))
        technique = _or(self.rate_limiting_technique, rule.get("technique", "fixed"))
        if bool(limit) != bool(interval):
            raise InvalidRequest("a rate limit needs rate_limiting_limit and rate_limiting_interval", param=RATE_LIMIT)
        others = tuple(each for each in old.limits if each.get("name") != RATE_LIMIT)
        own = {"name": RATE_LIMIT, "limit": limit, "per": interval, "technique": technique}
        return (own, *others) if limit else others


class CloudflareDesk:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._gateways = Gateways(desk)
        self._providers = CustomProviders(desk)
        self._logs = LogDesk(desk)

    def endpoints(self) -> list[Endpoint]:
        gateways, logs = f"{ROOT}/gateways", f"{ROOT}/gateways/{{gateway}}/logs"
        custom = f"{ROOT}/custom-providers"
        listed = (*PAGES, "search", "enable", "beta")
        paged = (*PAGES, *ORDER, *logquery.QUERY, "before", "meta_info", "dataset")
        erased = (*logquery.QUERY, *ORDER, "limit")
        found = [
            Endpoint("GET", gateways, "Gateways", self.gateways, query=(*PAGES, "search")),
            Endpoint("POST", gateways, "Make a gateway", self.create_gateway, GatewayWish),
            Endpoint("GET", f"{gateways}/{{gateway}}", "One gateway", self.gateway),
            Endpoint("PUT", f"{gateways}/{{gateway}}", "Change a gateway", self.change_gateway, GatewayWish),
            Endpoint("DELETE", f"{gateways}/{{gateway}}", "Delete a gateway", self.delete_gateway),
            Endpoint("GET", logs, "A gateway's log", self.logs, query=paged),
            Endpoint("DELETE", logs, "Delete records that pass the filters", self._logs.erase, query=erased),
            Endpoint("GET", f"{logs}/{{id}}", "One record", self._logs.get),
            Endpoint("PATCH", f"{logs}/{{id}}", "Give feedback on it", self.edit_log, FeedbackWish),
            Endpoint("GET", f"{logs}/{{id}}/request", "What was asked", self._logs.request),
            Endpoint("GET", f"{logs}/{{id}}/response", "What was answered", self._logs.response),
            Endpoint("GET", custom, "Custom providers", self.providers, query=listed),
            Endpoint("POST", custom, "Make a custom provider", self.create_provider, CustomProvider),
            Endpoint("GET", f"{custom}/{{slug}}", "One custom provider", self.provider),
            Endpoint("PATCH", f"{custom}/{{slug}}", "Change a custom provider", self.patch_provider),
            Endpoint("DELETE", f"{custom}/{{slug}}", "Delete a custom provider", self.delete_provider),
        ]
        return [replace(each, cloudflare=True) for each in found]

    # Gateways

    async def gateways(self, ask: Ask) -> Paged:
        stored = [self._gateways.view(each) for each in await self._desk.all("gateway", ask.account)]
        fixed = [
            Stored(id=name, version=0, updated=0, value=settings)
            for (account, name), settings in self._desk.fixed.items()
            if account == ask.account
        ]
        search = ask.query.get("search", "")
        return numbered(ask, [gateway_view(each) for each in (*fixed, *stored) if search in each.id])

    async def gateway(self, ask: Ask) -> dict[str, Any]:
        return gateway_view(await self._gateways.get(ask))

    async def create_gateway(self, ask: Ask) -> dict[str, Any]:
        wish = ask.read(GatewayWish)
        if wish.id is None:
            raise InvalidRequest("a gateway needs an id", param="id")
        made = with_parts(ask, {"gateway": wish.id}, wish.over(Settings(logs=Logging())))
        return gateway_view(await self._gateways.create(made))

    async def change_gateway(self, ask: Ask) -> dict[str, Any]:
        wish, old = ask.read(GatewayWish), await self._gateways.get(ask)
        if wish.id not in (None, old.id):
            raise InvalidRequest("the id of a gateway cannot be changed", param="id")
        return gateway_view(await self._gateways.put(with_parts(ask, {}, wish.over(old.value))))

    async def delete_gateway(self, ask: Ask) -> dict[str, Any]:
        return await self._gateways.delete(ask)

    # Logs

    async def logs(self, ask: Ask) -> Paged:
        if ask.flag("meta_info"):
            raise InvalidRequest("meta_info is not counted here", param="meta_info", hint="leave it out; see rollups")
        page, per_page = page_of(ask, 20)
        if page * per_page > DEEPEST:
            raise InvalidRequest(
                "this page is too far", param="page", hint="go on with `before`, the cursor of the last"
            )
        gateway = named(ask.parts["gateway"], "gateway")
        found = await self._logs.ordered(ask, gateway, page * per_page, await self._saved(ask, gateway))
        shown = found.records[(page - 1) * per_page :]
        info = {
            "count": len(shown),
            "page": page,
            "per_page": per_page,
            "has_more": found.has_more,
            "cursor": found.cursor,
            "complete": found.complete,
        }
        return Paged([view(each) for each in shown], info)

    async def edit_log(self, ask: Ask) -> dict[str, Any]:
        """All fields may be left out: then nothing changes."""
        return await (self._logs.get(ask) if ask.read(FeedbackWish) == FeedbackWish() else self._logs.patch(ask))

    async def _saved(self, ask: Ask, gateway: str) -> list[logquery.Asked]:
        """The filters of the dataset that the query names."""
        if not (id := ask.query.get("dataset")):
            return []
        document = await self._desk.found("dataset", ask.account, f"{gateway}/{id}")
        return decoded(document.body, logquery.SavedFilters).filters

    # Custom providers

    async def providers(self, ask: Ask) -> Paged:
        found = [provider_view(self._providers.view(d)) for d in await self._desk.all("custom_provider", ask.account)]
        for name in ("enable", "beta"):
            if (wanted := ask.flag(name)) is not None:
                found = [each for each in found if each[name] == wanted]
        search = ask.query.get("search", "").lower()
        return numbered(ask, [each for each in found if search in f"{each['name']} {each['slug']}".lower()])

    async def provider(self, ask: Ask) -> dict[str, Any]:
        return provider_view(await self._providers.get(ask))

    async def create_provider(self, ask: Ask) -> dict[str, Any]:
        given = _with_headers(ask)
        slug = given.read(CustomProvider).slug
        return provider_view(await self._providers.create(with_parts(given, {"slug": slug})))

    async def patch_provider(self, ask: Ask) -> dict[str, Any]:
        return provider_view(await self._providers.patch(_with_headers(ask)))

    async def delete_provider(self, ask: Ask) -> dict[str, Any]:
        return await self._providers.delete(ask)


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


def envelope(found: Any) -> dict[str, Any]:
    """`found` as the result, and what its type puts beside that."""
    whole = {"success": True, "errors": [], "messages": []}
    if isinstance(found, Paged):
        return {**whole, "result": found.result, "result_info": found.info}
    if isinstance(found, Beside):
        return {**whole, "result": found.result, found.name: found.result}
    return {**whole, "result": found}


def error_envelope(error: EmberlineError) -> dict[str, Any]:
    param, message = getattr(error, "param", None), str(error)
    if param and param not in message:
        message = f"{param}: {message}"
    told = {"code": _CODES.get(error.status, 7000), "message": message}
    return {"success": False, "errors": [told], "messages": [], "result": None}


def with_parts(ask: Ask, parts: dict[str, str], body: Any = None) -> Ask:
    raw = ask.body if body is None else msgspec.json.encode(body)
    return replace(ask, parts={**ask.parts, **parts}, body=raw)


def numbered(ask: Ask, found: Sequence[Any]) -> Paged:
    page, per_page = page_of(ask, 20)
    shown = list(found[(page - 1) * per_page : page * per_page])
    return Paged(shown, {"count": len(shown), "page": page, "per_page": per_page, "total_count": len(found)})


def page_of(ask: Ask, default: int) -> tuple[int, int]:
    return ask.number("page", 1, 1, 10_000), ask.number("per_page", default, 1, 100)


def _with_headers(ask: Ask) -> Ask:
    """With the headers of a custom provider as an object: Cloudflare's clients send them as a string of JSON."""
    body = ask.read(dict[str, Any])
    if not isinstance(headers := body.get("headers"), str):
        return ask
    try:
        found = msgspec.json.decode(headers or "{}", type=dict[str, str])
    except NOT_JSON as e:
        hint = '{"x-name": "value"} as a string'
        raise InvalidRequest(f"headers is not an object of strings: {e}", param="headers", hint=hint) from e
    return with_parts(ask, {}, {**body, "headers": found})


def _rate_rule(settings: Settings) -> dict[str, Any]:
    return next((dict(each) for each in settings.limits if each.get("name") == RATE_LIMIT), {})


def iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1e3, UTC).isoformat(timespec="milliseconds")


def _or(given: Any, old: Any) -> Any:
    return old if given is None else given
