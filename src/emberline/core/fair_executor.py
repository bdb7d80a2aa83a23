"""FairExecutor: one thread that runs calls, in turn for each client, so that no client waits for all calls of another.

The client is `current_client` where `submit` is called. It is set when a request's key has been checked, otherwise to
the network address of a request with a large body.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

current_client: ContextVar[bytes] = ContextVar("current_client", default=b"")

_Call = tuple["Future[Any]", Callable[[], Any]]


class FairExecutor(Executor):
    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: OrderedDict[bytes, deque[_Call]] = OrderedDict()  # by client; the first one is next
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the executor is closed")
            self._waiting.setdefault(current_client.get(), deque()).append((future, partial(function, *args, **kwargs)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_calls, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the thread end when it has run the waiting calls."""
        with self._changed:
            self._is_closed = True
            if cancel_futures:
                for calls in self._waiting.values():
                    for future, _ in calls:
                        future.cancel()
            self._changed.notify()
        if wait and self._thread is not None:
            self._thread.join()

    def _run_calls(self) -> None:
        while (call := self._take_next()) is not None:
            future, function = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as e:
                future.set_exception(e)
            del call, future, function  # they may hold a large body until the next call

    def _take_next(self) -> _Call | None:
        with self._changed:
            while not self._waiting:
                if self._is_closed:
                    return None
                self._changed.wait()
            client, calls = self._waiting.popitem(last=False)
            call = calls.popleft()
            if calls:
                self._waiting[client] = calls  # behind all other clients
            return call
