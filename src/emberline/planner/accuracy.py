"""SimulationError: the errors of simulated latencies, which are read from benchmarks/results/sim-accuracy.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emberline.core.errors import InvalidRequest
from emberline.core.jsonfile import read_object

ACCURACY_FILE = "sim-accuracy.json"
# The file of a source checkout; an installed package has none.
DEFAULT_ACCURACY_PATH = Path(__file__).parents[3] / "benchmarks" / "results" / ACCURACY_FILE
LATENCIES = ("ttft_p90", "itl_p90")


@dataclass(frozen=True, slots=True)
class SimulationError:
    """The largest errors of simulated latencies, as shares of the latencies measured in real runs.

    The keys of both mappings are names in LATENCIES. The mappings are empty if no result file was read."""

    clusters: Mapping[str, float] = field(default_factory=dict)  # clusters of a router and workers on CPUs
    h200: Mapping[str, float] = field(default_factory=dict)  # recorded runs of one worker; may be empty
    source: str = ""

    @staticmethod
    def read(path: Path | None) -> SimulationError:
        """Read a result file; None: the file of the checkout, if it exists. Raises InvalidRequest if it is unusable."""
        if path is None:
            if not DEFAULT_ACCURACY_PATH.is_file():
                return SimulationError()
            path = DEFAULT_ACCURACY_PATH
        if not path.is_file():
            raise InvalidRequest(f"accuracy is {str(path)!r}, which is not a file", param="accuracy", hint=_hint())
        results = read_object(path).get("results")
        clusters, h200 = _read_errors(results, ""), _read_errors(results, "h200_")
        if missing := [_result_name(name) for name in LATENCIES if name not in clusters]:
            message = f"{path} has no results {', '.join(missing)}"
            raise InvalidRequest(message, param="accuracy", hint=_hint())
        return SimulationError(clusters, h200, path.name)

    def describe(self) -> str:
        """Return a text with the largest error of each latency in LATENCIES, or why the errors are not known."""
        if not self.clusters:
            return f"unknown: {ACCURACY_FILE} was not found (--accuracy)"
        return f"{', '.join(map(self._describe_latency, LATENCIES))} ({self.source})"

    def _describe_latency(self, name: str) -> str:
        gpu = f" (one H200: {100 * self.h200[name]:.1f} %)" if name in self.h200 else ""
        return f"{name} up to {100 * self.clusters[name]:.1f} %{gpu}"


def _read_errors(results: Any, prefix: str) -> dict[str, float]:
    """Return the error of each latency in the results of a file. `prefix`: the beginning of the results' names."""
    entries = results if isinstance(results, dict) else {}
    found = {name: entries.get(prefix + _result_name(name)) for name in LATENCIES}
    values = {name: entry.get("value") for name, entry in found.items() if isinstance(entry, dict)}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _result_name(latency: str) -> str:
    return f"{latency}_error_max"


def _hint() -> str:
    return f"pass benchmarks/results/{ACCURACY_FILE}"
