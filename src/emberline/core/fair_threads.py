"""FairThreads: threads for one kind of blocking work, which the tenants (API keys) of a server share fairly.

Each kind of work has its own threads and its own bounded queue, so slow work of one kind never delays another kind:

    ids = await self._threads.run(tenant, tokenizer.encode, text)

API keys take turns, and within a key its tenants: a client that splits its key into many tenants (see core/tenants.py)
gets no more turns than others. A tenant never occupies all threads, if there are several.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import LifoQueue
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from emberline.core.errors import EngineUnavailable, Overloaded
from emberline.core.tenants import key_of_tenant

MAX_WAITING_PER_TENANT = 1024  # calls, as many requests as an engine lets wait by default
MAX_WAITING = 4096

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    tenant: str
    function: Callable[[], Any]
    result: asyncio.Future[Any]


class FairThreads:
    """The methods must be called on one event loop's thread."""

    def __init__(
        self,
        work: str,
        threads: int,
        *,
        max_waiting_per_tenant: int = MAX_WAITING_PER_TENANT,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """`work` names the work in error messages and in the names of the threads, for example `grammar checks`."""
        self._work = work
        self._num_threads = threads
        self._max_running_per_tenant = max(1, threads - 1)
        self._max_waiting_per_tenant, self._max_waiting = max_waiting_per_tenant, max_waiting
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=work.replace(" ", "-"))
        self._num_running: Counter[str] = Counter()  # by tenant
        # By key and tenant; in both dicts the next one first.
        self._waiting: OrderedDict[str, OrderedDict[str, deque[_Call]]] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        return sum(map(_count_calls, self._waiting.values()))

    async def run(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function in a thread and return its result.

        Raises Overloaded if too many calls wait. If the caller is cancelled, a waiting call is dropped, and a running
        one continues without effect."""
        call = _Call(tenant, partial(function, *args, **kwargs), asyncio.get_running_loop().create_future())
        self._make_room(tenant)
        tenants = self._waiting.setdefault(key_of_tenant(tenant), OrderedDict())
        tenants.setdefault(tenant, deque()).append(call)
        self._start_calls()
        try:
            result: T = await call.result
            return result
        finally:
            self._remove_waiting(call)

    def close(self) -> None:
        """Let the waiting calls fail; do not wait for running ones."""
        for call in [call for tenants in self._waiting.values() for calls in tenants.values() for call in calls]:
            self._remove_waiting(call)
            if not call.result.done():
                call.result.set_exception(EngineUnavailable("the server is shutting down"))
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _make_room(self, tenant: str) -> None:
        """Raise Overloaded if the tenant may not wait.

        In a full queue, drop a call of the key that has most, and in it of the tenant that has most."""
        key = key_of_tenant(tenant)
        own_tenants = self._waiting.get(key, OrderedDict())
        own = len(own_tenants.get(tenant, ()))
        if own >= self._max_waiting_per_tenant:
            raise self._overload_error(own)
        if self.num_waiting < self._max_waiting:
            return
        largest_key, tenants = max(self._waiting.items(), key=lambda item: _count_calls(item[1]))
        calls = max(tenants.values(), key=len)
        if largest_key == key:
            has_most = own + 1 >= len(calls)
        else:
            has_most = _count_calls(own_tenants) + 1 >= _count_calls(tenants)
        if has_most:
            raise self._overload_error(own)
        dropped = calls[-1]
        self._remove_waiting(dropped)
        if not dropped.result.done():
            dropped.result.set_exception(self._overload_error(len(calls)))

    def _overload_error(self, num_waiting: int) -> Overloaded:
        return Overloaded(
            f"too many {self._work}: {num_waiting} of this API key and {self.num_waiting} of all keys are waiting"
        )

    def _start_calls(self) -> None:
        while self._num_running.total() < self._num_threads and (call := self._take_next()) is not None:
            self._num_running[call.tenant] += 1
            running = asyncio.get_running_loop().run_in_executor(self._threads, call.function)
            running.add_done_callback(partial(self._finish, call))

    def _take_next(self) -> _Call | None:
        for key, tenants in self._waiting.items():
            for tenant, calls in tenants.items():
                if self._num_running[tenant] < self._max_running_per_tenant:
                    call = calls[0]
                    self._waiting.move_to_end(key)
                    tenants.move_to_end(tenant)
                    self._remove_waiting(call)
                    return call
        return None

    def _finish(self, call: _Call, running: asyncio.Future[Any]) -> None:
        self._num_running[call.tenant] -= 1
        if not self._num_running[call.tenant]:
            del self._num_running[call.tenant]
        if running.cancelled():
            call.result.cancel()
        elif (error := running.exception()) is not None:
            if not call.result.done():
                call.result.set_exception(error)
        elif not call.result.done():
            call.result.set_result(running.result())
        self._start_calls()

    def _remove_waiting(self, call: _Call) -> None:
        key = key_of_tenant(call.tenant)
        tenants = self._waiting.get(key, OrderedDict())
        calls = tenants.get(call.tenant)
        if calls is not None and call in calls:
            calls.remove(call)
            if not calls:
                del tenants[call.tenant]
            if not tenants:
                del self._waiting[key]


def _count_calls(tenants: Mapping[str, deque[_Call]]) -> int:
    return sum(map(len, tenants.values()))


class FairWorkers(Generic[W]):
    """Workers, such as child processes, of which each makes one call at a time, in FairThreads.

    An idle worker that was used last is used next, so the others are rarely started."""

    def __init__(
        self,
        work: str,
        workers: Sequence[W],
        *,
        max_waiting_per_tenant: int = MAX_WAITING_PER_TENANT,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._threads = FairThreads(
            work, len(workers), max_waiting_per_tenant=max_waiting_per_tenant, max_waiting=max_waiting
        )
        self._idle: LifoQueue[W] = LifoQueue()
        for worker in reversed(workers):
            self._idle.put(worker)

    async def run(self, tenant: str, function: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function(worker, *args, **kwargs)` with an idle worker. Raises the errors of FairThreads.run."""

        def call() -> T:
            worker = self._idle.get()
            try:
                return function(worker, *args, **kwargs)
            finally:
                self._idle.put(worker)

        return await self._threads.run(tenant, call)

    def close(self) -> None:
        self._threads.close()
