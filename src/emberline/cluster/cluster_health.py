"""Checks of a whole cluster: which workers are unavailable, and which resources an idle cluster still holds.

The checks read the router's `/cluster/status` and each worker's `/stats`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

IDLE_ZERO_COUNTERS = ("running", "waiting", "open_requests")
IDLE_ZERO_TRANSFER_COUNTERS = ("leases", "pinned_blocks", "quarantined_blocks")
POLL_INTERVAL_S = 0.1  # seconds between two checks

StatusDocument = Mapping[str, Any] | None  # None: the process does not answer


def find_unavailable_workers(
    router_status: StatusDocument, stats_by_worker: Mapping[str, StatusDocument]
) -> dict[str, str]:
    """Return the reason for each unavailable worker, by worker name.

    A worker is available if the router and the worker itself report it as ready. A decode worker must also be connected
    to all available prefill workers. If the router does not answer, the only key is "router"."""
    if router_status is None:
        return {"router": "the router does not answer"}
    rows = {row["name"]: row for row in router_status["workers"]}
    unavailable: dict[str, str] = {}
    for name, stats in stats_by_worker.items():
        health = rows[name]["health"] if name in rows else "unknown"
        if health != "ready":
            unavailable[name] = f"the router reports {name} as {health}"
        elif stats is None or stats["engine_state"] != "ready":
            unavailable[name] = f"{name} reports its engine as {stats and stats['engine_state']}"
    available = [rows[name] for name in stats_by_worker if name not in unavailable]
    prefill_names = {row["name"] for row in available if row["role"] == "prefill"}
    for row in available:
        if row["role"] == "decode" and not prefill_names <= {*row["paired"]}:
            unavailable[row["name"]] = f"{row['name']} is paired with {row['paired']} only, refused {row['refused']}"
    return unavailable


def describe_held_resources(router_status: StatusDocument, stats_by_worker: Mapping[str, StatusDocument]) -> str:
    """Return a text about the requests, leases or KV blocks that an idle cluster still holds; "" if there are none.

    A cluster is idle if no client sends requests to it. The text covers only the first process that holds something or
    does not answer."""
    if router_status is None or router_status["open_requests"]:
        return "the router has open requests" if router_status else "the router does not answer"
    for name, stats in stats_by_worker.items():
        if stats is None:
            return f"{name} does not answer"
        held = {counter: stats[counter] for counter in IDLE_ZERO_COUNTERS} | {
            counter: stats["transfer"][counter] for counter in IDLE_ZERO_TRANSFER_COUNTERS
        }
        held["blocks"] = stats["blocks_total"] - stats["blocks_free"] - stats["blocks_cached"]
        if any(held.values()):
            return f"{name}: " + ", ".join(f"{counter} {count}" for counter, count in held.items() if count)
    return ""


async def wait_until_no_problem(describe_problem: Callable[[], Awaitable[str]], timeout_s: float) -> str:
    """Call `describe_problem` repeatedly until it returns "" or `timeout_s` has passed.

    Return its last result."""
    end = asyncio.get_running_loop().time() + timeout_s
    while (result := await describe_problem()) and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(POLL_INTERVAL_S)
    return result
