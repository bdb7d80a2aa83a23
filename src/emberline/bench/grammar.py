"""Compares two libraries for constrained decoding, llguidance and xgrammar.

It measures the time to compile each grammar and the time per token, and tests how the libraries handle hostile input.

python -m emberline.bench.grammar --json benchmarks/results/grammar-choice.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from emberline.bench import machine
from emberline.bench import report as reports
from emberline.bench.grammar_cases import HOSTILE, ORDINARY, GrammarCase
from emberline.bench.grammar_child import DEADLINE_S

LIBRARIES = ("llguidance", "xgrammar")


class GrammarLibraryProcess:
    """A child process that runs one grammar library.

    It is restarted after a case in which the library hung or crashed.
    """

    def __init__(self, library: str, tokenizer: Path) -> None:
        self.command = [sys.executable, "-m", "emberline.bench.grammar_child", library, str(tokenizer)]
        self.start_process()

    def start_process(self) -> None:
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        self.ready: dict[str, Any] = json.loads(self.process.stdout.readline())

    def run_case(self, case: GrammarCase) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        question = {"kind": case.grammar.kind, "text": case.grammar.text, "sample": case.sample}
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        if line := self.process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            return answer
        how = "hung" if self.process.wait() == -signal.SIGPROF else "crashed"
        self.start_process()
        return {how: True}

    def stop_process(self) -> None:
        self.process.kill()
        self.process.wait()


def describe_outcome(result: dict[str, Any]) -> str:
    """Return the outcome of a hostile case: hung, crashed, slow, refused or compiled.

    `slow` means that the library took more than one second.
    """
    for bad in ("hung", "crashed"):
        if bad in result:
            return bad
    seconds = result.get("seconds", result.get("compile_s", 0.0) + max(result.get("fills", [0.0])))
    if seconds > 1.0:
        return "slow"
    return "refused" if "error" in result else "compiled"


def percentile(values: list[float], fraction: float) -> float:
    return sorted(values)[min(len(values) - 1, int(fraction * len(values)))]


def measure_library(library: str, tokenizer: Path) -> dict[str, Any]:
    child = GrammarLibraryProcess(library, tokenizer)
    ready = child.ready
    ordinary = {case.name: child.run_case(case) for case in ORDINARY}
    hostile = {case.name: child.run_case(case) for case in HOSTILE}
    child.stop_process()
    return {"ready": ready, "ordinary": ordinary, "hostile": hostile}


def compute_figures(library: str, results: dict[str, Any]) -> dict[str, tuple[float, str]]:
    ordinary = [a for a in results["ordinary"].values() if "compile_s" in a]
    compiles = [a["compile_s"] * 1e3 for a in ordinary]
    fills = [f * 1e6 for a in ordinary for f in a["fills"]]
    endings = [describe_outcome(a) for a in results["hostile"].values()]
    wrong = sum("compile_s" not in a or "refused_at" in a for a in results["ordinary"].values())
    return {
        "import": (results["ready"]["import_s"] * 1e3, "ms"),
        "tokenizer": (results["ready"]["tokenizer_s"] * 1e3, "ms"),
        "memory_start": (results["ready"]["rss_mb"], "MB"),
        "memory_after_ordinary": (max(a.get("rss_mb", 0.0) for a in results["ordinary"].values()), "MB"),
        "compile_p50": (percentile(compiles, 0.5), "ms"),
        "compile_max": (max(compiles), "ms"),
        "mask_p50": (percentile(fills, 0.5), "us"),
        "mask_p99": (percentile(fills, 0.99), "us"),
        "mask_max": (max(fills), "us"),
        "masks": (len(fills), "tokens"),
        "ordinary_failed": (wrong, "cases"),
        **{
            f"hostile_{how}": (endings.count(how), "cases")
            for how in ("refused", "compiled", "slow", "crashed", "hung")
        },
    }


def describe_hardware() -> dict[str, Any]:
    load = os.getloadavg()[0]
    return {"machine": platform.machine(), "cores": os.cpu_count(), "system": platform.platform(), "load_at_end": load}


def make_report(results_by_library: dict[str, Any], model: str, stated_commit: str | None) -> dict[str, Any]:
    table = {library: compute_figures(library, results_by_library[library]) for library in LIBRARIES}
    chosen, peer = LIBRARIES
    results = {
        name: {"value": round(value, 3), "unit": unit, "peer": round(table[peer][name][0], 3)}
        for name, (value, unit) in table[chosen].items()
    }
    detail = {
        case.name: {
            library: describe_outcome(results_by_library[library]["hostile"][case.name]) for library in LIBRARIES
        }
        for case in HOSTILE
    }
    failed = {
        library: {
            n: a
            for n, a in results_by_library[library]["ordinary"].items()
            if "compile_s" not in a or "refused_at" in a
        }
        for library in LIBRARIES
    }
    return {
        "bench": "grammar-choice",
        "command": "python -m emberline.bench.grammar",
        "commit": machine.describe_commit(stated_commit),
        "hardware": describe_hardware(),
        "software": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        "config": {
            "model": model,
            "value_is": chosen,
            "peer_is": peer,
            "clock": "CPU time of one thread",
            "deadline_s": DEADLINE_S,
            "hostile": detail,
            "failed": failed,
        },
        "results": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    reports.add_report_arguments(parser)
    args = parser.parse_args()
    from emberline.hub.source import resolve_model

    tokenizer = resolve_model(args.model) / "tokenizer.json"
    done = make_report({library: measure_library(library, tokenizer) for library in LIBRARIES}, args.model, args.commit)
    print(f"{'':24}{LIBRARIES[0]:>14}{LIBRARIES[1]:>14}")
    for name, row in done["results"].items():
        print(f"{name:24}{row['value']:>14}{row['peer']:>14} {row['unit']}")
    for name, endings in done["config"]["hostile"].items():
        print(f"{name:34}" + "".join(f"{how:>12}" for how in endings.values()))
    line = json.dumps(done)
    print(line)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(done, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
