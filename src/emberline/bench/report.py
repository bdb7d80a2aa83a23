"""BenchReport: the results of a benchmark, printed as a table and, on the last line, as JSON."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from emberline.bench import machine


@dataclass(frozen=True, slots=True)
class BenchResult:
    value: float
    unit: str  # a rate (tok/s) is better when higher, everything else when lower
    peer: float | None = None  # the best alternative, measured in the same run
    limit: float | None = None  # the physical bound
    spread: tuple[float, float] | None = None  # minimum and maximum of the rounds; `value` is their median

    @property
    def peer_ratio(self) -> float | None:
        """How many times better the value is than the peer's. None without a peer."""
        return self._ratio_to(self.value, self.peer)

    @property
    def limit_share(self) -> float | None:
        """Which share of the machine's limit the value reaches. None without a limit."""
        return self._ratio_to(self.value, self.limit)

    def _ratio_to(self, value: float, reference: float | None) -> float | None:
        if not value or not reference:
            return None
        return value / reference if self.unit.endswith("/s") else reference / value

    def as_dict(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"value": round_significant(self.value), "unit": self.unit}
        for name in ("peer", "limit"):
            if (number := getattr(self, name)) is not None:
                parts[name] = round_significant(number)
        if self.spread is not None:
            parts["spread"] = [round_significant(end) for end in self.spread]
        return parts


@dataclass(slots=True)
class BenchReport:
    bench: str
    config: dict[str, Any] = field(default_factory=dict)
    results: dict[str, BenchResult] = field(default_factory=dict)

    def add(self, name: str, values: float | list[float], unit: str, **details: Any) -> None:
        """Add a result: one value, or a list with the value of each round, of which the median is reported.

        The name `BASE/PEER` is used for a peer's result that corresponds to our result `BASE`. `details` are further
        fields of BenchResult.
        """
        if isinstance(values, list):
            details["spread"] = (min(values), max(values))
            values = median(values)
        self.results[name] = BenchResult(values, unit, **details)

    def as_dict(self, stated_commit: str | None = None) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "command": current_command(),
            "commit": machine.describe_commit(stated_commit),
            "hardware": machine.describe_hardware(),
            "software": machine.describe_software(),
            "config": self.config,
            "results": {name: result.as_dict() for name, result in self.results.items()},
        }

    def print_and_save(self, json_file: Path | None = None, stated_commit: str | None = None) -> None:
        """Print the report as a table and as JSON, and write the JSON to `json_file` if it is given.

        `stated_commit` is the commit that the user gave, if any.
        """
        whole = self.as_dict(stated_commit)
        print(format_table(self.results))
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
        print(json.dumps(whole), flush=True)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of every benchmark that prints a report."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")
    parser.add_argument("--commit", metavar="REV", help="commit of this code, recorded as stated (default: from git)")


def format_table(results: Mapping[str, BenchResult]) -> str:
    head = ("", "value", "", "spread", "peer", "ratio", "limit", "achieved")
    rows = [head] + [_format_row(name, result) for name, result in results.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(_format_line(row, widths) for row in rows)


def _format_line(row: tuple[str, ...], widths: list[int]) -> str:
    left = (0, 2)  # names and units are left-aligned, numbers right-aligned
    cells = [cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
    return "  ".join(cells).rstrip()


def _format_row(name: str, result: BenchResult) -> tuple[str, ...]:
    def format_number(x: float | None) -> str:
        return "" if x is None else f"{round_significant(x, 4):,}"

    spread = "" if result.spread is None else f"{format_number(result.spread[0])}..{format_number(result.spread[1])}"
    ratio = "" if result.peer_ratio is None else f"{result.peer_ratio:.2f}x"
    achieved = "" if result.limit_share is None else f"{result.limit_share:.0%}"
    return (
        name,
        format_number(result.value),
        result.unit,
        spread,
        format_number(result.peer),
        ratio,
        format_number(result.limit),
        achieved,
    )


def round_significant(value: float, num_digits: int = 5) -> float:
    """Round to `num_digits` significant digits."""
    short = float(f"{value:.{num_digits}g}")
    return int(short) if short.is_integer() else short


def current_command() -> str:
    """Return the command line of this process as a user would type it."""
    name, *arguments = sys.argv
    parts = Path(name).with_suffix("").parts
    module = ".".join(parts[len(parts) - parts[::-1].index("emberline") - 1 :]) if "emberline" in parts else ""
    if module.startswith("emberline.bench."):
        start = ["python", "-m", module.removesuffix(".__main__")]
    else:
        start = ["emberline" if Path(name).stem in ("emberline", "__main__") else Path(name).name]
    return shlex.join([*start, *arguments])
