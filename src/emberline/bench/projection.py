"""Projects decode steps on several GPUs: adds published times of collectives to the measured step of one rank.

The step of one rank is measured on one GPU, without other ranks (`python -m emberline.bench.gpu.rank`). Nothing here
was measured on several GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from emberline.bench.report import BenchReport
from emberline.core.errors import InvalidRequest
from emberline.core.jsonfile import read_object
from emberline.planner.collective_times import ALL_REDUCE_US, all_reduce_us

# Milliseconds of a decode step by config, ranks and batch: SGLang with int4 experts on 8 H200.
PUBLISHED_MS = {("kimi-k2.5", 8, 1): 9.22}


def collectives_us(calls: Sequence[Mapping[str, Any]], ranks: int) -> float:
    """Return the microseconds of a step's collectives.

    `calls`: the calls of a step that `bench.gpu.rank` has recorded. An all-gather counts as an all-reduce of the
    gathered tensor, which transfers more."""
    parts = {"all_reduce": 1, "all_gather": ranks}
    return sum(int(call["count"]) * all_reduce_us(int(call["elements"]) * parts[call["name"]], ranks) for call in calls)


def add_projections(report: BenchReport, files: Sequence[Path]) -> None:
    """Add a projection for each batch of each result file of `bench.gpu.rank`."""
    for file in files:
        found = read_object(file)
        if found.get("bench") != "rank":
            raise InvalidRequest(
                f"{file} is a result of the bench {found.get('bench')!r}, not of emberline.bench.gpu.rank",
                param="rank_results",
                hint="make it with `python -m emberline.bench.gpu.rank CONFIG --ranks N --json FILE`",
            )
        _add_rank(report, found)


def _add_rank(report: BenchReport, found: Mapping[str, Any]) -> None:
    config, model = found["config"], Path(found["config"]["config"]).stem
    ranks, weights = config["ranks"], config["settings"].get("weights", "auto")
    if ranks not in ALL_REDUCE_US:
        known = ", ".join(map(str, ALL_REDUCE_US))
        message = f"there are no published times of collectives among {ranks} GPUs, only among {known}"
        raise InvalidRequest(message, param="rank_results", hint="measure one rank of another number of ranks")
    form = "" if weights == "auto" else f"_{weights}"
    for batch, calls in config["collectives"].items():
        measured = found["results"][f"decode_b{batch}_ms"]
        total = measured["value"] + collectives_us(calls, ranks) / 1e3
        limit, peer = measured.get("limit"), PUBLISHED_MS.get((model, ranks, int(batch)))
        name = f"projected_{model}_tp{ranks}{form}_b{batch}"
        report.add(f"{name}_ms", total, "ms", limit=limit, peer=peer)
        report.add(f"{name}_collectives_ms", collectives_us(calls, ranks) / 1e3, "ms")
