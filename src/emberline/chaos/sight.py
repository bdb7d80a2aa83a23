"""Sight: how far one request has come, as wires see it pass. Sights: all of them, by the mark that each carries."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from enum import IntEnum

from emberline.chaos.wire import Ear, Line

MARK = re.compile(rb"chaos-(\d+)-")
SAID = b": said "


class Stage(IntEnum):
    QUEUED = 0  # sent to the router
    PREFILL = 1  # its prompt is at a worker
    TRANSFER = 2  # there is a ticket for its blocks
    FIRST = 3  # a token was said
    DECODE = 4  # several were
    ENDED = 5

    def __str__(self) -> str:
        return ("queued", "mid-prefill", "mid-transfer", "first token", "mid-decode", "ended")[self]


@dataclass(slots=True)
class Sight:
    mark: int
    stage: Stage = Stage.QUEUED
    prefill: str | None = None  # who computes its prompt for another
    decode: str | None = None  # who answers, last
    said: int = 0
    _waiting: list[tuple[Stage, asyncio.Future[None]]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """As it stands in the request: nothing but its own end can follow the number."""
        return f"chaos-{self.mark}-"

    async def reached(self, stage: Stage) -> None:
        """At least."""
        if self.stage < stage:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((stage, future))
            await future

    def comes_to(self, stage: Stage) -> None:
        self.stage = max(self.stage, stage)
        for wanted, future in self._waiting:
            if wanted <= self.stage and not future.done():
                future.set_result(None)


class Sights:
    def __init__(self) -> None:
        self._all: dict[int, Sight] = {}
        self._count = 0

    def new(self) -> Sight:
        self._count += 1
        sight = self._all[self._count] = Sight(self._count)
        return sight

    def forget(self, sight: Sight) -> None:
        sight.comes_to(Stage.ENDED)
        self._all.pop(sight.mark, None)

    def ear(self, worker: str) -> Ear:
        """For the wire over which the router asks this worker."""

        def hear(line: Line, out: bool, data: bytes) -> bytes:
            if out:
                if (found := MARK.search(data)) is not None:
                    line.mark, line.tail = int(found[1]), b""
                    self._asked(worker, line.mark, data)
            elif line.mark is not None and (sight := self._all.get(line.mark)) is not None:
                _answered(sight, line, data)
            return data

        return hear

    def _asked(self, worker: str, mark: int, data: bytes) -> None:
        sight = self._all.get(mark)
        if sight is None:
            return
        if data.startswith(b"POST /cluster/prefill"):
            sight.prefill = worker
        else:
            sight.decode = worker
        sight.comes_to(Stage.PREFILL)


def _answered(sight: Sight, line: Line, data: bytes) -> None:
    heard = line.tail + data
    line.tail = heard[-len(SAID) + 1 :]  # too short to hold one that was counted
    if b'{"ticket"' in heard:
        sight.comes_to(Stage.TRANSFER)
    if count := heard.count(SAID):
        sight.said += count
        sight.comes_to(Stage.DECODE if sight.said > 3 else Stage.FIRST)
