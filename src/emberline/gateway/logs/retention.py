"""Retention: how long the log is kept. Days that no gateway keeps are dropped whole; of a gateway that keeps fewer days
than the longest its own records are erased from the days between."""

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

EVERY = 3600.0  # seconds
PAGE = 500
PATIENCE = 1.0  # seconds of one step, between which others write

Days = dict[tuple[str, str], int]  # account and gateway


class Retention:
    def __init__(self, store: Store, fixed: Mapping[tuple[str, str], Settings], wall: Clock) -> None:
        """`fixed`: gateways of the configuration file."""
        self._store = store
        self._fixed = fixed
        self._wall = wall

    async def run(self) -> None:
        """Until cancelled. A store that fails is asked again next time."""
        while True:
            try:
                gone, erased = await self.once()
                if gone or erased:
                    log.info("of the log, %d days were dropped and %d records erased", len(gone), erased)
            except Exception as e:  # of a store, a file or what is stored: it is tried again
                log.warning("old records of the log were not dropped: %s: %s", type(e).__name__, e)
            await asyncio.sleep(EVERY)

    async def once(self) -> tuple[list[date], int]:
        """Days dropped, records erased."""
        kept = await self._kept()
        today = day_of(round(self._wall.now() * 1e3))
        longest = max(kept.values())
        gone = await self._store.drop_before(_first(today, longest))
        erased = 0
        for (account, gateway), days in kept.items():
            if days < longest:
                erased += await self._erase(Filters(account, gateway, until=day_start(_first(today, days))))
        return gone, erased

    async def _kept(self) -> Days:
        kept = {place: settings.logs.days for place, settings in self._fixed.items()}
        after = ("", "")
        while page := await self._store.documents("gateway", "", after=after):
            for each in page:
                kept.setdefault((each.account, each.id), msgspec.json.decode(each.body, type=Settings).logs.days)
            after = (page[-1].id, page[-1].account)
        return kept or {("", ""): Settings().logs.days}

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


def _first(today: date, days: int) -> date:
    """The oldest day that is kept: today counts as one."""
    return today - timedelta(days=days - 1)
