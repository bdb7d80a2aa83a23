"""SQL for SQLite and PostgreSQL, which differ only in their placeholders: `?1` or `$1`.

`placeholder_prefix` is `?` or `$`. Functions return the statement, or the statement with its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from emberline.gateway.store.filters import LogFilters, NumberRange
from emberline.gateway.store.rollup import (
    COUNTERS,
    DIMENSION_UNITS,
    HIGH_CARDINALITY_DIMENSIONS,
    HISTOGRAM_DIMENSIONS,
    HOURLY_CELLS_KEPT_DAYS,
    SUMS,
    UNIT_MS,
    CellKey,
    Dimension,
    RollupQuery,
    RollupUnit,
)
from emberline.gateway.store.tables import CELL_KEY_COLUMNS, COLUMNS, quote_names

_ONE_OF = ("provider", "model", "request_type", "key_id", "user", "event_id", "session_id", "error", "feedback",
           "request_content_type", "response_content_type")  # fmt: skip
_RANGES = {name: name for name in ("micros", "tokens_in", "tokens_out", "duration_ms")} | {
    "tokens": "tokens_in + tokens_out"
}
_LIKE_ESCAPES = str.maketrans({"\\": "\\\\", "%": "\\%", "_": "\\_"})


class SQLQuery:
    """Conditions of a WHERE clause and their parameters."""

    def __init__(self, placeholder_prefix: str) -> None:
        self._placeholder_prefix = placeholder_prefix
        self.values: list[Any] = []
        self.clauses: list[str] = []

    def add_value(self, value: object) -> str:
        self.values.append(value)
        return f"{self._placeholder_prefix}{len(self.values)}"

    def add_condition(self, left: str, operator: str, value: object) -> None:
        self.clauses.append(f"{left} {operator} {self.add_value(value)}")

    def add_in(self, column: str, values: tuple[object, ...]) -> None:
        if len(values) == 1:
            self.add_condition(column, "=", values[0])
        elif values:
            self.clauses.append(f"{column} IN ({', '.join(self.add_value(v) for v in values)})")

    def add_range(self, column: str, number_range: NumberRange) -> None:
        if number_range.minimum is not None:
            self.add_condition(column, ">=", number_range.minimum)
        if number_range.maximum is not None:
            self.add_condition(column, "<=", number_range.maximum)

    def add_not_in(self, expression: str, values: tuple[object, ...]) -> None:
        inner = ", ".join(self.add_value(v) for v in values)
        self.clauses.append(f"({expression} IS NULL OR {expression} NOT IN ({inner}))")

    def add_contains(self, columns: tuple[str, ...], texts: tuple[str, ...]) -> None:
        patterns = [self.add_value(f"%{text.translate(_LIKE_ESCAPES)}%") for text in texts]
        matches = [f"LOWER({column}) LIKE LOWER({each}) ESCAPE '\\'" for column in columns for each in patterns]
        self.clauses.append(f"({' OR '.join(matches)})")

    @property
    def where_clause(self) -> str:
        return " AND ".join(self.clauses)


def make_placeholders(placeholder_prefix: str, count: int) -> str:
    return ", ".join(f"{placeholder_prefix}{i + 1}" for i in range(count))


SELECT_COUNTERS = "SELECT gateway, bucket, slot, used, ends FROM counters WHERE ends > {0}1"
UPSERT_COUNTER = (
    "INSERT INTO counters VALUES ({0}1, {0}2, {0}3, {0}4, {0}5)"
    " ON CONFLICT (gateway, bucket, slot) DO UPDATE SET used = counters.used + excluded.used"
)
INSERT_COUNTED = "INSERT INTO counted VALUES ({0}1, {0}2) ON CONFLICT DO NOTHING"
DELETE_COUNTERS = "DELETE FROM counters WHERE ends <= {0}1"
DELETE_COUNTED = "DELETE FROM counted WHERE at < {0}1"
APPLIED_BATCHES_KEPT_MS = 30 * 86_400_000  # a journal of limits that is older will not be replayed any more


def select_logs(
    placeholder_prefix: str, filters: LogFilters, first_id: bytes, end_id: bytes, limit: int
) -> tuple[str, list[Any]]:
    """Return the query for log records with first_id <= id < end_id, newest first."""
    query = SQLQuery(placeholder_prefix)
    query.add_condition("account", "=", filters.account)
    if filters.gateway:
        query.add_condition("gateway", "=", filters.gateway)
    query.add_condition("id", ">=", first_id)
    query.add_condition("id", "<", end_id)
    success = filters.success
    if filters.status:
        query.add_in("status", filters.status)
        if min(filters.status) >= 400 and success is None:
            success = False  # redundant, but lets the database use the index of failures
    if success is not None:
        query.clauses.append(f"success = {int(success)}")
    if filters.cached is not None:
        query.clauses.append(f"cached = {int(filters.cached)}")
    if filters.rescued is not None:
        query.clauses.append("step > 0 AND success = 1" if filters.rescued else "(step = 0 OR success = 0)")
    for name in _ONE_OF:
        query.add_in(f'"{name}"', getattr(filters, name))
    query.add_in("id", tuple(bytes.fromhex(id) for id in filters.id))
    for name, expression in _RANGES.items():
        query.add_range(expression, getattr(filters, name))
    for exclusion in filters.excluded:
        if exclusion.field == "id":
            query.add_not_in("id", tuple(bytes.fromhex(str(id)) for id in exclusion.values))
        else:
            query.add_not_in(_RANGES.get(exclusion.field, f'"{exclusion.field}"'), exclusion.values)
    for contains in filters.contains:
        query.add_contains(tuple(f'"{name}"' for name in contains.fields), contains.texts)
    for key, value in filters.metadata.items():
        inner = f"key = {query.add_value(key)} AND value = {query.add_value(value)}"
        bounds = f"id >= {query.add_value(first_id)} AND id < {query.add_value(end_id)}"
        query.clauses.append(f"id IN (SELECT id FROM labels WHERE {inner} AND {bounds})")
    order = f"ORDER BY id DESC LIMIT {int(limit)}"
    return f"SELECT {quote_names(COLUMNS)} FROM logs WHERE {query.where_clause} {order}", query.values


def select_newest_id(placeholder_prefix: str) -> str:
    """Return the query for the newest record id. Its parameters are the lowest id and the end id."""
    return (
        f"SELECT id FROM logs WHERE id >= {placeholder_prefix}1 AND id < {placeholder_prefix}2 ORDER BY id DESC LIMIT 1"
    )


def select_log(placeholder_prefix: str, account: str, gateway: str, id: str) -> tuple[str, list[Any]]:
    """Return the query for one log record."""
    low = bytes.fromhex(id)
    return select_logs(placeholder_prefix, LogFilters(account, gateway), low, low + b"\0", 1)


def select_rollups(placeholder_prefix: str, rollup_query: RollupQuery) -> tuple[str, list[Any]]:
    query = SQLQuery(placeholder_prefix)
    if not rollup_query.over_time:
        return _select_whole_time(query, rollup_query), query.values
    table, counters = _table_and_counters(rollup_query.dimension)
    since = rollup_query.since - rollup_query.since % UNIT_MS[rollup_query.unit]
    where = _rollup_where_clause(query, rollup_query, rollup_query.unit, since, rollup_query.until)
    if rollup_query.gateway:  # the cells themselves, in the order of the primary key
        order = f"ORDER BY start, gateway, value LIMIT {int(rollup_query.limit)}"
        return f"SELECT start, value, {', '.join(counters)} FROM {table} WHERE {where} {order}", query.values
    order = f"GROUP BY start, value ORDER BY start, value LIMIT {int(rollup_query.limit)}"
    return f"SELECT start, value, {_sum_expressions(counters)} FROM {table} WHERE {where} {order}", query.values


def _select_whole_time(query: SQLQuery, rollup_query: RollupQuery) -> str:
    """Return the query for the sums over the whole time, one for each value of the dimension.

    The value with the highest cost comes first.
    """
    table, counters = _table_and_counters(rollup_query.dimension)
    conditions = [_rollup_where_clause(query, rollup_query, *piece) for piece in rollup_query.split_by_unit()] or [
        "1 = 0"
    ]

    def select_cells(columns: str, extra_condition: str = "") -> str:
        return " UNION ALL ".join(f"SELECT {columns} FROM {table} WHERE {each}{extra_condition}" for each in conditions)

    order = f"GROUP BY value ORDER BY SUM(micros) DESC, SUM(requests) DESC, value LIMIT {int(rollup_query.limit)}"
    only_largest = ""
    if (
        rollup_query.dimension in HIGH_CARDINALITY_DIMENSIONS
    ):  # find the largest values first, then sum up all counters of these only
        only_largest = (
            f" AND value IN (SELECT value FROM ({select_cells('value, micros, requests')}) AS narrow {order})"
        )
    start = query.add_value(rollup_query.since)
    found = select_cells(", ".join(("value", *counters)), only_largest)
    return f"SELECT CAST({start} AS BIGINT), value, {_sum_expressions(counters)} FROM ({found}) AS cells {order}"


def _rollup_where_clause(query: SQLQuery, rollup_query: RollupQuery, unit: RollupUnit, since: int, until: int) -> str:
    query.clauses.clear()
    query.add_condition("unit", "=", unit)
    query.add_condition("account", "=", rollup_query.account)
    query.add_condition("dimension", "=", rollup_query.dimension)
    query.add_condition("start", ">=", since)
    query.add_condition("start", "<", until)
    if rollup_query.gateway:
        query.add_condition("gateway", "=", rollup_query.gateway)
    if rollup_query.value:
        query.add_condition("value", "=", rollup_query.value)
    return query.where_clause


def _sum_expressions(counters: Sequence[str]) -> str:
    return ", ".join(f"CAST(SUM({counter}) AS BIGINT)" for counter in counters)


def upsert_rollup(placeholder_prefix: str, dimension: Dimension) -> str:
    """Return the statement that adds counts to a rollup cell. Its parameters are a row of `rollup_rows`."""
    table, counters = _table_and_counters(dimension)
    names = (*CELL_KEY_COLUMNS, *counters)
    added = ", ".join(f"{counter} = {table}.{counter} + excluded.{counter}" for counter in counters)
    into = f"INSERT INTO {table} ({quote_names(names)}) VALUES ({make_placeholders(placeholder_prefix, len(names))})"
    return f"{into} ON CONFLICT ({quote_names(CELL_KEY_COLUMNS)}) DO UPDATE SET {added}"


def rollup_rows(cells: Mapping[CellKey, Sequence[int]], with_histograms: bool) -> list[tuple[Any, ...]]:
    """Return the cells as database rows: only those with histograms, or only those without.

    The rows are sorted, so that all replicas lock them in the same order and cannot deadlock.
    """
    return sorted(
        (unit, account, dimension, start, gateway, value, *counts)
        for (unit, start, account, gateway, dimension, value), counts in cells.items()
        if (dimension in HISTOGRAM_DIMENSIONS) == with_histograms
    )


def select_next_account(placeholder_prefix: str, table: str) -> str:
    """Return the query for the next account, in alphabetical order, that has rollup cells of a time unit.

    Parameters: unit (minute, hour or day), previous account.
    """
    return f"SELECT MIN(account) FROM {table} WHERE unit = {placeholder_prefix}1 AND account > {placeholder_prefix}2"


def delete_cells(placeholder_prefix: str, table: str) -> str:
    """Return the statement that deletes the cells before a time.

    Parameters, in the order of the primary key: unit, account, dimension, time of the first cell to keep.
    """
    mark = placeholder_prefix
    return f"DELETE FROM {table} WHERE unit = {mark}1 AND account = {mark}2 AND dimension = {mark}3 AND start < {mark}4"


def list_cells_to_delete(records_before_ms: int) -> list[tuple[str, RollupUnit, Dimension, int]]:
    """Return which cells to delete together with the log records before `records_before_ms`.

    An item is (table, unit, dimension, time of the first cell to keep).
    """
    kept_days: dict[RollupUnit, int] = {"minute": 0, "hour": HOURLY_CELLS_KEPT_DAYS}
    return [
        (_table_and_counters(dimension)[0], unit, dimension, records_before_ms - days * UNIT_MS["day"])
        for unit, days in kept_days.items()
        for dimension, units in DIMENSION_UNITS.items()
        if unit in units
    ]


_USERS_OF_DAY = "unit = 'day' AND account = {0}1 AND dimension = 'user' AND start = {0}2 AND value <> {0}3"
_USER_ORDER = "micros, requests, gateway, value"


def select_small_users(placeholder_prefix: str, kept_users: int) -> str:
    """Return the query for the users of a day that are not among the `kept_users` with the highest cost.

    It returns at most `kept_users` + 1 users, highest cost first. Parameters: account, start of the day, OTHER_USERS
    (the user name of merged cells, which the query leaves out).
    """
    order = ", ".join(f"{name} DESC" for name in _USER_ORDER.split(", "))
    where = _USERS_OF_DAY.format(placeholder_prefix)
    return f"SELECT {_USER_ORDER} FROM spends WHERE {where} ORDER BY {order} LIMIT {kept_users + 1} OFFSET {kept_users}"


def delete_small_users(placeholder_prefix: str, *, skip_locked: bool) -> str:
    """Return the statement that deletes the cells of a user and of all users with a lower cost on a day.

    The statement returns the gateway and the counts of each deleted cell. Parameters: account, start of the day,
    OTHER_USERS (the user name of merged cells, which are kept), and the user's micros, requests, gateway and name.
    `skip_locked`: leave rows that a different replica has locked.
    """
    largest = ", ".join(f"{placeholder_prefix}{i}" for i in range(4, 8))
    where = f"{_USERS_OF_DAY.format(placeholder_prefix)} AND ({_USER_ORDER}) <= ({largest})"
    if skip_locked:
        where = f"ctid = ANY(ARRAY(SELECT ctid FROM spends WHERE {where} FOR UPDATE SKIP LOCKED))"
    return f"DELETE FROM spends WHERE {where} RETURNING gateway, {', '.join(SUMS)}"


def _table_and_counters(dimension: Dimension) -> tuple[str, tuple[str, ...]]:
    return ("rollups", COUNTERS) if dimension in HISTOGRAM_DIMENSIONS else ("spends", SUMS)


def select_documents(
    placeholder_prefix: str, kind: str, account: str, prefix: str, after: tuple[str, str], limit: int
) -> tuple[str, list[Any]]:
    query = SQLQuery(placeholder_prefix)
    query.add_condition("kind", "=", kind)
    if account:
        query.add_condition("account", "=", account)
    if prefix:
        query.add_condition("id", ">=", prefix)
        query.add_condition("id", "<", prefix + "\U0010ffff")
    if after[0]:
        query.clauses.append(f"(id, account) > ({query.add_value(after[0])}, {query.add_value(after[1])})")
    columns = "kind, account, id, body, version, updated"
    return (
        f"SELECT {columns} FROM documents WHERE {query.where_clause} ORDER BY id, account LIMIT {int(limit)}",
        query.values,
    )


def select_audits(placeholder_prefix: str, account: str, before: int, limit: int) -> tuple[str, list[Any]]:
    query = SQLQuery(placeholder_prefix)
    query.clauses.append("number > 0")
    if account:
        query.add_condition("account", "=", account)
    if before:
        query.add_condition("number", "<", before)
    columns = "at, account, actor, action, target, before, after, number"
    return (
        f"SELECT {columns} FROM audits WHERE {query.where_clause} ORDER BY number DESC LIMIT {int(limit)}",
        query.values,
    )
