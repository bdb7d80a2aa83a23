"""LogEndpoints: the request log and the rollups."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from emberline.core.errors import InvalidRequest, NotFound
from emberline.gateway.admin import logquery
from emberline.gateway.admin.ask import Ask
from emberline.gateway.admin.desk import Desk
from emberline.gateway.admin.endpoint import Endpoint
from emberline.gateway.admin.shapes import FeedbackWish
from emberline.gateway.admin.shelf import Listing
from emberline.gateway.logs.record import Record
from emberline.gateway.store.base import PATIENCE, Feedback, Page
from emberline.gateway.store.filters import Filters
from emberline.gateway.store.rollup import DIMENSIONS, DURATIONS, FIRSTS, MS, SUMS, WIDE, Cell, RollupQuery
from emberline.net.notjson import NOT_JSON

ERASE_PAGE, ERASE_PATIENCE = 1000, 2.0
EXPORT_PAGE = 500
EXPORT_PATIENCE = 5.0
MOST_CELLS = 50_000
MAX_SORTED, SORT_PATIENCE_S = 10_000, 2.0
_HEX = set("0123456789abcdef")
_SORT_KEYS: dict[str, Callable[[Record], Any]] = {
    "created_at": lambda record: record.created,
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
ORDER = ("order_by", "order_by_direction", "direction")


class LogPage(msgspec.Struct, frozen=True):
    items: list[dict[str, Any]]
    has_more: bool  # exact if complete
    cursor: str  # `before` of the next page
    complete: bool  # false: the timeout ended the search before the page was full, so the next page may have more


class Erased(msgspec.Struct, frozen=True):
    deleted: int
    has_more: bool  # more records match: send the request again


class LogDesk:
    def __init__(self, context: Desk) -> None:
        self._context = context

    def endpoints(self) -> list[Endpoint]:
        many = "/admin/accounts/{account}/logs"
        one = many + "/{id}"
        query = ("gateway", *logquery.QUERY)
        paging = (*query, "before", "limit")
        rollup_query = ("unit", "since", "until", "gateway", "dimension", "value", "over_time", "limit")
        rollups = "/admin/accounts/{account}/rollups"
        return [
            Endpoint("GET", many, "List log records, newest first", self.list, reply=LogPage, query=paging),
            Endpoint("DELETE", many, "Delete records that match the filters", self.erase, reply=Erased, query=query),
            Endpoint(
                "GET",
                many + "/export",
                "Export records that match the filters as JSON lines",
                self.refuse,
                query=query,
                lines=True,
            ),
            Endpoint("GET", one, "Get a log record", self.get),
            Endpoint("PATCH", one, "Add feedback to a log record", self.patch, FeedbackWish),
            Endpoint("GET", one + "/request", "Get a record's request body", self.request),
            Endpoint("GET", one + "/response", "Get a record's response body", self.response),
            Endpoint(
                "GET",
                rollups,
                "Requests, tokens, cost and latency by time and dimension",
                self.rollups,
                reply=Listing,
                query=rollup_query,
            ),
        ]

    async def list(self, request: Ask) -> LogPage:
        page = await self.page(request, request.query.get("gateway", ""), request.number("limit", 50, 1, 1000))
        return LogPage([view(each) for each in page.records], page.has_more, page.cursor, page.complete)

    async def page(
        self, request: Ask, gateway: str, limit: int, more: Sequence[logquery.Asked] = (), patience: float = PATIENCE
    ) -> Page:
        before = request.query.get("before", "")
        if before and (len(before) != 32 or not set(before) <= _HEX):
            raise InvalidRequest(
                f"before is {before[:80]!r}, which is not a cursor", param="before", hint="use the cursor of a page"
            )
        filters = logquery.filters(request, gateway, more)
        return await self._context.store.page(filters, before=before, limit=limit, patience=patience)

    async def ordered(self, request: Ask, gateway: str, limit: int, more: Sequence[logquery.Asked] = ()) -> Page:
        """Return the first page in the order of the query's order_by and order_by_direction.

        For another order than by time, newest first, all matching records are read and sorted. Raise InvalidRequest if
        they are too many.
        """
        order_by, direction = _read_order(request)
        if (order_by, direction) == ("created_at", "desc"):
            return await self.page(request, gateway, limit, more)
        page = await self.page(request, gateway, MAX_SORTED, more, SORT_PATIENCE_S)
        if page.has_more:
            raise InvalidRequest(
                f"the records cannot be sorted by {order_by} {direction}: more than {MAX_SORTED} match the filters, or"
                " they cannot be read in time",
                param="order_by",
                hint="narrow start_date and end_date, or order by created_at desc",
            )
        records = sorted(page.records, key=lambda r: (_SORT_KEYS[order_by](r), r.id), reverse=direction == "desc")
        return Page(records[:limit], len(records) > limit)

    async def erase(self, request: Ask) -> Erased:
        """Delete the first matching records, at most one page. The audit entry has the query."""
        filters = logquery.filters(request, _gateway(request) or request.query.get("gateway", ""))
        limit = request.number("limit", ERASE_PAGE, 1, ERASE_PAGE)
        if _read_order(request) == ("created_at", "desc"):
            page = await self._context.store.page(filters, limit=limit, patience=ERASE_PATIENCE)
        else:
            page = await self.ordered(request, filters.gateway, limit)
        await self._context.change(request, "log.delete", filters.gateway or "*", before=dict(request.query))
        await self._context.store.erase(page.records)
        return Erased(len(page.records), page.has_more)

    def lines(self, request: Ask) -> AsyncIterator[bytes]:
        """Return all matching records as JSON lines, newest first, one page per item.

        Raise InvalidRequest at once if a filter is invalid.
        """
        return self._read_lines(logquery.filters(request, request.query.get("gateway", "")))

    async def _read_lines(self, filters: Filters) -> AsyncIterator[bytes]:
        before = ""
        while True:
            page = await self._context.store.page(filters, before=before, limit=EXPORT_PAGE, patience=EXPORT_PATIENCE)
            yield b"".join(msgspec.json.encode(view(each)) + b"\n" for each in page.records)
            if not page.has_more:
                return
            before = page.cursor

    async def refuse(self, request: Ask) -> None:
        raise AssertionError("an export is read with AdminAPI.export")

    async def get(self, request: Ask) -> dict[str, Any]:
        return view(await self._record(request))

    async def patch(self, request: Ask) -> dict[str, Any]:
        spec = request.read(FeedbackWish)
        if spec == FeedbackWish():
            raise InvalidRequest("the body has no field to change", hint="set feedback, score or metadata")
        feedback = Feedback(spec.feedback, spec.score, dict(spec.metadata) if spec.metadata is not None else None)
        new = await self._context.store.feedback(request.account, _gateway(request), _record_id(request), feedback)
        if new is None:
            raise _not_found(request)
        return view(new)

    async def request(self, request: Ask) -> Any:
        return _to_json((await self._payload(request))[0])

    async def response(self, request: Ask) -> Any:
        return _to_json((await self._payload(request))[1])

    async def rollups(self, request: Ask) -> Listing:
        query = self._rollup_query(request)
        cells = await self._context.store.rollups(query)
        return Listing([cell_view(each, query.dimension in WIDE) for each in cells])

    def _rollup_query(self, request: Ask) -> RollupQuery:
        dimension = next((each for each in DIMENSIONS if each == request.query.get("dimension", "all")), None)
        if dimension is None:
            raise InvalidRequest(
                f"dimension is {request.query['dimension'][:40]!r}; it must be one of {', '.join(DIMENSIONS)}",
                param="dimension",
            )
        units = DIMENSIONS[dimension]
        unit = next((each for each in units if each == request.query.get("unit", units[-1])), None)
        if unit is None:
            raise InvalidRequest(
                f"unit is {request.query['unit'][:40]!r}; with dimension={dimension} it must be one of"
                f" {', '.join(units)}",
                param="unit",
            )
        now = self._context.now()
        until = logquery.moment(request.query["until"], "until") if "until" in request.query else now + 1
        since = logquery.moment(request.query["since"], "since") if "since" in request.query else until - MS["day"]
        over_time = request.flag("over_time")
        return RollupQuery(
            account=request.account,
            unit=unit,
            since=since,
            until=until,
            gateway=request.query.get("gateway", ""),
            dimension=dimension,
            value=request.query.get("value", ""),
            over_time=over_time is not False,
            limit=request.number("limit", 10_000, 1, MOST_CELLS),
        )

    async def _record(self, request: Ask) -> Record:
        found = await self._context.store.record(request.account, _gateway(request), _record_id(request))
        if found is None:
            raise _not_found(request)
        return found

    async def _payload(self, request: Ask) -> tuple[bytes, bytes]:
        found = await self._context.store.payload(request.account, _gateway(request), _record_id(request))
        if found is None:
            raise NotFound(
                f"log record {request.parts['id'][:80]!r} does not exist or has no stored bodies",
                hint="bodies are stored if logs.payloads is true and neither zdr nor the request forbids it",
            )
        return found.request, found.response


def view(record: Record) -> dict[str, Any]:
    """Return a record with Cloudflare's names where it has some.

    `micros` is the exact cost; `cost` is the same in dollars, for display.
    """
    usage = record.usage
    fields = msgspec.to_builtins(record)
    for name in ("status", "usage", "duration_ms", "first_byte_ms"):
        del fields[name]
    return {
        **fields,
        "created_at": datetime.fromtimestamp(record.created / 1e3, UTC).isoformat(timespec="milliseconds"),
        "status_code": record.status,
        "cost": None if record.micros is None else record.micros / 1e6,
        "duration": record.duration_ms,
        "first_byte": record.first_byte_ms,
        "tokens_in": usage.input,
        "tokens_out": usage.output,
        "usage": msgspec.to_builtins(usage),
        "usage_metadata": {"input_cached_tokens": usage.cached_read},
    }


def cell_view(cell: Cell, wide: bool) -> dict[str, Any]:
    """Return a cell; `wide`: with percentiles of its histograms."""
    fields: dict[str, Any] = {"start": cell.start, "value": cell.value, **dict(zip(SUMS, cell.counts, strict=False))}
    if wide:
        for what, buckets in (("duration", DURATIONS), ("first_byte", FIRSTS)):
            for name, ms in zip(("p50", "p90", "p99"), cell.percentiles((0.5, 0.9, 0.99), buckets), strict=True):
                fields[f"{what}_{name}"] = None if ms is None else round(ms, 1)
    return fields


def _read_order(request: Ask) -> tuple[str, str]:
    order_by = request.query.get("order_by", "created_at")
    if order_by not in _SORT_KEYS:
        raise InvalidRequest(
            f"order_by is {order_by[:40]!r}; it must be one of {', '.join(_SORT_KEYS)}", param="order_by"
        )
    direction = request.query.get("order_by_direction", request.query.get("direction", "desc"))
    if direction not in ("asc", "desc"):
        raise InvalidRequest(
            f"order_by_direction is {direction[:40]!r}; it must be asc or desc", param="order_by_direction"
        )
    return order_by, direction


def _gateway(request: Ask) -> str:
    return request.parts.get("gateway", "")


def _record_id(request: Ask) -> str:
    id = request.parts["id"].lower()
    if len(id) != 32 or not set(id) <= _HEX:
        raise _not_found(request)
    return id


def _not_found(request: Ask) -> NotFound:
    return NotFound(f"account {request.account[:80]!r} has no log record {request.parts['id'][:80]!r}")


def _to_json(payload: bytes) -> Any:
    """Return decoded JSON; else the payload as text."""
    try:
        return msgspec.json.decode(payload)
    except NOT_JSON:
        return payload.decode("utf-8", "replace")
