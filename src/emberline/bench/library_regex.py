"""Our regular expression engine, which the gateway's routes use, compared with google-re2.

It measures the CPU time of a search, and the CPU time and memory of the import.

pip install google-re2==1.1.20251105
python -m emberline.bench.library_regex --json benchmarks/results/library-regex.json

The gateway's guardrails use Python's `re` instead. The report also counts how many guardrail patterns RE2 rejects.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median

from emberline.bench import report as reports
from emberline.bench.report import BenchReport
from emberline.gateway.guardrails import patterns as guardrail_patterns
from emberline.gateway.routes.pattern_parser import parse_pattern

Search = Callable[[str], bool]

PROSE = "Please summarise the attached report about the harbour of Rotterdam and its trade in the last year. "
TEXTS = {"1KB": (PROSE * 11)[:1024], "16KB": (PROSE * 170)[:16_384]}  # routes search the first 16,384 characters
PATTERNS = {  # name -> pattern, none of which the texts contain
    "words": "(?i)refund|invoice|chargeback",
    "mail": r"[a-z0-9.]+@[a-z0-9]+\.com",
    "hostile": "(e|ee|[a-z]e)*x",  # exponential for a backtracking engine
}
IMPORTS = {"ours": "emberline.gateway.routes.pattern_parser", "re2": "re2"}  # ours includes its packages


def compile_ours(pattern: str) -> Search:
    return parse_pattern(pattern).is_found_in


def compile_re2(pattern: str) -> Search:
    import re2

    compiled = re2.compile(pattern)
    return lambda text: compiled.search(text) is not None


def cpu_us(search: Search, text: str, min_cpu_s: float = 0.02) -> float:
    """Return the CPU time of one search in microseconds."""
    count, started = 0, time.process_time()
    while (passed := time.process_time() - started) < min_cpu_s:
        assert not search(text)
        count += 1
    return 1e6 * passed / count


def import_cost(module: str) -> dict[str, float]:
    """Import a module in a new process. Return the CPU time in seconds and the memory in MB."""
    program = (
        "import json, time\n"
        "def rss(): return int(open('/proc/self/statm').read().split()[1]) * 4096 / 1e6\n"
        f"t, m = time.process_time(), rss()\nimport {module}\n"
        "print(json.dumps({'cpu_s': time.process_time() - t, 'memory_mb': rss() - m}))"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=60, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def count_guardrail_patterns() -> tuple[int, int]:
    """Return how many patterns the guardrails have, and how many of them RE2 rejects."""
    import re2

    options = re2.Options()
    options.log_errors = False
    found = [each for each in vars(guardrail_patterns).values() if isinstance(each, re.Pattern)]
    rejected = 0
    for each in found:
        try:
            re2.compile(each.pattern, options=options)
        except re2.error:
            rejected += 1
    return len(found), rejected


def run(rounds: int) -> BenchReport:
    total, rejected = count_guardrail_patterns()
    config = {
        "rounds": rounds,
        "clock": "CPU time of the process",
        "patterns": PATTERNS,
        "guardrail_patterns": total,
        "guardrail_patterns_that_re2_rejects": rejected,
        "versions": {"google-re2": version("google-re2")},
    }
    report = BenchReport("library-regex", config)
    compilers = {"ours": compile_ours, "re2": compile_re2}
    figures: dict[str, dict[str, list[float]]] = {}

    def note(name: str, library: str, value: float) -> None:
        figures.setdefault(name, {}).setdefault(library, []).append(value)

    for _ in range(rounds):
        for name, pattern in PATTERNS.items():
            for library, compiler in compilers.items():
                search = compiler(pattern)
                for size, text in TEXTS.items():
                    note(f"search_{name}_{size}", library, cpu_us(search, text))
        for library, module in IMPORTS.items():
            cost = import_cost(module)
            note("import", library, cost["cpu_s"] * 1e6)
            note("import_memory", library, cost["memory_mb"])
    for name, values in figures.items():
        report.add(name, values["ours"], "MB" if "memory" in name else "us", peer=median(values["re2"]))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=Path(__file__).stem)
    parser.add_argument("--rounds", type=int, default=5)
    reports.add_report_arguments(parser)
    options = parser.parse_args()
    run(options.rounds).print_and_save(options.json, options.commit)


if __name__ == "__main__":
    main()
