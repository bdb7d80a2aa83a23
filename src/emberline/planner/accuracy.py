"""SimulationError: how far simulated latencies were from measured ones, from benchmarks/results/sim-accuracy.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emberline.core.errors import InvalidRequest
from emberline.core.jsonfile import read_object

ACCURACY_FILE = "sim-accuracy.json"
# Of a checkout; an installed package has no benchmarks directory.
DEFAULT_ACCURACY_PATH = Path(__file__).parents[3] / "benchmarks" / "results" / ACCURACY_FILE
_NAMES = ("ttft_p90_error_max", "itl_p90_error_max", "throughput_error_max")


@dataclass(frozen=True, slots=True)
class SimulationError:
    """The largest relative errors of the simulator against real runs, as shares; None: not measured."""

    ttft_p90: float | None = None
    itl_p90: float | None = None
    throughput: float | None = None
    source: str = ""

    @staticmethod
    def read(path: Path | None) -> SimulationError:
        """Read a result file; None: that of the checkout, if there is one. Raises InvalidRequest for another file."""
        if path is None:
            if not DEFAULT_ACCURACY_PATH.is_file():
                return SimulationError()
            path = DEFAULT_ACCURACY_PATH
        if not path.is_file():
            raise InvalidRequest(f"accuracy is {str(path)!r}, which is not a file", param="accuracy", hint=_hint())
        results = read_object(path).get("results")
        ttft, itl, throughput = (_find_value(results, name) for name in _NAMES)
        if ttft is None or itl is None or throughput is None:
            message = f"{path} has no results {', '.join(_NAMES)}"
            raise InvalidRequest(message, param="accuracy", hint=_hint())
        return SimulationError(ttft, itl, throughput, path.name)

    def describe(self, name: str) -> str:
        """Return the error of `ttft_p90`, `itl_p90` or `throughput` in words."""
        error = getattr(self, name)
        return "not measured" if error is None else f"up to {100 * error:.1f} % ({self.source})"


def _find_value(results: Any, name: str) -> float | None:
    entry = results.get(name) if isinstance(results, dict) else None
    value = entry.get("value") if isinstance(entry, dict) else None
    return float(value) if isinstance(value, int | float) else None


def _hint() -> str:
    return f"pass benchmarks/results/{ACCURACY_FILE}"
