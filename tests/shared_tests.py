"""A plugin of pytest: a process runs its share of the tests, of several processes with the same files.

Tests with neighbouring parameters often need different kernels, so they go to different processes, which compile them
at the same time."""

from __future__ import annotations

import os

import pytest

SHARE = "EMBERLINE_TEST_SHARE"  # environment variable: NUMBER/COUNT


def read_share() -> tuple[int, int]:
    """Return the number of this process, and of how many."""
    number, count = map(int, os.environ.get(SHARE, "0/1").split("/"))
    return number, count


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    number, count = read_share()
    items[:] = items[number::count]
