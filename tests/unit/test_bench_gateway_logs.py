"""`emberline bench gateway-logs`: it completes all queries, and a copied day equals its original."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import msgspec
from gateway_records import DAY, NOON, make_record

from emberline.bench.gateway_logs import LogBenchPlan, bench
from emberline.bench.log_days import copy_day, shift_record_id
from emberline.gateway.core.log_record import LogPayload, utc_day
from emberline.gateway.store.factory import open_store
from emberline.gateway.store.filters import LogFilters
from emberline.gateway.store.rollup import RollupQuery


def test_log_bench_reports_all_figures() -> None:
    results = bench(LogBenchPlan(rows=1200, days=3, payload_every=20, rounds=1), None).results
    assert {"append", "filled", "overview_30d_by_user", "rescued", "one_record", "drop_a_day", "disk"} <= set(results)
    assert results["slowest_of_all"].value == max(r.value for r in results.values() if r.unit == "ms")


def test_copied_day_equals_the_first(tmp_path: Path) -> None:
    records = [make_record(NOON + i, metadata={"n": i % 2}, user=f"u{i % 3}", micros=i) for i in range(20)]

    async def go() -> None:
        store = await open_store(f"sqlite:{tmp_path}")
        await store.append_records([(each, LogPayload(each.id.encode(), b"said")) for each in records])
        await store.close()
        copy_day(tmp_path, utc_day(NOON), utc_day(NOON) + timedelta(days=1))
        store = await open_store(f"sqlite:{tmp_path}")
        later = [msgspec.structs.replace(each, id=shift_record_id(each.id, DAY)) for each in records]
        page = await store.read_page(
            LogFilters("acme", since=NOON + DAY // 2, metadata={"n": "1"}), limit=100, timeout_s=60
        )
        assert page.records == [each for each in reversed(later) if each.metadata["n"] == 1]
        assert await store.get_payload("acme", "main", later[3].id) == LogPayload(records[3].id.encode(), b"said")
        for dimension in ("all", "user"):
            days = [
                await store.read_rollups(RollupQuery("acme", "day", at, at + 1, dimension=dimension))
                for at in (NOON, NOON + DAY)
            ]
            first, second = ([(cell.value, cell.counts) for cell in day] for day in days)
            assert first == second != []
        await store.close()

    asyncio.run(go())
