"""A stopping gateway writes its log, to SQLite and to a real PostgreSQL, and closes the store."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from emberline.core.freeport import free_port

SRC = Path(__file__).parents[2] / "src"


LIMIT = '[gateways.default]\nlimits = [{ name = "daily", limit = 3, per = "day" }]\n'


@pytest.mark.parametrize(
    ("store_url", "how"),
    [("sqlite", signal.SIGTERM), ("sqlite", signal.SIGINT), ("postgres", signal.SIGTERM)],
    indirect=["store_url"],
)
def test_last_request_is_logged_at_shutdown(tmp_path: Path, store_url: str, how: signal.Signals) -> None:
    with _gateway(tmp_path, store_url) as (process, url):
        status, id = _call(url)
        process.send_signal(how)
        process.wait(15)
    assert not list((tmp_path / "store").glob("*-wal"))  # checkpointed: the database files alone are a complete copy
    assert _rows(store_url) == [(id.upper(), status, 0)]


def test_daily_limit_survives_restart(tmp_path: Path, store_url: str) -> None:
    with _gateway(tmp_path, store_url, LIMIT) as (process, url):
        assert [_call(url)[0] for _ in range(2)] == [502, 502]
        deadline = time.monotonic() + 30
        while len(_rows(store_url)) < 2:  # also while the process runs
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        process.wait(15)
    with _gateway(tmp_path, store_url, LIMIT) as (process, url):
        assert [_call(url)[0] for _ in range(2)] == [502, 429]


def test_daily_limit_survives_kill(tmp_path: Path, store_url: str) -> None:
    """The store is written to once a minute, so the journal must have the counts."""
    limit = "flush = 60.0\n" + LIMIT
    with _gateway(tmp_path, store_url, limit) as (process, url):
        assert [_call(url)[0] for _ in range(2)] == [502, 502]
        process.kill()
        process.wait(15)
    with _gateway(tmp_path, store_url, limit) as (process, url):
        assert [_call(url)[0] for _ in range(2)] == [502, 429]


@contextmanager
def _gateway(home: Path, store: str, more: str = "") -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    config = home / "gateway.toml"
    config.write_text(f'store = "{store}"\nmaster_key = "{home}/master.key"\n{more}')
    port, nobody = free_port(), free_port()
    command = [sys.executable, "-m", "emberline.cli", "gateway", "--config", str(config), "--port", str(port)]
    with (home / "log").open("wb") as out:
        process = subprocess.Popen(
            [*command, "--engine", f"http://127.0.0.1:{nobody}"],
            stdout=out,
            stderr=out,
            env={**os.environ, "PYTHONPATH": str(SRC), "EMBERLINE_CACHE": str(home / "cache")},
        )
    try:
        _ready(f"http://127.0.0.1:{port}/health", process, home / "log")
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _call(url: str) -> tuple[int, str]:
    """Return status and log id of a request, which fails because there is no engine."""
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    sent_request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(sent_request, timeout=10)
    return refused.value.code, refused.value.headers["cf-aig-log-id"]


def _rows(store: str) -> list[tuple[str, int, int]]:
    """Return id in upper-case hexadecimal, status and success of each log row."""
    if store.startswith("postgresql:"):
        return asyncio.run(_postgres_rows(store))
    files = list(Path(store.removeprefix("sqlite:")).glob("logs-*.db"))
    if not files:
        return []
    with closing(sqlite3.connect(files[0])) as db:
        return db.execute("SELECT hex(id), status, success FROM logs").fetchall()


async def _postgres_rows(url: str) -> list[tuple[str, int, int]]:
    import asyncpg

    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch("SELECT upper(encode(id, 'hex')), status, success::int FROM logs")
    finally:
        await connection.close()
    return [tuple(row) for row in rows]


def _ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    raise AssertionError(f"not ready:\n{log.read_text()}")
