"""FairThreads: threads for one kind of blocking work, which the tenants (API keys) of a server share fairly.

Each kind of work has its own threads and its own bounded queue, so slow work of one kind never delays another kind:

    ids = await self._threads.run(tenant, tokenizer.encode, text)

API keys take turns, and within a key its tenants: a client that splits its key into many tenants (see core/tenants.py)
gets no more turns than others. A tenant never occupies all threads, if there are several.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from queue import LifoQueue, SimpleQueue
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from emberline.core.errors import EmberlineError, EngineUnavailable, Overloaded
from emberline.core.tenants import key_of_tenant

MAX_WAITING_PER_TENANT = 1024  # calls, as many requests as an engine lets wait by default
MAX_WAITING = 4096

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")
Tenant = str | bytes

# The client of a request with a large body: the tenant of the work on that body in child processes (`offload.py`).
current_client: ContextVar[Tenant] = ContextVar("current_client", default=b"")


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    tenant: Tenant
    function: Callable[[], Any]
    result: Future[Any]

    def fail(self, error: EmberlineError) -> None:
        if self.result.set_running_or_notify_cancel():
            self.result.set_exception(error)


class FairThreads:
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
        self._lock = threading.RLock()  # of the fields below
        self._threads: list[threading.Thread] = []  # daemons, so that a call that hangs does not keep the process alive
        self._started: SimpleQueue[_Call | None] = SimpleQueue()  # None ends a thread
        self._num_running: Counter[Tenant] = Counter()
        # By key and tenant; in both dicts the next one first.
        self._waiting: OrderedDict[Tenant, OrderedDict[Tenant, deque[_Call]]] = OrderedDict()
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return sum(map(_count_calls, self._waiting.values()))

    async def run(self, tenant: Tenant, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function in a thread and return its result.

        Raises Overloaded if too many calls wait, EngineUnavailable after `close`. If the caller is cancelled, a waiting
        call is dropped, and a running one continues without effect."""
        call = _Call(tenant, partial(function, *args, **kwargs), Future())
        with self._lock:
            if self._is_closed:
                raise _closed_error()
            self._make_room(tenant)
            tenants = self._waiting.setdefault(_key_of(tenant), OrderedDict())
            tenants.setdefault(tenant, deque()).append(call)
            self._start_calls()
        try:
            result: T = await asyncio.wrap_future(call.result)
            return result
        finally:
            self._remove_waiting(call)

    def close(self) -> None:
        """Let the waiting calls and later ones fail; do not wait for running ones."""
        with self._lock:
            self._is_closed = True
            for call in [call for tenants in self._waiting.values() for calls in tenants.values() for call in calls]:
                self._remove_waiting(call)
                call.fail(_closed_error())
            for _ in self._threads:
                self._started.put(None)

    def _make_room(self, tenant: Tenant) -> None:
        """Raise Overloaded if the tenant may not wait.

        In a full queue, drop a call of the key that has most, and in it of the tenant that has most."""
        key = _key_of(tenant)
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
        dropped.fail(self._overload_error(len(calls)))

    def _overload_error(self, num_waiting: int) -> Overloaded:
        return Overloaded(
            f"too many {self._work}: {num_waiting} of this API key and {self.num_waiting} of all keys are waiting"
        )

    def _start_calls(self) -> None:
        while self._num_running.total() < self._num_threads and (call := self._take_next()) is not None:
            self._num_running[call.tenant] += 1
            self._started.put(call)
            if len(self._threads) < self._num_running.total():
                name = f"{self._work.replace(' ', '-')}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run_started, name=name, daemon=True))
                self._threads[-1].start()

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

    def _run_started(self) -> None:
        while (call := self._started.get()) is not None:
            if call.result.set_running_or_notify_cancel():
                try:
                    call.result.set_result(call.function())
                except BaseException as e:
                    call.result.set_exception(e)
            with self._lock:
                self._num_running[call.tenant] -= 1
                if not self._num_running[call.tenant]:
                    del self._num_running[call.tenant]
                self._start_calls()
            del call  # it may hold a large body

    def _remove_waiting(self, call: _Call) -> None:
        with self._lock:
            key = _key_of(call.tenant)
            tenants = self._waiting.get(key, OrderedDict())
            calls = tenants.get(call.tenant)
            if calls is not None and call in calls:
                calls.remove(call)
                if not calls:
                    del tenants[call.tenant]
                if not tenants:
                    del self._waiting[key]


def _key_of(tenant: Tenant) -> Tenant:
    return key_of_tenant(tenant) if isinstance(tenant, str) else tenant


def _count_calls(tenants: Mapping[Tenant, deque[_Call]]) -> int:
    return sum(map(len, tenants.values()))


def _closed_error() -> EngineUnavailable:
    return EngineUnavailable("the server is shutting down")


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

    async def run(
        self, tenant: Tenant, function: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
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
