"""Retention: deletes log records that are older than their gateway keeps them.

Days that no gateway keeps any more are dropped whole. Records of a gateway that keeps fewer days than others are erased
one by one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from datetime import date, timedelta

import msgspec

from emberline.core.clock import Clock
from emberline.gateway.logs.record import day_of
from emberline.gateway.settings import Settings
from emberline.gateway.store.base import Store
from emberline.gateway.store.filters import Filters
from emberline.gateway.store.scan import day_start

log = logging.getLogger("emberline.gateway.log")

EVERY = 3600.0
PAGE = 500
PATIENCE = 1.0  # other writers of the store can write between two pages

Days = dict[tuple[str, str], int]  # account and gateway


class Retention:
    def __init__(self, store: Store, fixed: Mapping[tuple[str, str], Settings], wall: Clock) -> None:
        """`configured`: gateways of the configuration file."""
        self._store = store
        self._configured = fixed
        self._wall_clock = wall

    async def run(self) -> None:
        """Delete old records every hour until cancelled. A failure is retried the next time."""
        while True:
            try:
                dropped, erased = await self.once()
                if dropped or erased:
                    log.info("Old log records deleted: days=%d records=%d", len(dropped), erased)
            except Exception as e:  # of the store, a file or a document: retried the next time
                log.warning("Deleting old log records failed, retrying later: error=%s: %s", type(e).__name__, e)
            await asyncio.sleep(EVERY)

    async def once(self) -> tuple[list[date], int]:
        """Delete old records once. Return the dropped days and the number of erased records."""
        kept_days = await self._read_kept_days()
        today = day_of(round(self._wall_clock.now() * 1e3))
        longest = max(kept_days.values())
        dropped = await self._store.drop_before(_oldest_kept_day(today, longest))
        erased = 0
        for (account, gateway), days in kept_days.items():
            if days < longest:
                erased += await self._erase(Filters(account, gateway, until=day_start(_oldest_kept_day(today, days))))
        return dropped, erased

    async def _read_kept_days(self) -> Days:
        kept_days = {name: settings.logs.days for name, settings in self._configured.items()}
        after = ("", "")
        while page := await self._store.documents("gateway", "", after=after):
            for each in page:
                kept_days.setdefault((each.account, each.id), msgspec.json.decode(each.body, type=Settings).logs.days)
            after = (page[-1].id, page[-1].account)
        return kept_days or {("", ""): Settings().logs.days}

    async def _erase(self, filters: Filters) -> int:
        count, before = 0, ""
        while True:
            page = await self._store.page(filters, before=before, limit=PAGE, patience=PATIENCE)
            if page.records:
                await self._store.erase(page.records)
                count += len(page.records)
            if not page.has_more:
                return count
            before = page.cursor


def _oldest_kept_day(today: date, days: int) -> date:
    """Return the oldest of `days` days that end today."""
    return today - timedelta(days=days - 1)
