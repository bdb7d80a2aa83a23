"""`emberline bench gateway-logs`: how fast the gateway's log pages are when the log has many rows.

The benchmark fills a store with generated rows. Then it sends the requests of the web dashboard to the management API:
charts and tables from aggregated counts, log pages with each kind of filter, and a single row. At the end it deletes
the rows of one day. In SQLite, only the first day is generated and the other days are copies of it.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from emberline.bench.log_days import copy_day, shift_record_id
from emberline.bench.report import BenchReport
from emberline.core.clock import ManualClock
from emberline.gateway.admin.admin import AdminAPI
from emberline.gateway.admin.admin_context import AdminContext
from emberline.gateway.core.identity import Identity
from emberline.gateway.core.log_record import LogPayload, LogRecord, utc_day
from emberline.gateway.keys.master_keys import MasterKeyFile
from emberline.gateway.keys.provider_key_vault import ProviderKeyVault
from emberline.gateway.limits.local import LocalLimiter
from emberline.gateway.logs.log_writer import MAX_BATCH_RECORDS
from emberline.gateway.store.base import GatewayStore
from emberline.gateway.store.factory import open_store
from emberline.gateway.store.rollup import UNIT_MS
from emberline.gateway.store.version_watch import StoreVersionWatch
from emberline.wire.usage import Usage

FILL = 10_000  # rows per write while filling, which is not timed
ACCOUNT, GATEWAY = "default", "default"
RARE = "rare-model"  # model of one row in a hundred thousand
PROVIDERS = ("openai", "anthropic", "google-ai-studio", "groq", "mistral", "emberline")

LogEntry = tuple[LogRecord, LogPayload | None]
AdminQuery = Callable[[str], Awaitable[Any]]  # takes the end of a path with its query


@dataclass(frozen=True, slots=True)
class LogBenchPlan:
    rows: int
    days: int
    payload_every: int  # one of this many rows has a payload
    rounds: int

    @property
    def timed_rows(self) -> int:
        """The number of rows whose appending is timed after the store has been filled.

        They are appended in batches of the same size as those of the gateway's log writer.
        """
        return min(50 * MAX_BATCH_RECORDS, self.rows // self.days // 4)


def bench(plan: LogBenchPlan, store_url: str | None) -> BenchReport:
    """Run the benchmark. `store_url` is the URL of an empty store; None uses SQLite in a temporary directory."""
    report = BenchReport(
        "gateway-logs", {**{n: getattr(plan, n) for n in plan.__slots__}, "store": store_url or "sqlite"}
    )
    with tempfile.TemporaryDirectory(prefix="emberline-logs-") as directory:
        asyncio.run(_run_bench(plan, store_url or f"sqlite:{directory}/store", Path(directory), report))
        if store_url is None:
            report.add("disk", sum(p.stat().st_size for p in Path(directory).rglob("*.db")) / 1e6, "MB")
    return report


async def _run_bench(plan: LogBenchPlan, store_url: str, work_dir: Path, report: BenchReport) -> None:
    now = int(time.time()) * 1000
    now -= now % UNIT_MS["day"]  # whole days
    began = time.perf_counter()
    middle = await _fill_store(store_url, plan, now, report)
    report.add("filled", plan.rows / (time.perf_counter() - began), "rows/s")
    store = await open_store(store_url)
    query_admin = _make_admin_query(store, now, work_dir)
    slowest = 0.0
    for name, wanted in _page_queries(now, middle).items():
        times: list[float] = []
        for _ in range(plan.rounds):
            began = time.perf_counter()
            found = await asyncio.gather(*map(query_admin, wanted))
            times.append(1e3 * (time.perf_counter() - began))
        report.add(name, times, "ms")
        slowest = max(slowest, *times)
        if (asked := await _count_pages_until_found(query_admin, wanted[0], found[0])) > 1:
            report.add(f"{name}_asked", asked, "pages")
    report.add("slowest_of_all", slowest, "ms")
    began = time.perf_counter()
    gone = await store.delete_days_before(utc_day(now) - timedelta(days=plan.days - 1))
    report.add("drop_a_day", time.perf_counter() - began, "s")
    assert len(gone) == 1, gone
    await store.close()


def _make_admin_query(store: GatewayStore, now_ms: int, work_dir: Path) -> AdminQuery:
    """Return a function that calls the management API as the web dashboard does, but without HTTP."""
    wall = ManualClock(now_ms / 1e3)
    vault = ProviderKeyVault(store, StoreVersionWatch(store, wall), MasterKeyFile(work_dir / "master.key"))
    admin = AdminAPI(AdminContext(store, vault, wall, LocalLimiter()))
    root = Identity("root", "root", "token", is_admin=True)

    async def query_admin(path_and_query: str) -> Any:
        path, _, query = path_and_query.partition("?")
        status, found = await admin.handle("GET", f"/admin/accounts/{ACCOUNT}/{path}", query, b"", root)
        assert status == 200, found
        msgspec.json.encode(found)
        return found

    return query_admin


async def _count_pages_until_found(query_admin: AdminQuery, path: str, first_page: Any) -> int:
    """Return how many pages were requested until one contained a row or the log ended.

    Pages may be empty, because the server stops searching for matching rows after a time limit and returns what it has
    found so far.
    """
    count = 1
    while not first_page.get("complete", True) and not first_page["items"]:
        first_page = await query_admin(f"{path}&before={first_page['cursor']}")
        count += 1
    return count


async def _fill_store(store_url: str, plan: LogBenchPlan, now_ms: int, report: BenchReport) -> LogRecord:
    """Fill the store and return a record that has a payload and lies in the middle of the time range."""
    copies = plan.days - 1 if store_url.startswith("sqlite:") else 0
    rows = -(-plan.rows // (1 + copies))
    records = _generate_records(plan, now_ms)
    store = await open_store(store_url)
    middle = await _append_records(store, records, rows // 2)
    await _append_records(store, records, rows - rows // 2 - plan.timed_rows)
    last = list(islice(records, plan.timed_rows))
    began, busy = time.perf_counter(), time.process_time()
    for start in range(0, plan.timed_rows, MAX_BATCH_RECORDS):
        await store.append_records(last[start : start + MAX_BATCH_RECORDS])
    report.add("append", plan.timed_rows / (time.perf_counter() - began), "rows/s")
    report.add("append_cpu", 1e6 * (time.process_time() - busy) / plan.timed_rows, "us")
    await store.close()
    first = utc_day(now_ms) - timedelta(days=plan.days)
    for number in range(1, 1 + copies):
        copy_day(Path(store_url.removeprefix("sqlite:")), first, first + timedelta(days=number))
    assert middle is not None, "give --rows more than --payload-every"
    return msgspec.structs.replace(middle, id=shift_record_id(middle.id, copies // 2 * UNIT_MS["day"]))


async def _append_records(store: GatewayStore, records: Iterator[LogEntry], row_count: int) -> LogRecord | None:
    """Append the next `row_count` records and return the last of them that has a payload."""
    last = None
    for start in range(0, row_count, FILL):
        batch = list(islice(records, min(FILL, row_count - start)))
        await store.append_records(batch)
        last = next((record for record, payload in reversed(batch) if payload is not None), last)
    return last


def _generate_records(plan: LogBenchPlan, end_ms: int) -> Iterator[tuple[LogRecord, LogPayload | None]]:
    dice = random.Random(1)
    start = end_ms - plan.days * UNIT_MS["day"]
    models = [(dice.choice(PROVIDERS), f"model-{i}") for i in range(30)]
    payload = LogPayload(
        b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"some words " * 80), b"an answer " * 100
    )
    for i in range(plan.rows):
        at = start + i * (end_ms - start) // plan.rows
        roll = dice.random()
        provider, model = models[min(int(dice.expovariate(0.2)), 29)]
        failed, priced = roll < 0.03, roll < 0.95
        record = LogRecord(
            id=f"{at:012x}{i:020x}",
            account=ACCOUNT,
            gateway=GATEWAY,
            provider=provider,
            model=RARE if i % 100_000 == 99_999 else model,
            path="chat/completions",
            dialect="openai-chat",
            request_type="chat",
            status=(429, 500, 503)[i % 3] if failed else 200,
            success=not failed,
            ended="error" if failed else "complete",
            cached=roll > 0.9,
            stream=i % 2 == 0,
            step=int(i % 50 == 7),
            usage=Usage(input=int(roll * 4000), output=int(dice.expovariate(0.004))),
            micros=int(roll * 20_000) if priced else None,
            duration_ms=int(dice.lognormvariate(7.0, 1.0)),
            first_byte_ms=int(roll * 900) if i % 2 == 0 else None,
            error="upstream_failed" if failed else "",
            key_id=f"key-{int(roll * 1e6) % 200}",
            user=f"user-{int(roll * 1e8) % 5000}",
            metadata={"team": f"team-{i % 40}", "release": i % 7} if i % 2 else {},
            event_id=f"event-{i}" if i % 10 == 0 else "",
            session_id=f"session-{i // 20}",
            request_content_type="application/json",
            response_content_type="application/json",
        )
        yield record, payload if i % plan.payload_every == 0 else None


def _page_queries(now_ms: int, sample_record: LogRecord) -> dict[str, tuple[str, ...]]:
    explorer = {name: (f"{query}&limit=50",) for name, query in _explorer_queries(sample_record).items()}
    return _overview_queries(now_ms) | explorer | {
        "one_record": (f"logs/{sample_record.id}",),
        "what_it_said": (f"logs/{sample_record.id}/request", f"logs/{sample_record.id}/response"),
        "budgets": ("budgets?limit=500", "spent"),
    }  # fmt: skip


def _overview_queries(now_ms: int) -> dict[str, tuple[str, ...]]:
    """Return the requests of the dashboard's overview page (web/gateway/overview.js), by name.

    The range of 30 days is requested once for each dimension, the shorter ranges only by model.
    """
    ranges: dict[str, tuple[int, Any]] = {
        "1h": (60, "minute"), "6h": (360, "minute"), "24h": (24, "hour"), "7d": (168, "hour"), "30d": (30, "day")
    }  # fmt: skip
    found: dict[str, tuple[str, ...]] = {}
    for name, (cells, unit) in ranges.items():
        times = f"rollups?unit={unit}&since={now_ms - cells * UNIT_MS[unit]}&until={now_ms}"
        dimensions = ("model", "provider", "status", "error", "key", "user") if name == "30d" else ("model",)
        for dimension in dimensions:
            apart = f"{times}&dimension={dimension}&over_time=false&limit=50"
            found[f"overview_{name}_by_{dimension}"] = (f"{times}&over_time=true", f"{times}&over_time=false", apart)
    return found


def _explorer_queries(sample_record: LogRecord) -> dict[str, str]:
    """Return requests for log pages by name: one for each kind of filter, for one gateway and for all gateways."""
    one = f"logs?gateway={GATEWAY}"
    return {
        "newest": "logs?",
        "newest_of_a_gateway": one,
        "from_the_middle": f"{one}&until={sample_record.created_ms}",
        "failed": f"{one}&success=false",
        "failed_with_status": f"{one}&status=503",
        "rescued": f"{one}&rescued=true",
        "of_a_key": f"{one}&key_id={sample_record.key_id}",
        "of_a_user": f"{one}&user={sample_record.user}",
        "of_a_model": f"{one}&model={sample_record.model}",
        "of_a_provider": f"logs?provider={sample_record.provider}",
        "of_a_rare_model": f"{one}&model={RARE}",
        "of_a_model_that_is_not": f"{one}&model=nothing",
        "of_a_provider_that_is_not": f"{one}&provider=nothing",
        "of_an_event": f"{one}&event_id=event-{int(sample_record.id[12:], 16) // 10 * 10}",
        "of_a_session": f"{one}&session_id={sample_record.session_id}",
        "with_metadata": f"{one}&metadata.team=team-3&metadata.release=5",
        "with_feedback": f"{one}&feedback=1",
        "cached_and_slow": f"{one}&cached=true&min_duration=20000",
        "dearest": f"{one}&min_cost=0.018999",
        "slower_than_anything": f"{one}&min_duration=1000000000",
    }
