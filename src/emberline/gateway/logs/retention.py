"""LogRetention: deletes log records that are older than their gateway's retention time.

If no gateway retains a day any longer, all records of the day are dropped at once. If a gateway retains fewer days than
other gateways, its records are erased one by one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from datetime import date, timedelta

import msgspec

from emberline.core.clock import Clock
from emberline.gateway.core.log_record import utc_day
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.store.base import GatewayStore
from emberline.gateway.store.filters import LogFilters
from emberline.gateway.store.record_scan import day_start_ms

log = logging.getLogger("emberline.gateway.log")

RUN_INTERVAL_S = 3600.0
ERASE_PAGE_RECORDS = 500
ERASE_PAGE_TIMEOUT_S = 1.0  # other writers of the store can write between two pages

RetentionDays = dict[tuple[str, str], int]  # account and gateway


class LogRetention:
    def __init__(
        self, store: GatewayStore, configured: Mapping[tuple[str, str], GatewaySettings], wall_clock: Clock
    ) -> None:
        """Create the retention task. `configured`: gateways of the configuration file."""
        self._store = store
        self._configured = configured
        self._wall_clock = wall_clock

    async def run(self) -> None:
        """Delete old records every hour until cancelled. A failure is retried the next time."""
        while True:
            try:
                dropped, erased = await self.run_once()
                if dropped or erased:
                    log.info("Old log records deleted: days=%d records=%d", len(dropped), erased)
            except Exception as e:  # of the store, a file or a document: retried the next time
                log.warning("Deleting old log records failed, retrying later: error=%s: %s", type(e).__name__, e)
            await asyncio.sleep(RUN_INTERVAL_S)

    async def run_once(self) -> tuple[list[date], int]:
        """Delete old records once. Return the dropped days and the number of erased records."""
        kept_days = await self._read_retention_days()
        today = utc_day(round(self._wall_clock.now() * 1e3))
        longest = max(kept_days.values())
        dropped = await self._store.delete_days_before(_oldest_kept_day(today, longest))
        erased = 0
        for (account, gateway), days in kept_days.items():
            if days < longest:
                erased += await self._erase_records(
                    LogFilters(account, gateway, until=day_start_ms(_oldest_kept_day(today, days)))
                )
        return dropped, erased

    async def _read_retention_days(self) -> RetentionDays:
        kept_days = {name: settings.logs.days for name, settings in self._configured.items()}
        after = ("", "")
        while page := await self._store.list_documents("gateway", "", after=after):
            for each in page:
                kept_days.setdefault(
                    (each.account, each.id), msgspec.json.decode(each.body, type=GatewaySettings).logs.days
                )
            after = (page[-1].id, page[-1].account)
        return kept_days or {("", ""): GatewaySettings().logs.days}

    async def _erase_records(self, filters: LogFilters) -> int:
        count, before = 0, ""
        while True:
            page = await self._store.read_page(
                filters, before=before, limit=ERASE_PAGE_RECORDS, timeout_s=ERASE_PAGE_TIMEOUT_S
            )
            if page.records:
                await self._store.erase_records(page.records)
                count += len(page.records)
            if not page.has_more:
                return count
            before = page.cursor


def _oldest_kept_day(today: date, days: int) -> date:
    """Return the oldest day to keep if `days` days, including today, are kept."""
    return today - timedelta(days=days - 1)
