"""RequestProgress: the stage that a request has reached, such as prefill or decode.

RequestObserver finds the stage from the traffic that passes through the proxies. Each request carries a marker, by
which the proxies recognize its bytes."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from enum import IntEnum

from emberline.chaos.fault_proxy import ProxiedConnection, TrafficFilter

MARK_PATTERN = re.compile(rb"chaos-(\d+)-")
GROUP_COMMENT_START = b": said "


class RequestStage(IntEnum):
    QUEUED = 0  # sent to the router
    PREFILL = 1  # a worker has the prompt
    TRANSFER = 2  # there is a ticket for the prompt's blocks
    FIRST = 3  # the first token was sent
    DECODE = 4  # several tokens were sent
    ENDED = 5

    def __str__(self) -> str:
        return ("queued", "mid-prefill", "mid-transfer", "first token", "mid-decode", "ended")[self]


@dataclass(slots=True)
class RequestProgress:
    mark: int
    stage: RequestStage = RequestStage.QUEUED
    prefill_worker: str | None = None  # the worker that computes the prompt for another
    decode_worker: str | None = None  # the worker that answered last
    router_port: int = 0  # of the router that carries it, if there are several; 0: not known
    group_count: int = 0
    _stage_waiters: list[tuple[RequestStage, asyncio.Future[None]]] = field(default_factory=list)

    @property
    def marker_text(self) -> str:
        """The marker in the request's body. It ends with a dash, so that no marker begins with a different marker."""
        return f"chaos-{self.mark}-"

    async def wait_for_stage(self, stage: RequestStage) -> None:
        """Wait until the request has reached this stage or a later one."""
        if self.stage < stage:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._stage_waiters.append((stage, future))
            await future

    def advance_to(self, stage: RequestStage) -> None:
        self.stage = max(self.stage, stage)
        for awaited, future in self._stage_waiters:
            if awaited <= self.stage and not future.done():
                future.set_result(None)


class RequestObserver:
    def __init__(self) -> None:
        self._by_mark: dict[int, RequestProgress] = {}
        self._count = 0

    def track_request(self) -> RequestProgress:
        self._count += 1
        progress = self._by_mark[self._count] = RequestProgress(self._count)
        return progress

    def stop_tracking(self, progress: RequestProgress) -> None:
        progress.advance_to(RequestStage.ENDED)
        self._by_mark.pop(progress.mark, None)

    def observe_router(self, router_port: int, data: bytes) -> None:
        """Record which router a client's data was sent to, if the data names a request."""
        found = MARK_PATTERN.search(data)
        if found is not None and (progress := self._by_mark.get(int(found[1]))) is not None:
            progress.router_port = router_port

    def make_traffic_filter(self, worker_name: str) -> TrafficFilter:
        """Return a filter that updates the requests' progress, for the proxy between the router and this worker."""

        def observe_traffic(connection: ProxiedConnection, is_to_server: bool, data: bytes) -> bytes:
            if is_to_server:
                if (found := MARK_PATTERN.search(data)) is not None:
                    connection.mark, connection.tail = int(found[1]), b""
                    self._observe_request(worker_name, connection.mark, data)
            elif connection.mark is not None and (progress := self._by_mark.get(connection.mark)) is not None:
                _observe_reply(progress, connection, data)
            return data

        return observe_traffic

    def _observe_request(self, worker_name: str, request_number: int, data: bytes) -> None:
        progress = self._by_mark.get(request_number)
        if progress is None:
            return
        if data.startswith(b"POST /cluster/prefill"):
            progress.prefill_worker = worker_name
        else:
            progress.decode_worker = worker_name
        progress.advance_to(RequestStage.PREFILL)


def _observe_reply(progress: RequestProgress, connection: ProxiedConnection, data: bytes) -> None:
    received = connection.tail + data
    connection.tail = received[
        -len(GROUP_COMMENT_START) + 1 :
    ]  # shorter than the prefix, so that no group is counted twice
    if b'{"ticket"' in received:
        progress.advance_to(RequestStage.TRANSFER)
    if count := received.count(GROUP_COMMENT_START):
        progress.group_count += count
        progress.advance_to(RequestStage.DECODE if progress.group_count > 3 else RequestStage.FIRST)
