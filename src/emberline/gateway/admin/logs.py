"""LogEndpoints: reads, exports and deletes log records, stores feedback on them, and reads rollups.

A rollup is a sum over many log records.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from emberline.core.errors import InvalidRequest, NotFound, Overloaded
from emberline.gateway.admin import log_query
from emberline.gateway.admin.admin_context import AdminContext
from emberline.gateway.admin.admin_request import AdminRequest
from emberline.gateway.admin.document_endpoints import Listing
from emberline.gateway.admin.endpoint import AdminEndpoint
from emberline.gateway.admin.schemas import FeedbackSpec
from emberline.gateway.core.log_record import LogRecord
from emberline.gateway.store.base import PAGE_TIMEOUT_S, Feedback, RecordPage
from emberline.gateway.store.filters import LogFilters
from emberline.gateway.store.rollup import (
    DIMENSION_UNITS,
    DURATION_BUCKETS,
    FIRST_BYTE_BUCKETS,
    HISTOGRAM_DIMENSIONS,
    SUMS,
    UNIT_MS,
    Dimension,
    RollupCell,
    RollupQuery,
)
from emberline.net.json_errors import JSON_DECODE_ERRORS

MAX_ERASED_RECORDS, ERASE_TIMEOUT_S = 1000, 2.0
EXPORT_PAGE_RECORDS = 500
MAX_TAILS = 20  # open at the same time in this process
TAIL_POLL_INTERVAL_S, TAIL_POLLS, TAIL_KEEPALIVE_POLLS = 1.0, 3600, 15
TAIL_WINDOW_MS = UNIT_MS["hour"]  # how long a request may take and still appear
MAX_TAIL_RECORDS = 500  # compared each time
MAX_FILTER_VALUES = 200  # of each filter
FILTER_DIMENSIONS: dict[str, Dimension] = {
    "provider": "provider",
    "model": "model",
    "status": "status",
    "error": "error",
    "key_id": "key",
    "user": "user",
}
EXPORT_PAGE_TIMEOUT_S = 5.0
MAX_ROLLUP_CELLS = 50_000
MAX_SORTED_RECORDS, SORT_TIMEOUT_S = 10_000, 2.0
_HEX = set("0123456789abcdef")
_SORT_KEYS: dict[str, Callable[[LogRecord], Any]] = {
    "created_at": lambda record: record.created_ms,
    "provider": lambda record: record.provider,
    "model": lambda record: record.model,
    "success": lambda record: record.success,
    "cached": lambda record: record.cached,
    "cost": lambda record: -1 if record.micros is None else record.micros,
    "tokens_in": lambda record: record.usage.input,
    "tokens_out": lambda record: record.usage.output,
    "duration": lambda record: record.duration_ms,
    "feedback": lambda record: record.feedback or 0,
}
ORDER_PARAMETERS = ("order_by", "order_by_direction", "direction")


class LogPageView(msgspec.Struct, frozen=True):
    items: list[dict[str, Any]]
    has_more: bool  # exact if complete
    cursor: str  # `before` of the next page
    complete: bool  # false: the timeout ended the search before the page was full, so the next page may have more


class EraseResult(msgspec.Struct, frozen=True):
    deleted: int
    has_more: bool  # more records match: send the request again


class FilterValue(msgspec.Struct, frozen=True):
    value: str
    requests: int


class FilterValuesView(msgspec.Struct, frozen=True):
    """The values of each filter in the given time, most requests first."""

    provider: list[FilterValue]
    model: list[FilterValue]
    status: list[FilterValue]
    error: list[FilterValue]
    key_id: list[FilterValue]
    user: list[FilterValue]


class LogEndpoints:
    def __init__(self, context: AdminContext, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._context = context
        self._sleep = sleep
        self._open_tails = 0

    def endpoints(self) -> list[AdminEndpoint]:
        many = "/admin/accounts/{account}/logs"
        one = many + "/{id}"
        query = ("gateway", *log_query.FILTER_PARAMETERS)
        paging = (*query, "before", "limit")
        rollup_query = ("unit", "since", "until", "gateway", "dimension", "value", "over_time", "limit")
        rollups = "/admin/accounts/{account}/rollups"
        return [
            AdminEndpoint("GET", many, "List log records, newest first", self.list, reply=LogPageView, query=paging),
            AdminEndpoint(
                "DELETE",
                many,
                "Delete records that match the filters",
                self.erase_records,
                reply=EraseResult,
                query=query,
            ),
            AdminEndpoint(
                "GET",
                many + "/export",
                "Export records that match the filters as JSON lines",
                self.reject_json_reply,
                query=query,
                lines=self.export_lines,
            ),
            AdminEndpoint(
                "GET",
                many + "/tail",
                "Stream new records that match the filters as JSON lines, for an hour",
                self.reject_json_reply,
                query=query,
                lines=self.tail_lines,
            ),
            AdminEndpoint(
                "GET",
                many + "/values",
                "List the values of filters with the most requests",
                self.list_filter_values,
                reply=FilterValuesView,
                query=("gateway", "since", "until"),
            ),
            AdminEndpoint("GET", one, "Get a log record", self.get),
            AdminEndpoint("PATCH", one, "Add feedback to a log record", self.patch, FeedbackSpec),
            AdminEndpoint("GET", one + "/request", "Get a record's request body", self.get_request_body),
            AdminEndpoint("GET", one + "/response", "Get a record's response body", self.get_response_body),
            AdminEndpoint(
                "GET",
                rollups,
                "Requests, tokens, cost and latency by time and dimension",
                self.list_rollups,
                reply=Listing,
                query=rollup_query,
            ),
        ]

    async def list(self, request: AdminRequest) -> LogPageView:
        page = await self.read_page(
            request, request.query.get("gateway", ""), request.int_parameter("limit", 50, 1, 1000)
        )
        return LogPageView(
            [build_record_view(each) for each in page.records], page.has_more, page.cursor, page.complete
        )

    async def read_page(
        self,
        request: AdminRequest,
        gateway: str,
        limit: int,
        extra_filters: Sequence[log_query.CloudflareFilter] = (),
        timeout_s: float = PAGE_TIMEOUT_S,
    ) -> RecordPage:
        before = request.query.get("before", "")
        if before and (len(before) != 32 or not set(before) <= _HEX):
            raise InvalidRequest(
                f"the parameter `before` must be the cursor of a page, not {before[:80]!r}",
                param="before",
                hint="copy `cursor` of the last page",
            )
        filters = log_query.parse_filters(request, gateway, extra_filters)
        return await self._context.store.read_page(filters, before=before, limit=limit, timeout_s=timeout_s)

    async def read_sorted_page(
        self, request: AdminRequest, gateway: str, limit: int, extra_filters: Sequence[log_query.CloudflareFilter] = ()
    ) -> RecordPage:
        """Return the first page of log records in the order that the query parameters request.

        The parameters are order_by and order_by_direction. The store sorts only by time, newest first. For any other
        order all matching records are read and sorted here. Raise InvalidRequest if too many records match.
        """
        order_by, direction = _parse_sort_order(request)
        if (order_by, direction) == ("created_at", "desc"):
            return await self.read_page(request, gateway, limit, extra_filters)
        page = await self.read_page(request, gateway, MAX_SORTED_RECORDS, extra_filters, SORT_TIMEOUT_S)
        if page.has_more:
            raise InvalidRequest(
                f"log records cannot be sorted by {order_by} {direction}: more than {MAX_SORTED_RECORDS} records"
                " match, or reading them takes too long",
                param="order_by",
                hint="narrow start_date and end_date, or order by created_at desc",
            )
        records = sorted(page.records, key=lambda r: (_SORT_KEYS[order_by](r), r.id), reverse=direction == "desc")
        return RecordPage(records[:limit], len(records) > limit)

    async def erase_records(self, request: AdminRequest) -> EraseResult:
        """Delete the first matching log records, at most one page. The audit entry contains the query."""
        filters = log_query.parse_filters(request, _gateway_in_path(request) or request.query.get("gateway", ""))
        limit = request.int_parameter("limit", MAX_ERASED_RECORDS, 1, MAX_ERASED_RECORDS)
        if _parse_sort_order(request) == ("created_at", "desc"):
            page = await self._context.store.read_page(filters, limit=limit, timeout_s=ERASE_TIMEOUT_S)
        else:
            page = await self.read_sorted_page(request, filters.gateway, limit)
        await self._context.commit(request, "log.delete", filters.gateway or "*", before=dict(request.query))
        await self._context.store.erase_records(page.records)
        return EraseResult(len(page.records), page.has_more)

    def export_lines(self, request: AdminRequest) -> AsyncIterator[bytes]:
        """Return all matching log records as JSON lines, newest first.

        Each item of the iterator has the lines of one page. Raise InvalidRequest at once, before the first item is
        read, if a filter is invalid.
        """
        return self._read_json_lines(log_query.parse_filters(request, request.query.get("gateway", "")))

    async def _read_json_lines(self, filters: LogFilters) -> AsyncIterator[bytes]:
        before = ""
        while True:
            page = await self._context.store.read_page(
                filters, before=before, limit=EXPORT_PAGE_RECORDS, timeout_s=EXPORT_PAGE_TIMEOUT_S
            )
            yield b"".join(msgspec.json.encode(build_record_view(each)) + b"\n" for each in page.records)
            if not page.has_more:
                return
            before = page.cursor

    def tail_lines(self, request: AdminRequest) -> AsyncIterator[bytes]:
        """Return the matching log records that are written from now on, as JSON lines, oldest first.

        An empty line is sent first, when records are no longer missed, and then every few seconds, so that a client
        that has left is noticed. Raise Overloaded or
        InvalidRequest at once.
        """
        if self._open_tails >= MAX_TAILS:
            raise Overloaded(
                f"{MAX_TAILS} streams of new log records are open, the highest allowed number",
                retry_after=10,
                hint="close one of them, or poll /logs",
            )
        return self._read_new_lines(log_query.parse_filters(request, request.query.get("gateway", "")))

    async def _read_new_lines(self, filters: LogFilters) -> AsyncIterator[bytes]:
        """Compare the newest records with those of the last time.

        A record's id has the time at which its request began, so a record can be older than those that were sent.
        """
        self._open_tails += 1
        try:
            known = {record.id for record in await self._read_newest(filters)}
            yield b"\n"  # the client can now list the records so far, and will miss none
            for poll in range(1, TAIL_POLLS + 1):
                await self._sleep(TAIL_POLL_INTERVAL_S)
                newest = await self._read_newest(filters)
                added = [record for record in reversed(newest) if record.id not in known]
                known = {record.id for record in newest}
                if added:
                    yield b"".join(msgspec.json.encode(build_record_view(each)) + b"\n" for each in added)
                elif poll % TAIL_KEEPALIVE_POLLS == 0:
                    yield b"\n"
        finally:
            self._open_tails -= 1

    async def _read_newest(self, filters: LogFilters) -> Sequence[LogRecord]:
        since = max(filters.since or 0, self._context.now_ms() - TAIL_WINDOW_MS)
        return (await self._context.store.read_page(replace(filters, since=since), limit=MAX_TAIL_RECORDS)).records

    async def list_filter_values(self, request: AdminRequest) -> FilterValuesView:
        query = self._parse_rollup_query(request)
        found = {}
        for name, dimension in FILTER_DIMENSIONS.items():
            unit = DIMENSION_UNITS[dimension][-1]
            cells = await self._context.store.read_rollups(
                replace(query, dimension=dimension, unit=unit, over_time=False, limit=MAX_FILTER_VALUES)
            )
            requests = SUMS.index("requests")
            values: dict[str, int] = {}
            for cell in cells:
                value = cell.value.partition("/")[2] if dimension == "model" else cell.value  # PROVIDER/MODEL
                values[value] = values.get(value, 0) + cell.counts[requests]
            found[name] = [FilterValue(v, n) for v, n in sorted(values.items(), key=lambda each: -each[1])]
        return FilterValuesView(**found)

    async def reject_json_reply(self, request: AdminRequest) -> None:
        raise AssertionError("AdminAPI.handle was called for an export, which only AdminAPI.export can answer")

    async def get(self, request: AdminRequest) -> dict[str, Any]:
        return build_record_view(await self._find_record(request))

    async def patch(self, request: AdminRequest) -> dict[str, Any]:
        spec = request.decode_body(FeedbackSpec)
        if spec == FeedbackSpec():
            raise InvalidRequest(
                "the body must contain feedback, score or metadata", hint="set at least one of these fields"
            )
        feedback = Feedback(spec.feedback, spec.score, dict(spec.metadata) if spec.metadata is not None else None)
        new = await self._context.store.add_feedback(
            request.account, _gateway_in_path(request), _parse_record_id(request), feedback
        )
        if new is None:
            raise _record_not_found(request)
        return build_record_view(new)

    async def get_request_body(self, request: AdminRequest) -> Any:
        return _decode_json_or_text((await self._find_payload(request))[0])

    async def get_response_body(self, request: AdminRequest) -> Any:
        return _decode_json_or_text((await self._find_payload(request))[1])

    async def list_rollups(self, request: AdminRequest) -> Listing:
        query = self._parse_rollup_query(request)
        cells = await self._context.store.read_rollups(query)
        return Listing([build_rollup_cell_view(each, query.dimension in HISTOGRAM_DIMENSIONS) for each in cells])

    def _parse_rollup_query(self, request: AdminRequest) -> RollupQuery:
        dimension = next((each for each in DIMENSION_UNITS if each == request.query.get("dimension", "all")), None)
        if dimension is None:
            raise InvalidRequest(
                f"dimension must be one of {', '.join(DIMENSION_UNITS)}, not {request.query['dimension'][:40]!r}",
                param="dimension",
            )
        units = DIMENSION_UNITS[dimension]
        unit = next((each for each in units if each == request.query.get("unit", units[-1])), None)
        if unit is None:
            raise InvalidRequest(
                f"unit must be one of {', '.join(units)} for dimension={dimension}, not {request.query['unit'][:40]!r}",
                param="unit",
            )
        now = self._context.now_ms()
        until = log_query.parse_time(request.query["until"], "until") if "until" in request.query else now + 1
        since = (
            log_query.parse_time(request.query["since"], "since")
            if "since" in request.query
            else until - UNIT_MS["day"]
        )
        over_time = request.bool_parameter("over_time")
        return RollupQuery(
            account=request.account,
            unit=unit,
            since=since,
            until=until,
            gateway=request.query.get("gateway", ""),
            dimension=dimension,
            value=request.query.get("value", ""),
            over_time=over_time is not False,
            limit=request.int_parameter("limit", 10_000, 1, MAX_ROLLUP_CELLS),
        )

    async def _find_record(self, request: AdminRequest) -> LogRecord:
        found = await self._context.store.get_record(
            request.account, _gateway_in_path(request), _parse_record_id(request)
        )
        if found is None:
            raise _record_not_found(request)
        return found

    async def _find_payload(self, request: AdminRequest) -> tuple[bytes, bytes]:
        found = await self._context.store.get_payload(
            request.account, _gateway_in_path(request), _parse_record_id(request)
        )
        if found is None:
            raise NotFound(
                f"log record {request.path_parameters['id'][:80]!r} does not exist or has no stored bodies",
                hint="bodies are stored if logs.payloads is true, unless zdr or the request disables it",
            )
        return found.request, found.response


def build_record_view(record: LogRecord) -> dict[str, Any]:
    """Return a log record as JSON, with Cloudflare's field names where Cloudflare has the field.

    `micros` is the exact cost in micro-dollars. `cost` is the same amount in dollars, for display.
    """
    usage = record.usage
    fields = msgspec.to_builtins(record)
    for name in ("status", "usage", "duration_ms", "first_byte_ms"):
        del fields[name]
    return {
        **fields,
        "created_at": datetime.fromtimestamp(record.created_ms / 1e3, UTC).isoformat(timespec="milliseconds"),
        "status_code": record.status,
        "cost": None if record.micros is None else record.micros / 1e6,
        "duration": record.duration_ms,
        "first_byte": record.first_byte_ms,
        "tokens_in": usage.input,
        "tokens_out": usage.output,
        "usage": msgspec.to_builtins(usage),
        "usage_metadata": {"input_cached_tokens": usage.cached_read},
    }


def build_rollup_cell_view(cell: RollupCell, with_percentiles: bool) -> dict[str, Any]:
    """Return the JSON of a rollup cell (one row of summed usage).

    `with_percentiles`: include percentiles computed from the cell's histograms.
    """
    fields: dict[str, Any] = {"start": cell.start, "value": cell.value, **dict(zip(SUMS, cell.counts, strict=False))}
    if with_percentiles:
        for what, buckets in (("duration", DURATION_BUCKETS), ("first_byte", FIRST_BYTE_BUCKETS)):
            for name, ms in zip(("p50", "p90", "p99"), cell.percentiles((0.5, 0.9, 0.99), buckets), strict=True):
                fields[f"{what}_{name}"] = None if ms is None else round(ms, 1)
    return fields


def _parse_sort_order(request: AdminRequest) -> tuple[str, str]:
    order_by = request.query.get("order_by", "created_at")
    if order_by not in _SORT_KEYS:
        raise InvalidRequest(
            f"order_by must be one of {', '.join(_SORT_KEYS)}, not {order_by[:40]!r}", param="order_by"
        )
    direction = request.query.get("order_by_direction", request.query.get("direction", "desc"))
    if direction not in ("asc", "desc"):
        raise InvalidRequest(
            f"order_by_direction must be asc or desc, not {direction[:40]!r}", param="order_by_direction"
        )
    return order_by, direction


def _gateway_in_path(request: AdminRequest) -> str:
    return request.path_parameters.get("gateway", "")


def _parse_record_id(request: AdminRequest) -> str:
    id = request.path_parameters["id"].lower()
    if len(id) != 32 or not set(id) <= _HEX:
        raise _record_not_found(request)
    return id


def _record_not_found(request: AdminRequest) -> NotFound:
    return NotFound(
        f"account {request.account[:80]!r} has no log record {request.path_parameters['id'][:80]!r}",
        hint="list the gateway's logs for valid ids; old records are deleted after logs.days",
    )


def _decode_json_or_text(payload: bytes) -> Any:
    """Return the payload as decoded JSON, or as text if the payload is not JSON."""
    try:
        return msgspec.json.decode(payload)
    except JSON_DECODE_ERRORS:
        return payload.decode("utf-8", "replace")
