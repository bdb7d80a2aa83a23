"""Runs pieces of work in daemon threads, for which a process does not wait when it ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_daemon_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Start `work` in a thread with this name, and return the future of its result."""
    done: Future[T] = Future()

    def run() -> None:
        done.set_running_or_notify_cancel()
        try:
            done.set_result(work())
        except BaseException as e:
            done.set_exception(e)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


class BackgroundThreads:
    """Daemon threads, each of which runs one piece of work at a time. Up to `max_idle` of them wait for more work.

    Idle threads are reused, because starting a new thread delays the caller by milliseconds."""

    def __init__(self, name: str, max_idle: int) -> None:
        self._name, self._max_idle = name, max_idle
        self._given: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_idle = 0
        self._closed = False

    @property
    def num_idle(self) -> int:
        return self._num_idle

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread. Raises RuntimeError if no thread is idle and none can be started."""
        with self._lock:
            if self._num_idle:
                self._num_idle -= 1
                self._given.put(work)
                return
        threading.Thread(target=self._run_all, args=(work,), name=self._name, daemon=True).start()

    def close(self) -> None:
        """End each thread after its present work."""
        with self._lock:
            self._closed = True
            for _ in range(self._num_idle):
                self._given.put(None)
            self._num_idle = 0

    def _run_all(self, work: Callable[[], None] | None) -> None:
        while work is not None:
            work()
            work = None  # what it holds can be freed while the thread waits
            with self._lock:
                if self._closed or self._num_idle == self._max_idle:
                    return
                self._num_idle += 1
            work = self._given.get()
