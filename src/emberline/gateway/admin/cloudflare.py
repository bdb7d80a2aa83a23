"""The management API in Cloudflare's form.

It serves the same data under Cloudflare's paths, field names and reply envelope. A field of a feature that this gateway
lacks, such as log push, is accepted only with the value that disables the feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec

from emberline.core.errors import EmberlineError, InvalidRequest
from emberline.gateway.admin import log_query
from emberline.gateway.admin.admin_context import AdminContext
from emberline.gateway.admin.admin_request import AdminRequest, check_name, convert_value, decode_json
from emberline.gateway.admin.document_endpoints import StoredView
from emberline.gateway.admin.endpoint import AdminEndpoint
from emberline.gateway.admin.gateways import CustomProviderEndpoints, GatewayEndpoints
from emberline.gateway.admin.logs import ORDER_PARAMETERS, LogEndpoints, build_record_view
from emberline.gateway.admin.schemas import CustomProvider, FeedbackSpec, StrictStruct
from emberline.gateway.core.settings import Backoff, GatewaySettings, LogSettings, RetrySettings
from emberline.net.json_errors import JSON_DECODE_ERRORS

ROOT = "/accounts/{account}/ai-gateway"
PAGE_PARAMETERS = ("page", "per_page")
MAX_PAGED_RECORDS = 10_000  # records that page numbers can reach; later records need the cursor
RATE_LIMIT_RULE = "rate_limiting"  # name of the rule for Cloudflare's three rate_limiting fields
_CODES = {400: 7001, 404: 7002, 401: 10000, 403: 10000}  # HTTP status -> Cloudflare's error code


class PagedResult(msgspec.Struct, frozen=True):
    """A list of results. The reply contains the page numbers in `result_info`."""

    result: list[Any]
    info: dict[str, Any]


class NamedResult(msgspec.Struct, frozen=True):
    """A result that the reply contains twice: in the field `result`, and in the field that `name` names.

    Cloudflare's clients read the second field.
    """

    name: str
    result: Any


class CloudflareGatewaySpec(StrictStruct, frozen=True, kw_only=True):
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

    def apply_to(self, old: GatewaySettings) -> GatewaySettings:
        rates, retries = self._changed_limit_rules(old), old.retries
        return msgspec.structs.replace(
            old,
            cache_ttl=_new_or_old(self.cache_ttl, old.cache_ttl),
            cache_invalidate_on_update=_new_or_old(self.cache_invalidate_on_update, old.cache_invalidate_on_update),
            authentication=_new_or_old(self.authentication, old.authentication),
            zdr=_new_or_old(self.zdr, old.zdr),
            logs=msgspec.structs.replace(old.logs, collect=_new_or_old(self.collect_logs, old.logs.collect)),
            limits=rates,
            retries=RetrySettings(
                attempts=_new_or_old(self.retry_max_attempts, retries.attempts),
                delay=retries.delay if self.retry_delay is None else self.retry_delay / 1e3,
                backoff=_new_or_old(self.retry_backoff, retries.backoff),
            ),
        )

    def _changed_limit_rules(self, old: GatewaySettings) -> tuple[dict[str, Any], ...]:
        """Return the gateway's limit rules, with the rate limit of this request in place of the old rate limit.

        A rate limit of 0 removes the rule.
        """
        rule = _find_rate_limit_rule(old)
        limit = _new_or_old(self.rate_limiting_limit, rule.get("limit", 0))
        interval = _new_or_old(self.rate_limiting_interval, rule.get("per", 0))
        technique = _new_or_old(self.rate_limiting_technique, rule.get("technique", "fixed"))
        if bool(limit) != bool(interval):
            raise InvalidRequest(
                f"rate_limiting_limit and rate_limiting_interval must be set together, not {limit} and {interval}",
                param=RATE_LIMIT_RULE,
                hint="set both above 0, or both to 0 for no limit",
            )
        others = tuple(each for each in old.limits if each.get("name") != RATE_LIMIT_RULE)
        own = {"name": RATE_LIMIT_RULE, "limit": limit, "per": interval, "technique": technique}
        return (own, *others) if limit else others


class CloudflareEndpoints:
    def __init__(self, context: AdminContext) -> None:
        self._context = context
        self._gateways = GatewayEndpoints(context)
        self._providers = CustomProviderEndpoints(context)
        self._logs = LogEndpoints(context)

    def endpoints(self) -> list[AdminEndpoint]:
        gateways, logs = f"{ROOT}/gateways", f"{ROOT}/gateways/{{gateway}}/logs"
        custom = f"{ROOT}/custom-providers"
        list_query = (*PAGE_PARAMETERS, "search", "enable", "beta")
        logs_query = (
            *PAGE_PARAMETERS,
            *ORDER_PARAMETERS,
            *log_query.FILTER_PARAMETERS,
            "before",
            "meta_info",
            "dataset",
        )
        erase_query = (*log_query.FILTER_PARAMETERS, *ORDER_PARAMETERS, "limit")
        endpoints = [
            AdminEndpoint("GET", gateways, "List gateways", self.list_gateways, query=(*PAGE_PARAMETERS, "search")),
            AdminEndpoint("POST", gateways, "Create a gateway", self.create_gateway, CloudflareGatewaySpec),
            AdminEndpoint("GET", f"{gateways}/{{gateway}}", "Get a gateway", self.get_gateway),
            AdminEndpoint(
                "PUT", f"{gateways}/{{gateway}}", "Change a gateway", self.change_gateway, CloudflareGatewaySpec
            ),
            AdminEndpoint("DELETE", f"{gateways}/{{gateway}}", "Delete a gateway", self.delete_gateway),
            AdminEndpoint("GET", logs, "List a gateway's log records", self.list_logs, query=logs_query),
            AdminEndpoint(
                "DELETE", logs, "Delete records that match the filters", self._logs.erase_records, query=erase_query
            ),
            AdminEndpoint("GET", f"{logs}/{{id}}", "Get a log record", self._logs.get),
            AdminEndpoint("PATCH", f"{logs}/{{id}}", "Add feedback to a log record", self.edit_log, FeedbackSpec),
            AdminEndpoint("GET", f"{logs}/{{id}}/request", "Get a record's request body", self._logs.get_request_body),
            AdminEndpoint(
                "GET", f"{logs}/{{id}}/response", "Get a record's response body", self._logs.get_response_body
            ),
            AdminEndpoint("GET", custom, "List custom providers", self.list_providers, query=list_query),
            AdminEndpoint("POST", custom, "Create a custom provider", self.create_provider, CustomProvider),
            AdminEndpoint("GET", f"{custom}/{{slug}}", "Get a custom provider", self.get_provider),
            AdminEndpoint("PATCH", f"{custom}/{{slug}}", "Change a custom provider", self.patch_provider),
            AdminEndpoint("DELETE", f"{custom}/{{slug}}", "Delete a custom provider", self.delete_provider),
        ]
        return [replace(each, uses_cloudflare_envelope=True) for each in endpoints]

    # Gateways

    async def list_gateways(self, request: AdminRequest) -> PagedResult:
        configured = [
            StoredView(id=name, version=0, updated=0, value=settings)
            for (account, name), settings in self._context.configured.items()
            if account == request.account
        ]
        stored = [
            self._gateways.to_view(each)
            for each in await self._context.list_all_documents("gateway", request.account)
            if (request.account, each.id) not in self._context.configured
        ]
        search = request.query.get("search", "")
        return select_page(request, [build_gateway_view(each) for each in (*configured, *stored) if search in each.id])

    async def get_gateway(self, request: AdminRequest) -> dict[str, Any]:
        return build_gateway_view(await self._gateways.get(request))

    async def create_gateway(self, request: AdminRequest) -> dict[str, Any]:
        spec = request.decode_body(CloudflareGatewaySpec)
        if spec.id is None:
            raise InvalidRequest("id must be set for a new gateway", param="id", hint="set id to the gateway's name")
        create = with_path_parameters(request, {"gateway": spec.id}, spec.apply_to(GatewaySettings(logs=LogSettings())))
        return build_gateway_view(await self._gateways.create(create))

    async def change_gateway(self, request: AdminRequest) -> dict[str, Any]:
        spec, old = request.decode_body(CloudflareGatewaySpec), await self._gateways.get(request)
        if spec.id not in (None, old.id):
            raise InvalidRequest(
                f"the id of gateway {old.id!r} cannot be changed to {spec.id!r}", param="id", hint="leave id out"
            )
        return build_gateway_view(await self._gateways.put(with_path_parameters(request, {}, spec.apply_to(old.value))))

    async def delete_gateway(self, request: AdminRequest) -> dict[str, Any]:
        return await self._gateways.delete(request)

    # Logs

    async def list_logs(self, request: AdminRequest) -> PagedResult:
        if request.bool_parameter("meta_info"):
            raise InvalidRequest(
                "meta_info=true is not supported: the gateway does not count the matching records",
                param="meta_info",
                hint="leave meta_info out; /admin/accounts/ACCOUNT/rollups has counts",
            )
        page, per_page = read_page_parameters(request, 20)
        if page * per_page > MAX_PAGED_RECORDS:
            raise InvalidRequest(
                f"page {page} with {per_page} records per page is beyond the first {MAX_PAGED_RECORDS} records",
                param="page",
                hint="continue with `before`, the `cursor` of the last page",
            )
        gateway = check_name(request.path_parameters["gateway"], "gateway")
        saved = await self._load_saved_filters(request, gateway)
        found = await self._logs.read_sorted_page(request, gateway, page * per_page, saved)
        records = found.records[(page - 1) * per_page :]
        info = {
            "count": len(records),
            "page": page,
            "per_page": per_page,
            "has_more": found.has_more,
            "cursor": found.cursor,
            "complete": found.complete,
        }
        return PagedResult([build_record_view(each) for each in records], info)

    async def edit_log(self, request: AdminRequest) -> dict[str, Any]:
        """Add feedback to a log record.

        A body without fields changes nothing, whereas LogEndpoints.patch rejects such a body.
        """
        return await (
            self._logs.get(request)
            if request.decode_body(FeedbackSpec) == FeedbackSpec()
            else self._logs.patch(request)
        )

    async def _load_saved_filters(self, request: AdminRequest, gateway: str) -> list[log_query.CloudflareFilter]:
        """Return the stored filters of the dataset that the query parameter `dataset` names."""
        if not (id := request.query.get("dataset")):
            return []
        document = await self._context.get_document("dataset", request.account, f"{gateway}/{id}")
        return decode_json(document.body, log_query.SavedFilters).filters

    # Custom providers

    async def list_providers(self, request: AdminRequest) -> PagedResult:
        found = [
            build_provider_view(self._providers.to_view(d))
            for d in await self._context.list_all_documents("custom_provider", request.account)
        ]
        for name in ("enable", "beta"):
            if (value := request.bool_parameter(name)) is not None:
                found = [each for each in found if each[name] == value]
        search = request.query.get("search", "").lower()
        return select_page(request, [each for each in found if search in f"{each['name']} {each['slug']}".lower()])

    async def get_provider(self, request: AdminRequest) -> dict[str, Any]:
        return build_provider_view(await self._providers.get(request))

    async def create_provider(self, request: AdminRequest) -> dict[str, Any]:
        create = _with_decoded_headers(request)
        slug = create.decode_body(CustomProvider).slug
        return build_provider_view(await self._providers.create(with_path_parameters(create, {"slug": slug})))

    async def patch_provider(self, request: AdminRequest) -> dict[str, Any]:
        return build_provider_view(await self._providers.patch(_with_decoded_headers(request)))

    async def delete_provider(self, request: AdminRequest) -> dict[str, Any]:
        return await self._providers.delete(request)


def build_gateway_view(stored: StoredView) -> dict[str, Any]:
    settings = convert_value(msgspec.to_builtins(stored.value), GatewaySettings)
    rate = _find_rate_limit_rule(settings)
    return {
        "id": stored.id,
        "modified_at": to_iso_time(stored.updated),
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


def build_provider_view(stored: StoredView) -> dict[str, Any]:
    return {"id": stored.id, "modified_at": to_iso_time(stored.updated), **msgspec.to_builtins(stored.value)}


def build_success_envelope(result: Any) -> dict[str, Any]:
    """Return Cloudflare's reply envelope with the result.

    A PagedResult or NamedResult adds its extra fields to the envelope.
    """
    success = {"success": True, "errors": [], "messages": []}
    if isinstance(result, PagedResult):
        return {**success, "result": result.result, "result_info": result.info}
    if isinstance(result, NamedResult):
        return {**success, "result": result.result, result.name: result.result}
    return {**success, "result": result}


def build_error_envelope(error: EmberlineError) -> dict[str, Any]:
    param, message = getattr(error, "param", None), str(error)
    if param and param not in message:
        message = f"{param}: {message}"
    fields = {"code": _CODES.get(error.status, 7000), "message": message}
    return {"success": False, "errors": [fields], "messages": [], "result": None}


def with_path_parameters(request: AdminRequest, added_parameters: dict[str, str], body: Any = None) -> AdminRequest:
    """Return a copy of the request with more path parameters and, unless `body` is None, a new body."""
    raw = request.body if body is None else msgspec.json.encode(body)
    return replace(request, path_parameters={**request.path_parameters, **added_parameters}, body=raw)


def select_page(request: AdminRequest, all_items: Sequence[Any]) -> PagedResult:
    """Return the page of `all_items` that the query parameters page and per_page select."""
    page, per_page = read_page_parameters(request, 20)
    items = list(all_items[(page - 1) * per_page : page * per_page])
    return PagedResult(items, {"count": len(items), "page": page, "per_page": per_page, "total_count": len(all_items)})


def read_page_parameters(request: AdminRequest, default_per_page: int) -> tuple[int, int]:
    """Return the query parameters page and per_page."""
    return request.int_parameter("page", 1, 1, 10_000), request.int_parameter("per_page", default_per_page, 1, 100)


def _with_decoded_headers(request: AdminRequest) -> AdminRequest:
    """Return the request with the body's field `headers` decoded.

    Cloudflare's clients send this field as a string that contains JSON.
    """
    body = request.decode_body(dict[str, Any])
    if not isinstance(headers := body.get("headers"), str):
        return request
    try:
        found = msgspec.json.decode(headers or "{}", type=dict[str, str])
    except JSON_DECODE_ERRORS as e:
        hint = 'send an object such as {"x-name": "value"}, or the same as a string'
        raise InvalidRequest(
            f"headers must be a JSON object of strings, not {headers[:80]!r}: {e}", param="headers", hint=hint
        ) from e
    return with_path_parameters(request, {}, {**body, "headers": found})


def _find_rate_limit_rule(settings: GatewaySettings) -> dict[str, Any]:
    return next((dict(each) for each in settings.limits if each.get("name") == RATE_LIMIT_RULE), {})


def to_iso_time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1e3, UTC).isoformat(timespec="milliseconds")


def _new_or_old(new: Any, old: Any) -> Any:
    return old if new is None else new
