"""The tests that are set aside by name, from aside.toml."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

FILE = Path(__file__).resolve().with_name("aside.toml")


@cache
def _groups(suite: str) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = tomllib.loads(FILE.read_text())[suite]
    return groups


def reason_to_set_aside(suite: str, test: str) -> str | None:
    for reason, patterns in _groups(suite).items():
        if any(_matches(test, pattern) for pattern in patterns):
            return reason
    return None


def _matches(test: str, pattern: str) -> bool:
    """A pattern is the beginning of a test's id; * stands for any characters, $ for the end."""
    end = r"\Z" if pattern.endswith("$") else ""
    return re.match(".*".join(map(re.escape, pattern.removesuffix("$").split("*"))) + end, test) is not None
