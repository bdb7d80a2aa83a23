"""RequestProgress: how far a request has come, as proxies see it. RequestObserver: all requests.

Each request carries a mark by which its bytes are recognized."""

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
    PREFILL = 1  # a worker has the prompt
    TRANSFER = 2  # there is a ticket for the prompt's blocks
    FIRST = 3  # the first token was sent
    DECODE = 4  # several tokens were sent
    ENDED = 5

    def __str__(self) -> str:
        return ("queued", "mid-prefill", "mid-transfer", "first token", "mid-decode", "ended")[self]


@dataclass(slots=True)
class Sight:
    mark: int
    stage: Stage = Stage.QUEUED
    prefill: str | None = None  # the worker that computes the prompt for another
    decode: str | None = None  # the worker that answered last
    said: int = 0
    _waiting: list[tuple[Stage, asyncio.Future[None]]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The mark as it stands in the request; the final dash separates it from what follows."""
        return f"chaos-{self.mark}-"

    async def reached(self, stage: Stage) -> None:
        """Wait until the request has reached this stage or a later one."""
        if self.stage < stage:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((stage, future))
            await future

    def comes_to(self, stage: Stage) -> None:
        self.stage = max(self.stage, stage)
        for awaited, future in self._waiting:
            if awaited <= self.stage and not future.done():
                future.set_result(None)


class Sights:
    def __init__(self) -> None:
        self._all: dict[int, Sight] = {}
        self._count = 0

    def new(self) -> Sight:
        self._count += 1
        progress = self._all[self._count] = Sight(self._count)
        return progress

    def forget(self, sight: Sight) -> None:
        sight.comes_to(Stage.ENDED)
        self._all.pop(sight.mark, None)

    def ear(self, worker: str) -> Ear:
        """Return the filter for the proxy of the router's requests to this worker."""

        def observe(connection: Line, is_to_server: bool, data: bytes) -> bytes:
            if is_to_server:
                if (found := MARK.search(data)) is not None:
                    connection.mark, connection.tail = int(found[1]), b""
                    self._asked(worker, connection.mark, data)
            elif connection.mark is not None and (progress := self._all.get(connection.mark)) is not None:
                _answered(progress, connection, data)
            return data

        return observe

    def _asked(self, worker: str, mark: int, data: bytes) -> None:
        progress = self._all.get(mark)
        if progress is None:
            return
        if data.startswith(b"POST /cluster/prefill"):
            progress.prefill = worker
        else:
            progress.decode = worker
        progress.comes_to(Stage.PREFILL)


def _answered(sight: Sight, line: Line, data: bytes) -> None:
    received = line.tail + data
    line.tail = received[-len(SAID) + 1 :]  # shorter than the prefix, so that no group is counted twice
    if b'{"ticket"' in received:
        sight.comes_to(Stage.TRANSFER)
    if count := received.count(SAID):
        sight.said += count
        sight.comes_to(Stage.DECODE if sight.said > 3 else Stage.FIRST)
