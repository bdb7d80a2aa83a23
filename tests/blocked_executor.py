"""BlockedExecutor: stands for a default executor whose threads are all busy."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class BlockedExecutor(ThreadPoolExecutor):
    """Raises for each call. Work that requests cause must have threads of its own."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        raise AssertionError(f"{fn} runs in the default executor")
