"""map_in_order: maps a function over items with several threads and yields the results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from emberline.core.cpus import core_count

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_order(
    pool: ThreadPoolExecutor, function: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[Result]:
    """Yield `function(item)` for each item in order.

    Only two items per core are in progress, to bound memory.
    """
    rest, max_pending = iter(items), 2 * core_count()
    pending: deque[Future[Result]] = deque(pool.submit(function, item) for item in islice(rest, max_pending))
    try:
        while pending:
            result = pending.popleft().result()
            pending.extend(pool.submit(function, item) for item in islice(rest, 1))
            yield result
    finally:
        for future in pending:
            future.cancel()
