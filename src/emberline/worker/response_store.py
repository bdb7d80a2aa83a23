"""ResponseStore: the responses of the Responses API in an SQLite file, for later requests that refer to them.

A response belongs to the tenant (API key) that requested it. When the file's content exceeds the size limit, the oldest
responses of the API key with the most bytes are deleted, in it those of the tenant with the most. So a key never loses
responses because of other keys as long as its own fit into an equal share of the limit. Several workers on one machine
may share a file.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from emberline.core.errors import EmberlineError, InvalidRequest

BUSY_TIMEOUT_S = 5.0
DEFAULT_MAX_BYTES = 256 << 20

SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT NOT NULL, tenant TEXT NOT NULL, created REAL NOT NULL, size INTEGER NOT NULL,
    body BLOB NOT NULL, input BLOB NOT NULL, PRIMARY KEY (tenant, id)
);
CREATE INDEX IF NOT EXISTS responses_by_tenant ON responses (tenant, created, size);
DROP INDEX IF EXISTS responses_by_age;
"""
_KEY = "substr(tenant, 1, instr(tenant || '.', '.') - 1)"  # as key_of_tenant
# Of the key with the most bytes, the tenant with the most bytes.
_DELETE_OLDEST_OF_LARGEST_TENANT = f"""
DELETE FROM responses WHERE rowid = (
    SELECT rowid FROM responses WHERE tenant = (
        SELECT tenant FROM responses WHERE {_KEY} = (
            SELECT {_KEY} AS key FROM responses GROUP BY key ORDER BY sum(size) DESC, key LIMIT 1
        ) GROUP BY tenant ORDER BY sum(size) DESC, tenant LIMIT 1
    ) ORDER BY created, rowid LIMIT 1
) RETURNING size
"""


class ResponseStoreUnavailable(EmberlineError):
    status = 503
    code = "response_store_unavailable"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    body: dict[str, Any]
    input: list[dict[str, Any]]  # items of the whole conversation before the reply

    @property
    def items(self) -> list[dict[str, Any]]:
        """The conversation up to and including this response, as a list of items for the next request."""
        return [*self.input, *self.body["output"]]


class ResponseStore:
    """A store in a file. Its methods wait for the disk, so call them in a thread."""

    def __init__(self, path: Path | None, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """Open the file `path`; None stands for a temporary file. Raises InvalidRequest if it cannot be opened."""
        if max_bytes < 1:
            what = f"response_store_size is {max_bytes}; it must be above 0"
            raise InvalidRequest(what, param="response_store_size", hint="set --response-store-size in bytes")
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
                path.chmod(0o600)  # an existing file may be readable by others; SQLite's side files get the same mode
            self._db = sqlite3.connect(path or "", BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            hint = "set --response-store to another file, or to none"
            raise InvalidRequest(
                f"cannot open the response store {path}: {error}", param="response_store", hint=hint
            ) from error

    def put(self, tenant: str, body: dict[str, Any], input_items: list[dict[str, Any]] | msgspec.Raw) -> None:
        encoded = (msgspec.json.encode(body), msgspec.json.encode(input_items))
        size = sum(map(len, encoded))
        self._execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)",
                  (body["id"], tenant, time.time(), size, *encoded))  # fmt: skip
        ((total,),) = self._execute("SELECT coalesce(sum(size), 0) FROM responses")
        while total > self._max_bytes:
            deleted = self._execute(_DELETE_OLDEST_OF_LARGEST_TENANT)
            if not deleted:
                break  # another worker deleted the responses
            total -= deleted[0][0]

    def get(self, tenant: str, id_: str) -> StoredResponse | None:
        for body, input_ in self._execute(
            "SELECT body, input FROM responses WHERE tenant = ? AND id = ?", (tenant, id_)
        ):
            return StoredResponse(msgspec.json.decode(body), msgspec.json.decode(input_))
        return None

    def delete(self, tenant: str, id_: str) -> bool:
        return bool(self._execute("DELETE FROM responses WHERE tenant = ? AND id = ? RETURNING id", (tenant, id_)))

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _execute(self, statement: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._db.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            hint = "send store: false to generate without storing"
            raise ResponseStoreUnavailable(f"the response store failed: {error}", hint=hint) from error
