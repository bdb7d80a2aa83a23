"""`emberline bench gateway-logs`: a log of many rows. Fills a store with made-up records, then asks what the dashboard
asks: charts from rollups, pages of the explorer with each kind of filter, one record; at last a day is dropped."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from emberline.bench.report import Report
from emberline.gateway.record import Payload, Record, day_of
from emberline.gateway.store.base import Page, Store
from emberline.gateway.store.filters import Filters, Span
from emberline.gateway.store.opening import open_store
from emberline.gateway.store.rollup import MS, RollupQuery
from emberline.gateway.usage import Usage

BATCH = 1000  # as the writer of the log makes them
ACCOUNT, GATEWAY = "default", "default"
RARE = "rare-model"  # of one row in a hundred thousand
PROVIDERS = ("openai", "anthropic", "google-ai-studio", "groq", "mistral", "emberline")


@dataclass(frozen=True, slots=True)
class Plan:
    rows: int
    days: int
    payload_every: int  # rows: one of so many has a payload
    rounds: int


def bench(plan: Plan, url: str | None) -> Report:
    """`url`: an empty store; None: SQLite, in a directory that is removed again."""
    report = Report("gateway-logs", {**{n: getattr(plan, n) for n in plan.__slots__}, "store": url or "sqlite"})
    if url is not None:
        asyncio.run(_bench(plan, url, report))
    else:
        with tempfile.TemporaryDirectory(prefix="emberline-logs-") as directory:
            asyncio.run(_bench(plan, f"sqlite:{directory}/store", report))
            report.add("disk", sum(p.stat().st_size for p in Path(directory).rglob("*.db")) / 1e6, "MB")
    return report


async def _bench(plan: Plan, url: str, report: Report) -> None:
    now = int(time.time()) * 1000
    now -= now % MS["day"]  # the days are whole
    store = await open_store(url)
    records = _records(plan, now)
    began, busy = time.perf_counter(), time.process_time()
    middle = await _fill(store, records, plan)
    report.add("append", plan.rows / (time.perf_counter() - began), "rows/s")
    report.add("append_cpu", 1e6 * (time.process_time() - busy) / plan.rows, "us")
    await store.close()
    store = await open_store(url)
    for name, ask in _pages(store, now, middle).items():
        times, pages = [], 1
        for _ in range(plan.rounds):
            began = time.perf_counter()
            found = await ask()
            times.append(1e3 * (time.perf_counter() - began))
            pages = await _pages_to_the_end(ask, found) if isinstance(found, Page) else 1
        report.add(name, times, "ms")
        report.add(f"{name}_worst", max(times), "ms")
        if pages > 1:
            report.add(f"{name}_asked", pages, "pages")
    began = time.perf_counter()
    gone = await store.drop_before(day_of(now) - timedelta(days=plan.days - 1))
    report.add("drop_a_day", time.perf_counter() - began, "s")
    assert len(gone) == 1, gone
    await store.close()


async def _pages_to_the_end(ask: Callable[..., Awaitable[Any]], page: Page) -> int:
    """How often one must ask on until something, or the end, was found: patience ended the page before."""
    asked = 1
    while not page.complete and not page.records:
        page = await ask(page.cursor)
        asked += 1
    return asked


async def _fill(store: Store, records: Iterator[tuple[Record, Payload | None]], plan: Plan) -> Record:
    """A record from the middle."""
    middle = None
    batch: list[tuple[Record, Payload | None]] = []
    for i, entry in enumerate(records):
        batch.append(entry)
        if len(batch) == BATCH:
            await store.append(batch)
            batch = []
        if entry[1] is not None and i >= plan.rows // 2 and middle is None:
            middle = entry[0]
    await store.append(batch)
    assert middle is not None, "give --rows more than --payload-every"
    return middle


def _records(plan: Plan, end: int) -> Iterator[tuple[Record, Payload | None]]:
    dice = random.Random(1)
    start = end - plan.days * MS["day"]
    models = [(dice.choice(PROVIDERS), f"model-{i}") for i in range(30)]
    payload = Payload(b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"some words " * 80), b"an answer " * 100)
    for i in range(plan.rows):
        at = start + i * (end - start) // plan.rows
        roll = dice.random()
        provider, model = models[min(int(dice.expovariate(0.2)), 29)]
        failed, priced = roll < 0.03, roll < 0.95
        record = Record(
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


def _pages(store: Store, now: int, middle: Record) -> dict[str, Callable[..., Awaitable[Any]]]:
    def rollups(unit: Any, days: int, **more: Any) -> Callable[..., Awaitable[Any]]:
        return lambda: store.rollups(RollupQuery(ACCOUNT, unit, now - days * MS["day"], now, GATEWAY, **more))

    def page(**filters: Any) -> Callable[..., Awaitable[Any]]:
        return lambda before="": store.page(Filters(ACCOUNT, GATEWAY, **filters), before=before, limit=50)

    return {
        "chart_day_by_minute": rollups("minute", 1),
        "chart_week_by_hour": rollups("hour", 7),
        "chart_month_by_model": rollups("day", 30, dimension="model"),
        "spend_by_key": rollups("day", 30, dimension="key", over_time=False),
        "spend_by_user": rollups("day", 30, dimension="user", over_time=False, limit=50),
        "errors_by_hour": rollups("hour", 7, dimension="error"),
        "newest": page(),
        "from_the_middle": page(until=middle.created),
        "failed": page(success=False),
        "failed_with_status": page(status=(503,)),
        "of_a_key": page(key_id=(middle.key_id,)),
        "of_a_user": page(user=(middle.user,)),
        "of_a_model": page(model=(middle.model,)),
        "of_a_rare_model": page(model=(RARE,)),
        "of_a_model_that_is_not": page(model=("nothing",)),
        "of_an_event": page(event_id=(f"event-{int(middle.id[12:], 16) // 10 * 10}",)),
        "of_a_session": page(session_id=(middle.session_id,)),
        "with_metadata": page(metadata={"team": "team-3", "release": "5"}),
        "cached_and_slow": page(cached=True, duration_ms=Span(least=20_000)),
        "dearest": page(micros=Span(least=18_999)),
        "slower_than_anything": page(duration_ms=Span(least=10**9)),
        "one_record": lambda: store.record(ACCOUNT, GATEWAY, middle.id),
        "one_payload": lambda: store.payload(ACCOUNT, GATEWAY, middle.id),
    }
