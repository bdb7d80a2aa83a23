"""in_order: work done by several threads, its results in order, and only a few of them alive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from emberline.core.config import core_count

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    rest, ahead = iter(items), 2 * core_count()
    pending: deque[Future[Result]] = deque(pool.submit(work, item) for item in islice(rest, ahead))
    try:
        while pending:
            result = pending.popleft().result()
            pending.extend(pool.submit(work, item) for item in islice(rest, 1))
            yield result
    finally:
        for future in pending:
            future.cancel()
