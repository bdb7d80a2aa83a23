"""BackgroundThreads: pieces of work run at the same time, and threads are used again."""

from __future__ import annotations

import queue
import threading

from emberline.core.background_threads import BackgroundThreads

TIMEOUT_S = 10.0


def run_and_wait(threads: BackgroundThreads) -> threading.Thread:
    """Run work that reports its thread, and return that thread once it is idle or has ended."""
    found: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    idle = threads.num_idle
    threads.run(lambda: found.put(threading.current_thread()))
    thread = found.get(timeout=TIMEOUT_S)
    ended = threading.Event()
    for _ in range(1000):
        if threads.num_idle >= max(1, idle) or not thread.is_alive():
            break
        ended.wait(TIMEOUT_S / 1000)
    return thread


def test_later_work_uses_an_idle_thread() -> None:
    threads = BackgroundThreads("test", max_idle=2)
    first = run_and_wait(threads)
    assert first.daemon and run_and_wait(threads) is first and threads.num_idle == 1
    threads.close()
    first.join(TIMEOUT_S)
    assert not first.is_alive()


def test_pieces_of_work_run_at_the_same_time() -> None:
    threads, barrier = BackgroundThreads("test", max_idle=1), threading.Barrier(3)
    used: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

    def meet() -> None:
        barrier.wait(TIMEOUT_S)
        used.put(threading.current_thread())

    threads.run(meet)
    threads.run(meet)
    barrier.wait(TIMEOUT_S)
    both = [used.get(timeout=TIMEOUT_S) for _ in range(2)]
    threads.close()
    for thread in both:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_no_more_threads_are_kept_than_asked_for() -> None:
    threads = BackgroundThreads("test", max_idle=0)
    thread = run_and_wait(threads)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive() and threads.num_idle == 0


def test_work_that_raises_ends_its_thread_only() -> None:
    threads = BackgroundThreads("test", max_idle=1)
    failed = threading.Event()
    seen, threading.excepthook = threading.excepthook, lambda args: failed.set()
    try:
        threads.run(lambda: 1 // 0)
        assert failed.wait(TIMEOUT_S)
    finally:
        threading.excepthook = seen
    assert run_and_wait(threads).is_alive() and threads.num_idle == 1
    threads.close()
