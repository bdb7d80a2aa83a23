"""StatusMerger: merges the status documents of several routers into one.

Each router counts its own requests and latencies. Its counters start again at 0 when the router is restarted, and are
missing when it cannot be reached. So the merger adds up by how much each router's counters have grown since its
previous status, which gives sums that never decrease. Latencies are merged as histograms, since percentiles cannot be
added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Status = Mapping[str, Any]  # the document of /cluster/status
Row = Mapping[str, Any]  # the row of one worker in it

HEALTH_ORDER = ("draining", "ready", "starting", "stuck", "lost")  # the first one that a router reports counts
# Counters of a worker's row that each router reports for its own requests.
SUMMED_COUNTERS = ("open", "prefill_tokens", "decode_tokens")
HISTOGRAMS = ("first_token", "inter_token")


class StatusMerger:
    def __init__(self) -> None:
        self.missing_drains: dict[str, list[str]] = {}  # workers that drain at another router only, by router
        self._last: dict[str, dict[str, list[float]]] = {}  # counters by router that answered the last time
        self._totals: dict[str, list[float]] = {}  # sums of the growth of each counter

    def merge(self, statuses: Mapping[str, Status]) -> dict[str, Any]:
        """Return the merged status. `statuses`: the status of each router that answers, by URL; at least one."""
        bounds = next(iter(statuses.values()))["latency"]["bounds_s"]
        self._add_growth({url: _read_counters(status, bounds) for url, status in statuses.items()})
        rows: dict[str, dict[str, Row]] = {}
        for url, status in statuses.items():
            for row in status["workers"]:
                rows.setdefault(row["name"], {})[url] = row
        self.missing_drains = _find_missing_drains(rows)
        first = next(iter(statuses.values()))
        waiting: dict[str, int] = {}
        for status in statuses.values():
            for model, count in status.get("waiting_by_model", {}).items():
                waiting[model] = waiting.get(model, 0) + count
        has_models = all("waiting_by_model" in status for status in statuses.values())
        return {
            "workers": [self._merge_rows(list(each.values())) for each in rows.values()],
            "waiting_requests": sum(status["waiting_requests"] for status in statuses.values()),
            **({"waiting_by_model": waiting} if has_models else {}),
            "refused": self._totals["refused"][0],
            "latency": {
                "bounds_s": first["latency"]["bounds_s"],
                **{name: list(self._totals[name]) for name in HISTOGRAMS},
            },
        }

    def _merge_rows(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Merge the routers' rows of one worker. The figures that the worker reports are from its last heartbeat."""
        latest = min(rows, key=lambda row: row["seconds_since_beat"])
        rows = [row for row in rows if row["incarnation"] == latest["incarnation"]]
        sums = {name: sum(row[name] for row in rows) for name in SUMMED_COUNTERS}
        everywhere = max(row["open"] + row["open_by_other_routers"] for row in rows)
        return {
            **latest,
            **sums,
            "health": min((row["health"] for row in rows), key=HEALTH_ORDER.index),
            "open_by_other_routers": max(everywhere - sums["open"], 0),  # requests of routers that do not answer
            "answered": self._totals[f"answered {latest['name']}"][0],
        }

    def _add_growth(self, counters: Mapping[str, dict[str, list[float]]]) -> None:
        """Add to the totals by how much the counters of each router have grown since its previous status.

        Nothing is added for a router that was restarted, or that did not answer the last time: its requests may be
        old."""
        for url, now in counters.items():
            before = self._last.get(url, {})
            is_restarted = any(sum(now[name]) < sum(before.get(name, ())) for name in HISTOGRAMS)
            for name, values in now.items():
                zeros = [0.0] * len(values)
                totals = self._totals.setdefault(name, zeros)
                if len(totals) != len(values):  # the routers are of another release, with other bounds
                    totals = self._totals[name] = zeros
                if len(before.get(name, zeros)) != len(values):
                    continue
                if before and not is_restarted:  # a worker that is new has had its requests since
                    grown = (max(new - old, 0) for old, new in zip(before.get(name, zeros), values, strict=True))
                    self._totals[name] = [total + growth for total, growth in zip(totals, grown, strict=True)]
        self._last = dict(counters)
        known = {name for each in counters.values() for name in each}
        self._totals = {name: total for name, total in self._totals.items() if name in known}


def _read_counters(status: Status, bounds: Sequence[float]) -> dict[str, list[float]]:
    """Return the counters of a status. Latencies counted with other bounds than `bounds` are left out (all 0)."""
    latency, has_bounds = status["latency"], status["latency"]["bounds_s"] == bounds
    return {
        "refused": [status["refused"]],
        **{name: list(latency[name]) if has_bounds else [0] * (len(bounds) + 1) for name in HISTOGRAMS},
        **{f"answered {row['name']}": [row["answered"]] for row in status["workers"]},
    }


def _find_missing_drains(rows: Mapping[str, Mapping[str, Row]]) -> dict[str, list[str]]:
    missing: dict[str, list[str]] = {}
    for name, by_router in rows.items():
        draining = {row["incarnation"] for row in by_router.values() if row["health"] == "draining"}
        for url, row in by_router.items():
            if row["health"] == "ready" and row["incarnation"] in draining:
                missing.setdefault(url, []).append(name)
    return missing
