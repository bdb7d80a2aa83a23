"""A collector that does not answer costs nothing but spans."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from emberline.core.errors import InvalidRequest
from emberline.gateway import collector as place
from emberline.gateway.collector import Collector
from emberline.gateway.record import Record, new_id
from emberline.gateway.span import Span
from emberline.gateway.upstream import Upstream


def span(size: int = 0) -> Span:
    record = Record(id=new_id(1), account="a", gateway="g", provider="p", model="m", status=200, success=True)
    return Span(record=record, trace="", parent="", prompt=b"x" * size)


class Silent:
    async def send(self, out: object, seconds: float) -> None:
        await asyncio.sleep(3600)


def made() -> Collector:
    return Collector(cast("Upstream", Silent()), "http://127.0.0.1:1", {}, "0")


def test_what_waits_is_bounded() -> None:
    async def work() -> None:
        collector = made()
        for _ in range(place.MOST_SPANS + 5):
            collector.put(span())
        assert collector.dropped == 5
        large = made()
        large.put(span(place.MOST_BYTES))
        large.put(span(1))
        assert large.dropped == 1

    asyncio.run(work())


def test_leaving_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "GOODBYE", 0.05)

    async def work() -> None:
        async with asyncio.timeout(20), made() as collector:
            collector.put(span())
        assert collector.sent == 0

    asyncio.run(work())


def test_an_address_that_is_none() -> None:
    for url in ("collector:4318", "ftp://collector", "http://"):
        with pytest.raises(InvalidRequest, match="otlp"):
            Collector(cast("Upstream", Silent()), url, {}, "0")
