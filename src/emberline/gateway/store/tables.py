"""Tables: the schema of both databases, and the conversion between log records and rows.

`{int}`, `{text}`, `{blob}`, ... in a statement stand for the database's own types. In both databases text sorts by its
bytes, and booleans are 0 or 1. Values that most rows lack are NULL, so that a partial index contains only the rows that
have the value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from emberline.gateway.core.errors import StoreFailed
from emberline.gateway.core.log_record import LogRecord
from emberline.gateway.store.rollup import COUNTERS, SUMS
from emberline.wire.usage import Usage

_USAGE = {name: name for name in Usage.__struct_fields__} | {"input": "tokens_in", "output": "tokens_out"}
_SPARSE = ("user", "event_id", "session_id", "message")
_FLAGS = ("success", "cached", "stream", "estimated", "custom_cost")
_CONVERTED = ("id", "usage", "metadata", *_SPARSE, *_FLAGS)
_PLAIN = tuple(name for name in LogRecord.__struct_fields__ if name not in _CONVERTED)
COLUMNS = ("id", *_PLAIN, *_FLAGS, *_SPARSE, *_USAGE.values(), "metadata")

_NUMBERS = {"status", "step", "attempts", "duration_ms", *_FLAGS, *_USAGE.values()}
_OPTIONAL_NUMBERS = {"micros", "first_byte_ms", "feedback", "score"}


def _column_type(column: str) -> str:
    if column == "id":
        return "{blob} NOT NULL"
    if column in _OPTIONAL_NUMBERS:
        return "{int}"
    if column in _NUMBERS:
        return "{int} NOT NULL"
    return "{text}" if column in _SPARSE else "{text} NOT NULL"


def quote_names(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)  # `user` is a reserved word of SQL


_ADDED_COLUMNS = ("message",)  # by later migrations
_LOG_COLUMNS = ", ".join(f'"{column}" {_column_type(column)}' for column in COLUMNS if column not in _ADDED_COLUMNS)

CELL_KEY_COLUMNS = ("unit", "account", "dimension", "start", "gateway", "value")


def _create_rollup_table(table: str, counters: Sequence[str]) -> str:
    key = ", ".join(f"{name} {'{int}' if name == 'start' else '{text}'} NOT NULL" for name in CELL_KEY_COLUMNS)
    counts = ", ".join(f"{counter} {{int}} NOT NULL" for counter in counters)
    return f"CREATE TABLE {table} ({key}, {counts}, PRIMARY KEY ({quote_names(CELL_KEY_COLUMNS)})) {{clustered}}"


MAIN_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE state (name {text} PRIMARY KEY, value {int} NOT NULL)",
        "INSERT INTO state VALUES ('version', 0)",
        "CREATE TABLE documents (kind {text} NOT NULL, account {text} NOT NULL, id {text} NOT NULL,"
        " body {blob} NOT NULL, version {int} NOT NULL, updated {int} NOT NULL, PRIMARY KEY (kind, account, id))",
        "CREATE INDEX documents_id ON documents (kind, id)",  # a key is looked up before its account is known
        "CREATE TABLE audits (number {serial}, at {int} NOT NULL, account {text} NOT NULL, actor {text} NOT NULL,"
        " action {text} NOT NULL, target {text} NOT NULL, before {blob} NOT NULL, after {blob} NOT NULL)",
        "CREATE INDEX audits_account ON audits (account, number)",
        _create_rollup_table("rollups", COUNTERS),
        _create_rollup_table("spends", SUMS),
        "CREATE TABLE batches (id {blob} PRIMARY KEY, at {int} NOT NULL)",  # appended batches: a retry adds nothing
    ),
)

# A separate file in SQLite, so that limits never wait for other writers.
LIMIT_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE counters (gateway {text} NOT NULL, bucket {text} NOT NULL, slot {int} NOT NULL,"
        " used {int} NOT NULL, ends {int} NOT NULL, PRIMARY KEY (gateway, bucket, slot)) {clustered}",
        "CREATE INDEX counters_ends ON counters (ends)",
        "CREATE TABLE counted (batch {text} PRIMARY KEY, at {int} NOT NULL)",  # applied batches: a retry adds nothing
    ),
)

# A file per day in SQLite, a partition per day in PostgreSQL: {partitioned}.
LOG_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        f"CREATE TABLE logs ({_LOG_COLUMNS}, PRIMARY KEY (id)) {{partitioned}}",
        "CREATE TABLE labels (key {text} NOT NULL, value {text} NOT NULL, id {blob} NOT NULL,"
        " PRIMARY KEY (key, value, id)) {partitioned}",
        "CREATE INDEX logs_model ON logs (model, id)",
        "CREATE INDEX logs_key ON logs (key_id, id)",
        'CREATE INDEX logs_user ON logs ("user", id) WHERE "user" IS NOT NULL',
        "CREATE INDEX logs_event ON logs (event_id, id) WHERE event_id IS NOT NULL",
        "CREATE INDEX logs_session ON logs (session_id, id) WHERE session_id IS NOT NULL",
        "CREATE INDEX logs_feedback ON logs (feedback, id) WHERE feedback IS NOT NULL",
        "CREATE INDEX logs_failed ON logs (id) WHERE success = 0",
        "CREATE INDEX logs_later ON logs (id) WHERE step > 0",
    ),
    ("ALTER TABLE logs ADD COLUMN message {text}",),
)
PAYLOAD_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE payloads (id {blob} NOT NULL, request {blob} NOT NULL, response {blob} NOT NULL,"
        " PRIMARY KEY (id)) {partitioned}",
    ),
)

_json = msgspec.json.Encoder()
_plain = attrgetter(*_PLAIN)
_flags = attrgetter(*_FLAGS)
_sparse = attrgetter(*_SPARSE)
_usage = attrgetter(*_USAGE)


def record_to_row(record: LogRecord) -> tuple[Any, ...]:
    metadata = _json.encode(record.metadata).decode() if record.metadata else "{}"
    sparse = [text or None for text in _sparse(record)]
    flags = map(int, _flags(record))  # for a bool SQLite's driver searches an adapter, which takes longer
    return (bytes.fromhex(record.id), *_plain(record), *flags, *sparse, *_usage(record.usage), metadata)


def row_to_record(row: Sequence[Any]) -> LogRecord:
    found = dict(zip(COLUMNS, row, strict=True))
    usage = Usage(**{name: found.pop(column) for name, column in _USAGE.items()})
    for name in _FLAGS:
        found[name] = bool(found[name])
    for name in _SPARSE:
        found[name] = found[name] or ""
    found["id"] = found["id"].hex()
    found["metadata"] = msgspec.json.decode(found["metadata"])
    return LogRecord(**found, usage=usage)


def metadata_label_rows(record: LogRecord) -> list[tuple[str, str, bytes]]:
    """Return the record's metadata as rows of the table `labels`."""
    id = bytes.fromhex(record.id)
    return [(key, _label_text(value), id) for key, value in record.metadata.items()]


def _label_text(value: object) -> str:
    return value if isinstance(value, str) else _json.encode(value).decode()


def pending_migrations(applied_count: int, migrations: Sequence[tuple[str, ...]]) -> Sequence[tuple[str, ...]]:
    """Return the migrations that a store still needs after its first `applied_count` migrations.

    Raise StoreFailed if the store has had more migrations than this version of Emberline knows.
    """
    if applied_count > len(migrations):
        raise StoreFailed(
            f"the store has schema version {applied_count}; this version of Emberline supports up to {len(migrations)}",
            hint="a newer version has used this store: run that version",
        )
    return migrations[applied_count:]


def render_migration(statement: str, type_names: Mapping[str, str]) -> str:
    """Return a migration's SQL statement with the type names of one database."""
    return statement.format_map(type_names)
