"""RouterGroup: represents all routers of a cluster as one: merges their statuses and sends commands to each of them.

Routers that do not answer are left out. Their requests are still known, since workers report them to the others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from emberline.autoscaler.router_client import RouterClient, RouterUnavailable
from emberline.autoscaler.status_merger import StatusMerger

log = logging.getLogger("emberline.autoscaler")

Result = TypeVar("Result")


class ClusterRouters(Protocol):
    """The calls that the autoscaler makes to routers. Each may raise RouterUnavailable or WrongClusterKey."""

    @property
    def silent_count(self) -> int:
        """The number of routers that did not answer the last request for the status."""
        ...

    async def fetch_status(self) -> dict[str, Any]:
        """Return the merged status of the routers that answer."""
        ...

    async def drain(self, name: str, *, on: bool = True) -> bool:
        """Start or end the draining of a worker, and return whether a router knows it."""
        ...

    async def set_asleep(self, name: str, *, on: bool = True) -> bool:
        """Let a worker sleep, or wake it. Return whether it can sleep."""
        ...

    async def announce_models(self, names: Collection[str], seconds: float) -> None:
        """Let requests for these models wait while they have no worker."""
        ...


class RouterGroup:
    def __init__(self, routers: Sequence[RouterClient]) -> None:
        """`routers`: one or more."""
        assert routers
        self._routers = {router.url: router for router in routers}
        self._merger = StatusMerger()
        self._silent: set[str] = set()  # URLs of the routers that did not answer the last request for the status

    @property
    def url(self) -> str:
        return ",".join(self._routers)

    @property
    def silent_count(self) -> int:
        return len(self._silent)

    def close(self) -> None:
        for router in self._routers.values():
            router.close()

    async def fetch_status(self) -> dict[str, Any]:
        """Return the merged status of the routers that answer.

        If one router reports a worker as draining, and another reports the same worker as ready because it does not
        know of the drain, for example after a restart, the drain is repeated at that router. Raises RouterUnavailable
        if no router answers, or WrongClusterKey."""
        try:
            statuses = await self._call_all({url: router.fetch_status() for url, router in self._routers.items()})
        except RouterUnavailable:
            self._silent = set(self._routers)
            raise
        self._log_silent_routers(self._routers.keys() - statuses.keys())
        merged = self._merger.merge(statuses)
        for url, names in self._merger.missing_drains.items():
            for name in names:
                log.info("Repeating a drain at a router that does not know it: router=%s worker=%s", url, name)
                with contextlib.suppress(RouterUnavailable):  # the next status shows whether it is still missing
                    await self._routers[url].drain(name)
        return merged

    async def drain(self, name: str, *, on: bool = True) -> bool:
        """Start or end the drain of a worker at all routers that answer. Return whether any of them knows it."""
        return any((await self._call_answering(lambda router: router.drain(name, on=on))).values())

    async def set_asleep(self, name: str, *, on: bool = True) -> bool:
        """Let a worker sleep, or wake it, through one router that reaches it. Return whether the worker can sleep.

        If a router was restarted and does not know the worker yet, the next router is called."""
        error: RouterUnavailable | None = None
        has_answer = False
        for url, router in self._routers.items():
            if url not in self._silent:
                try:
                    if await router.set_asleep(name, on=on):
                        return True
                    has_answer = True
                except RouterUnavailable as e:
                    error = e
        if error is not None and not has_answer:
            raise error
        return False

    async def announce_models(self, names: Collection[str], seconds: float) -> None:
        await self._call_answering(lambda router: router.announce_models(names, seconds))

    async def _call_answering(self, call: Callable[[RouterClient], Coroutine[Any, Any, Result]]) -> dict[str, Result]:
        return await self._call_all(
            {url: call(router) for url, router in self._routers.items() if url not in self._silent}
        )

    async def _call_all(self, calls: dict[str, Coroutine[Any, Any, Result]]) -> dict[str, Result]:
        """Return the results of the calls that succeed, by URL. Raises RouterUnavailable if none does."""
        results = await asyncio.gather(*calls.values(), return_exceptions=True)
        done, failed = dict[str, Result](), list[RouterUnavailable]()
        for url, result in zip(calls, results, strict=True):
            if isinstance(result, RouterUnavailable):
                failed.append(result)
            elif isinstance(result, BaseException):
                raise result
            else:
                done[url] = result
        if failed and not done:
            raise failed[0]
        return done

    def _log_silent_routers(self, silent: set[str]) -> None:
        for url in sorted(silent - self._silent):
            log.warning("Router does not answer, continuing with the others: router=%s", url)
        for url in sorted(self._silent - silent):
            log.info("Router answers again: router=%s", url)
        self._silent = silent
