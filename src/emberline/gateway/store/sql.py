"""SQL for both databases, which differ only in their placeholders: `?1` or `$1`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from emberline.gateway.store.filters import Filters, Span
from emberline.gateway.store.rollup import (
    COUNTERS,
    DIMENSIONS,
    HOURS_KEPT,
    MANY,
    MS,
    SUMS,
    WIDE,
    Dimension,
    Place,
    RollupQuery,
    Unit,
)
from emberline.gateway.store.tables import COLUMNS, PLACE, quoted

_ONE_OF = ("provider", "model", "request_type", "key_id", "user", "event_id", "session_id", "error", "feedback",
           "request_content_type", "response_content_type")  # fmt: skip
_SPANS = {name: name for name in ("micros", "tokens_in", "tokens_out", "duration_ms")} | {
    "tokens": "tokens_in + tokens_out"
}
_LIKE_ESCAPES = str.maketrans({"\\": "\\\\", "%": "\\%", "_": "\\_"})


class Query:
    """Conditions of a WHERE clause and their parameters."""

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

    def none_of(self, expression: str, values: tuple[object, ...]) -> None:
        inner = ", ".join(self.value(v) for v in values)
        self.clauses.append(f"({expression} IS NULL OR {expression} NOT IN ({inner}))")

    def contains(self, columns: tuple[str, ...], texts: tuple[str, ...]) -> None:
        patterns = [self.value(f"%{text.translate(_LIKE_ESCAPES)}%") for text in texts]
        matches = [f"LOWER({column}) LIKE LOWER({each}) ESCAPE '\\'" for column in columns for each in patterns]
        self.clauses.append(f"({' OR '.join(matches)})")

    @property
    def where(self) -> str:
        return " AND ".join(self.clauses)


def marks(mark: str, count: int) -> str:
    return ", ".join(f"{mark}{i + 1}" for i in range(count))


SELECT_COUNTERS = "SELECT gateway, bucket, slot, used, ends FROM counters WHERE ends > {0}1"
UPSERT_COUNTER = (
    "INSERT INTO counters VALUES ({0}1, {0}2, {0}3, {0}4, {0}5)"
    " ON CONFLICT (gateway, bucket, slot) DO UPDATE SET used = counters.used + excluded.used"
)
INSERT_COUNTED = "INSERT INTO counted VALUES ({0}1, {0}2) ON CONFLICT DO NOTHING"
DELETE_COUNTERS = "DELETE FROM counters WHERE ends <= {0}1"
DELETE_COUNTED = "DELETE FROM counted WHERE at < {0}1"
COUNTED_KEPT_MS = 30 * 86_400_000  # a journal of limits that is older will not be replayed any more


def select_logs(mark: str, filters: Filters, low: bytes, high: bytes, limit: int) -> tuple[str, list[Any]]:
    """Return the query for records with low <= id < high, newest first."""
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
            success = False  # redundant, but lets the database use the index of failures
    if success is not None:
        query.clauses.append(f"success = {int(success)}")
    if filters.cached is not None:
        query.clauses.append(f"cached = {int(filters.cached)}")
    if filters.rescued is not None:
        query.clauses.append("step > 0 AND success = 1" if filters.rescued else "(step = 0 OR success = 0)")
    for name in _ONE_OF:
        query.one_of(f'"{name}"', getattr(filters, name))
    query.one_of("id", tuple(bytes.fromhex(id) for id in filters.id))
    for name, expression in _SPANS.items():
        query.within(expression, getattr(filters, name))
    for unlike in filters.unlike:
        if unlike.field == "id":
            query.none_of("id", tuple(bytes.fromhex(str(id)) for id in unlike.values))
        else:
            query.none_of(_SPANS.get(unlike.field, f'"{unlike.field}"'), unlike.values)
    for containing in filters.containing:
        query.contains(tuple(f'"{name}"' for name in containing.fields), containing.texts)
    for key, value in filters.metadata.items():
        inner = f"key = {query.value(key)} AND value = {query.value(value)}"
        bounds = f"id >= {query.value(low)} AND id < {query.value(high)}"
        query.clauses.append(f"id IN (SELECT id FROM labels WHERE {inner} AND {bounds})")
    order = f"ORDER BY id DESC LIMIT {int(limit)}"
    return f"SELECT {quoted(COLUMNS)} FROM logs WHERE {query.where} {order}", query.values


def select_newest(mark: str) -> str:
    """Return the query for the newest id. Parameters: lowest id, and the id below which to search."""
    return f"SELECT id FROM logs WHERE id >= {mark}1 AND id < {mark}2 ORDER BY id DESC LIMIT 1"


def select_log(mark: str, account: str, gateway: str, id: str) -> tuple[str, list[Any]]:
    """Return the query for one record."""
    low = bytes.fromhex(id)
    return select_logs(mark, Filters(account, gateway), low, low + b"\0", 1)


def select_rollups(mark: str, rollup_query: RollupQuery) -> tuple[str, list[Any]]:
    query = Query(mark)
    if not rollup_query.over_time:
        return _select_whole_time(query, rollup_query), query.values
    table, counters = _cells(rollup_query.dimension)
    since = rollup_query.since - rollup_query.since % MS[rollup_query.unit]
    where = _rollups_where(query, rollup_query, rollup_query.unit, since, rollup_query.until)
    if rollup_query.gateway:  # the cells themselves, in the order of the primary key
        order = f"ORDER BY start, gateway, value LIMIT {int(rollup_query.limit)}"
        return f"SELECT start, value, {', '.join(counters)} FROM {table} WHERE {where} {order}", query.values
    order = f"GROUP BY start, value ORDER BY start, value LIMIT {int(rollup_query.limit)}"
    return f"SELECT start, value, {_sums(counters)} FROM {table} WHERE {where} {order}", query.values


def _select_whole_time(query: Query, rollup_query: RollupQuery) -> str:
    """Return the query for one cell per value, those with the highest cost first."""
    table, counters = _cells(rollup_query.dimension)
    conditions = [_rollups_where(query, rollup_query, *piece) for piece in rollup_query.pieces()] or ["1 = 0"]

    def cells(columns: str, also: str = "") -> str:
        return " UNION ALL ".join(f"SELECT {columns} FROM {table} WHERE {each}{also}" for each in conditions)

    order = f"GROUP BY value ORDER BY SUM(micros) DESC, SUM(requests) DESC, value LIMIT {int(rollup_query.limit)}"
    only_largest = ""
    if rollup_query.dimension in MANY:  # find the largest values first, then sum up all counters of these only
        only_largest = f" AND value IN (SELECT value FROM ({cells('value, micros, requests')}) AS narrow {order})"
    start = query.value(rollup_query.since)
    found = cells(", ".join(("value", *counters)), only_largest)
    return f"SELECT CAST({start} AS BIGINT), value, {_sums(counters)} FROM ({found}) AS cells {order}"


def _rollups_where(query: Query, rollup_query: RollupQuery, unit: Unit, since: int, until: int) -> str:
    query.clauses.clear()
    query.holds("unit", "=", unit)
    query.holds("account", "=", rollup_query.account)
    query.holds("dimension", "=", rollup_query.dimension)
    query.holds("start", ">=", since)
    query.holds("start", "<", until)
    if rollup_query.gateway:
        query.holds("gateway", "=", rollup_query.gateway)
    if rollup_query.value:
        query.holds("value", "=", rollup_query.value)
    return query.where


def _sums(counters: Sequence[str]) -> str:
    return ", ".join(f"CAST(SUM({counter}) AS BIGINT)" for counter in counters)


def upsert_rollup(mark: str, dimension: Dimension) -> str:
    """Return the statement that adds counts to a cell. Parameters: a row of `rollup_values`."""
    table, counters = _cells(dimension)
    names = (*PLACE, *counters)
    added = ", ".join(f"{counter} = {table}.{counter} + excluded.{counter}" for counter in counters)
    into = f"INSERT INTO {table} ({quoted(names)}) VALUES ({marks(mark, len(names))})"
    return f"{into} ON CONFLICT ({quoted(PLACE)}) DO UPDATE SET {added}"


def rollup_values(cells: Mapping[Place, Sequence[int]], wide: bool) -> list[tuple[Any, ...]]:
    """Return rows of cells with (`wide`) or without histograms, sorted so that replicas cannot deadlock."""
    return sorted(
        (unit, account, dimension, start, gateway, value, *counts)
        for (unit, start, account, gateway, dimension, value), counts in cells.items()
        if (dimension in WIDE) == wide
    )


def next_account(mark: str, table: str) -> str:
    """Return the query for the next account that has cells of a unit. Parameters: unit, account."""
    return f"SELECT MIN(account) FROM {table} WHERE unit = {mark}1 AND account > {mark}2"


def delete_cells(mark: str, table: str) -> str:
    """Return the statement that deletes old cells, in the order of the primary key.

    Parameters: unit, account, dimension, start below which cells are deleted.
    """
    return f"DELETE FROM {table} WHERE unit = {mark}1 AND account = {mark}2 AND dimension = {mark}3 AND start < {mark}4"


def outdated(start: int) -> list[tuple[str, Unit, Dimension, int]]:
    """Return table, unit, dimension and first kept start of cells to delete with records before `start`."""
    kept_days: dict[Unit, int] = {"minute": 0, "hour": HOURS_KEPT}
    return [
        (_cells(dimension)[0], unit, dimension, start - days * MS["day"])
        for unit, days in kept_days.items()
        for dimension, units in DIMENSIONS.items()
        if unit in units
    ]


_USERS_OF_DAY = "unit = 'day' AND account = {0}1 AND dimension = 'user' AND start = {0}2 AND value <> {0}3"
_USER_ORDER = "micros, requests, gateway, value"


def select_crowd(mark: str, kept: int) -> str:
    """Return the query for a day's users after the `kept` largest, largest first, at most `kept` + 1.

    Parameters: account, start, OTHER_USERS.
    """
    order = ", ".join(f"{name} DESC" for name in _USER_ORDER.split(", "))
    where = _USERS_OF_DAY.format(mark)
    return f"SELECT {_USER_ORDER} FROM spends WHERE {where} ORDER BY {order} LIMIT {kept + 1} OFFSET {kept}"


def take_out(mark: str, *, shared: bool) -> str:
    """Return the statement that deletes a user of a day and all smaller ones, and returns their counts.

    Parameters: account, start, OTHER_USERS, and the user's micros, requests, gateway, value. `shared`: skip rows that
    another replica has locked.
    """
    largest = ", ".join(f"{mark}{i}" for i in range(4, 8))
    where = f"{_USERS_OF_DAY.format(mark)} AND ({_USER_ORDER}) <= ({largest})"
    if shared:
        where = f"ctid = ANY(ARRAY(SELECT ctid FROM spends WHERE {where} FOR UPDATE SKIP LOCKED))"
    return f"DELETE FROM spends WHERE {where} RETURNING gateway, {', '.join(SUMS)}"


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
