"""Muster: who of a cluster is not there as it should be, and what is held for somebody when nobody wants anything, from
what the router (`/cluster/status`) and each worker (`/stats`) tell."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

KEPT = ("running", "waiting", "open_requests")
KEPT_FOR_OTHERS = ("leases", "pinned_blocks", "quarantined_blocks")
PAUSE = 0.1  # seconds between two looks

Told = Mapping[str, Any] | None  # None: it does not answer


def absences(status: Told, workers: Mapping[str, Told]) -> dict[str, str]:
    """Names, and what is wrong with them: each is to be known as ready, to say so itself, and to be paired with all who
    prefill."""
    if status is None:
        return {"router": "no router"}
    rows = {row["name"]: row for row in status["workers"]}
    found: dict[str, str] = {}
    for name, stats in workers.items():
        health = rows[name]["health"] if name in rows else "unknown"
        if health != "ready":
            found[name] = f"{name} is {health}"
        elif stats is None or stats["engine_state"] != "ready":
            found[name] = f"{name} says {stats and stats['engine_state']}"
    there = [rows[name] for name in workers if name not in found]
    prefills = {row["name"] for row in there if row["role"] == "prefill"}
    for row in there:
        if row["role"] == "decode" and not prefills <= {*row["paired"]}:
            found[row["name"]] = f"{row['name']} is paired with {row['paired']}, refused {row['refused']}"
    return found


def holdings(status: Told, workers: Mapping[str, Told]) -> str:
    """Of the first who holds something; "" if nobody does."""
    if status is None or status["open_requests"]:
        return "the router has open requests" if status else "no router"
    for name, stats in workers.items():
        if stats is None:
            return f"{name} does not answer"
        kept = {what: stats[what] for what in KEPT} | {what: stats["transfer"][what] for what in KEPT_FOR_OTHERS}
        kept["blocks"] = stats["blocks_total"] - stats["blocks_free"] - stats["blocks_cached"]
        if any(kept.values()):
            return f"{name}: " + ", ".join(f"{what} {count}" for what, count in kept.items() if count)
    return ""


async def until_nothing(what: Callable[[], Awaitable[str]], seconds: float) -> str:
    """Waits for it to be "". What it is in the end."""
    end = asyncio.get_running_loop().time() + seconds
    while (still := await what()) and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(PAUSE)
    return still
