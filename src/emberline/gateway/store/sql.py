"""SQL that both databases understand, but for how they mark parameters: `?1` or `$1`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from emberline.gateway.store.filters import Filters, Span
from emberline.gateway.store.rollup import COUNTERS, MS, SUMS, WIDE, Dimension, Place, RollupQuery
from emberline.gateway.store.tables import COLUMNS, PLACE, quoted

_ONE_OF = ("provider", "model", "request_type", "key_id", "user", "event_id", "session_id", "error", "feedback")
_SPANS = ("micros", "tokens_in", "tokens_out", "duration_ms")


class Query:
    """SQL text and its parameters, in step."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self.values: list[Any] = []
        self.clauses: list[str] = []

    def value(self, value: object) -> str:
        self.values.append(value)
        return f"{self._mark}{len(self.values)}"

    def holds(self, left: str, operator: str, value: object) -> None:
        self.clauses.append(f"{left} {operator} {self.value(value)}")

    def one_of(self, column: str, values: tuple[object, ...]) -> None:
        if len(values) == 1:
            self.holds(column, "=", values[0])
        elif values:
            self.clauses.append(f"{column} IN ({', '.join(self.value(v) for v in values)})")

    def within(self, column: str, span: Span) -> None:
        if span.least is not None:
            self.holds(column, ">=", span.least)
        if span.most is not None:
            self.holds(column, "<=", span.most)

    @property
    def where(self) -> str:
        return " AND ".join(self.clauses)


def marks(mark: str, count: int) -> str:
    return ", ".join(f"{mark}{i + 1}" for i in range(count))


def select_logs(mark: str, filters: Filters, low: bytes, high: bytes, limit: int) -> tuple[str, list[Any]]:
    """Records with low <= id < high, newest first."""
    query = Query(mark)
    query.holds("account", "=", filters.account)
    if filters.gateway:
        query.holds("gateway", "=", filters.gateway)
    query.holds("id", ">=", low)
    query.holds("id", "<", high)
    success = filters.success
    if filters.status:
        query.one_of("status", filters.status)
        if min(filters.status) >= 400 and success is None:
            success = False  # says nothing new, but lets the index of failures be used
    if success is not None:
        query.clauses.append(f"success = {int(success)}")
    if filters.cached is not None:
        query.clauses.append(f"cached = {int(filters.cached)}")
    for name in _ONE_OF:
        query.one_of(f'"{name}"', getattr(filters, name))
    query.one_of("id", tuple(bytes.fromhex(id) for id in filters.id))
    for name in _SPANS:
        query.within(name, getattr(filters, name))
    for key, value in filters.metadata.items():
        inner = f"key = {query.value(key)} AND value = {query.value(value)}"
        bounds = f"id >= {query.value(low)} AND id < {query.value(high)}"
        query.clauses.append(f"id IN (SELECT id FROM labels WHERE {inner} AND {bounds})")
    order = f"ORDER BY id DESC LIMIT {int(limit)}"
    return f"SELECT {quoted(COLUMNS)} FROM logs WHERE {query.where} {order}", query.values


def select_log(mark: str, account: str, gateway: str, id: str) -> tuple[str, list[Any]]:
    """One record."""
    low = bytes.fromhex(id)
    return select_logs(mark, Filters(account, gateway), low, low + b"\0", 1)


def select_rollups(mark: str, asked: RollupQuery) -> tuple[str, list[Any]]:
    query = Query(mark)
    query.holds("unit", "=", asked.unit)
    query.holds("account", "=", asked.account)
    query.holds("dimension", "=", asked.dimension)
    query.holds("start", ">=", asked.since - asked.since % MS[asked.unit])
    query.holds("start", "<", asked.until)
    if asked.gateway:
        query.holds("gateway", "=", asked.gateway)
    if asked.value:
        query.holds("value", "=", asked.value)
    table, counters = _cells(asked.dimension)
    if asked.over_time and asked.gateway:  # these are the cells themselves
        by = f"ORDER BY start, gateway, value LIMIT {int(asked.limit)}"  # as the table lies
        return f"SELECT start, value, {', '.join(counters)} FROM {table} WHERE {query.where} {by}", query.values
    sums = ", ".join(f"CAST(SUM({counter}) AS BIGINT)" for counter in counters)
    if asked.over_time:
        by = f"GROUP BY start, value ORDER BY start, value LIMIT {int(asked.limit)}"
        return f"SELECT start, value, {sums} FROM {table} WHERE {query.where} {by}", query.values
    by = f"GROUP BY value ORDER BY SUM(micros) DESC, SUM(requests) DESC, value LIMIT {int(asked.limit)}"
    start = query.value(asked.since)
    return f"SELECT CAST({start} AS BIGINT), value, {sums} FROM {table} WHERE {query.where} {by}", query.values


def upsert_rollup(mark: str, dimension: Dimension) -> str:
    """Parameters: those of `rollup_values`."""
    table, counters = _cells(dimension)
    names = (*PLACE, *counters)
    added = ", ".join(f"{counter} = {table}.{counter} + excluded.{counter}" for counter in counters)
    into = f"INSERT INTO {table} ({quoted(names)}) VALUES ({marks(mark, len(names))})"
    return f"{into} ON CONFLICT ({quoted(PLACE)}) DO UPDATE SET {added}"


def rollup_values(cells: Mapping[Place, Sequence[int]], wide: bool) -> list[tuple[Any, ...]]:
    """In one order everywhere, so that replicas which write the same cells wait for each other in turn."""
    return sorted(
        (unit, account, dimension, start, gateway, value, *counts)
        for (unit, start, account, gateway, dimension, value), counts in cells.items()
        if (dimension in WIDE) == wide
    )


def _cells(dimension: Dimension) -> tuple[str, tuple[str, ...]]:
    return ("rollups", COUNTERS) if dimension in WIDE else ("spends", SUMS)


def select_documents(
    mark: str, kind: str, account: str, prefix: str, after: tuple[str, str], limit: int
) -> tuple[str, list[Any]]:
    query = Query(mark)
    query.holds("kind", "=", kind)
    if account:
        query.holds("account", "=", account)
    if prefix:
        query.holds("id", ">=", prefix)
        query.holds("id", "<", prefix + "\U0010ffff")
    if after[0]:
        query.clauses.append(f"(id, account) > ({query.value(after[0])}, {query.value(after[1])})")
    columns = "kind, account, id, body, version, updated"
    return f"SELECT {columns} FROM documents WHERE {query.where} ORDER BY id, account LIMIT {int(limit)}", query.values


def select_audits(mark: str, account: str, before: int, limit: int) -> tuple[str, list[Any]]:
    query = Query(mark)
    query.clauses.append("number > 0")
    if account:
        query.holds("account", "=", account)
    if before:
        query.holds("number", "<", before)
    columns = "at, account, actor, action, target, before, after, number"
    return f"SELECT {columns} FROM audits WHERE {query.where} ORDER BY number DESC LIMIT {int(limit)}", query.values
