"""`python -m emberline.bench.gpu`: measures kernels, the engine, latencies at a given request rate, and cold starts."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from emberline.bench import report as reports
from emberline.bench.report import BenchReport, BenchResult

KERNEL_BENCHES = ("linear", "narrow", "decode", "prefill", "attention_kinds", "latent", "elementwise", "sample")
DEADLINE_S = 460.0
BENCHES = ("engine", "speculation", "open", "cold", "handoff", "collectives", "kernels", "all")
PEER_FIGURES_NOTE = (
    "vLLM on a machine of the same kind, measured once: 0.24.0 for llama-8b, 0.26.0 for other shapes; those of kernels"
    " are measured in this run"
)


class AppendingReport(BenchReport):
    """A report that also appends every result to a file immediately, so that a crash loses no results."""

    def __init__(self, bench: str, lines: Path) -> None:
        super().__init__(bench)
        self._lines = lines

    def add(self, name: str, values: float | list[float], unit: str, **details: Any) -> None:
        super().add(name, values, unit, **details)
        result = self.results[name]
        print(f"  {name} {result.value:,.4g} {unit}", file=sys.stderr, flush=True)
        self._append_line({"name": name, "result": asdict(result)})

    def close(self) -> None:
        self._append_line({"config": self.config})

    def _append_line(self, message: dict[str, Any]) -> None:
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(message, default=str) + "\n")


@dataclass(frozen=True, slots=True)
class BenchPart:
    """One part of the benchmark.

    It runs in a child process, so that a crash or a hang does not affect the other parts.
    """

    name: str
    timeout: float  # seconds
    measure: Callable[[BenchReport], None]


def select_parts(args: argparse.Namespace) -> list[BenchPart]:
    """Return the parts that the arguments select, the most important first."""
    from emberline.bench.gpu import cold, engine, openloop, peers, sampled_decode

    only, settings = args.only, dict(args.set)
    rates, seconds, rounds = args.rates, args.seconds, args.rounds
    selected: list[BenchPart] = []
    if args.what in ("engine", "all") and any(
        engine.is_measurement_selected(name, only) for name in (*engine.NAMES, *sampled_decode.NAMES)
    ):
        work = partial(engine.measure, name_patterns=only, settings=settings, rounds=rounds)
        selected.append(BenchPart("engine", 150.0 + 50.0 * (rounds or engine.ROUNDS), work))
    if args.what == "speculation":
        from emberline.bench.gpu import speculation

        selected.append(
            BenchPart("speculation", 200.0, partial(speculation.measure, settings=settings, rounds=rounds or 0))
        )
    if args.what in ("open", "all") and any(
        engine.is_measurement_selected(name, only) for name in openloop.measurement_names(rates)
    ):
        flow = partial(openloop.measure, name_patterns=only, settings=settings, rates=rates, duration_s=seconds)
        selected.append(BenchPart("open", 60.0 + len(rates) * (seconds + 2 * openloop.DRAIN_TIMEOUT_S), flow))
    if args.what in ("cold", "all") and engine.is_measurement_selected("cold", only):
        start = partial(cold.measure, directory=args.checkpoint, settings=settings, rounds=rounds)
        selected.append(BenchPart("cold", 90.0 + cold.WRITE_TIMEOUT_S + 60.0 * (rounds or cold.ROUNDS), start))
    if args.what == "handoff":  # needs two processes on the GPU, so it is not part of "all"
        from emberline.bench.gpu import handoff

        selected.append(BenchPart("handoff", 180.0, partial(handoff.measure, rounds=rounds)))
    if args.what == "collectives":  # needs settings of the whole process, so it is not part of "kernels"
        selected.append(BenchPart("collectives", 200.0, _load_kernel_bench("collectives")))
    if args.what in ("kernels", "all"):
        selected += [
            BenchPart(f"kernels.{name}", 100.0, _load_kernel_bench(name))
            for name in KERNEL_BENCHES
            if not only or name in only
        ]
    for name in args.peers:
        peer = partial(
            peers.measure, peer_name=name, name_patterns=only, rounds=rounds, rates=rates, duration_s=seconds
        )
        selected.append(BenchPart(f"peers.{name}", 400.0, peer))
    return selected


def _load_kernel_bench(name: str) -> Callable[[BenchReport], None]:
    module = f"emberline.bench.gpu.{name}"

    def measure(report: BenchReport) -> None:
        if find_spec(module) is None:
            report.config["skipped"] = {name: "no such benchmark"}
            return
        import_module(module).measure(report)

    return measure


def run_part(part: BenchPart, lines_file: Path) -> None:
    """Run one part in this process and write its results, or why it failed, to `lines_file`."""
    from emberline.bench.gpu.engine import run_measurement

    report = AppendingReport(part.name, lines_file)
    run_measurement(report, part.name, partial(part.measure, report))
    if "torch" in sys.modules:
        report.config["gpu"] = _describe_gpu()
    report.close()


def _describe_gpu() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {}
    try:
        facts = torch.cuda.get_device_properties(0)
        triton = import_module("triton").__version__ if find_spec("triton") else "absent"
        return {
            "name": facts.name,
            "processors": facts.multi_processor_count,
            "memory_gib": round(facts.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "triton": triton,
        }
    except RuntimeError as error:  # after a fault in a kernel every CUDA call fails
        return {"error": str(error)[:200]}


def run_part_in_child(part: BenchPart, command: list[str], report: BenchReport, timeout_s: float) -> None:
    """Run one part in a child process with a timeout, and add the results that it wrote to the report.

    Results that the child process wrote before a failure are kept.
    """
    print(f"part started: name={part.name} timeout_s={timeout_s:.0f}", file=sys.stderr, flush=True)
    with TemporaryDirectory() as directory:
        lines = Path(directory) / "lines"
        error = _run_command([*command, "--part", part.name, "--lines", str(lines)], timeout_s)
        config = merge_child_results(lines, report)
    failed: dict[str, str] = dict(config.get("failed", {}))
    if error:
        failed[part.name] = error
    config.pop("failed", None)
    report.config.setdefault("parts", {})[part.name] = config
    report.config["failed"] |= failed


def _run_command(command: list[str], timeout_s: float) -> str:
    """Run the command and return why it failed, or "" if it succeeded.

    Its output goes to stderr, because the last line of our own stdout must be the JSON result.
    """
    with subprocess.Popen(command, stdout=sys.stderr, start_new_session=True) as child:
        try:
            code = child.wait(timeout=max(1.0, timeout_s))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # the child has its own session: kills it and its children
            return f"timed out after {timeout_s:.0f} s"
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    return f"exited with status {code}" if code else ""


def merge_child_results(lines_file: Path, report: BenchReport) -> dict[str, Any]:
    """Add the results in `lines_file` to the report and return the configuration that the child process wrote.

    The configuration is the last line; it is empty if the child process failed before it.
    """
    config: dict[str, Any] = {}
    for line in lines_file.read_text("utf-8").splitlines() if lines_file.exists() else ():
        try:
            message = json.loads(line)
        except ValueError:  # the child was killed during a write
            continue
        if "config" in message:
            config = message["config"]
        else:
            report.results[message["name"]] = BenchResult(**message["result"])
    return config


def parse_setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _argument_parser() -> argparse.ArgumentParser:
    from emberline.bench.gpu import openloop

    def parse_names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    def parse_rates(text: str) -> list[float]:
        return [float(rate) for rate in parse_names(text)]

    parser = argparse.ArgumentParser(prog="python -m emberline.bench.gpu", description=__doc__)
    parser.add_argument("what", nargs="?", choices=BENCHES, default="all")
    reports.add_report_arguments(parser)
    parser.add_argument(
        "--only",
        type=parse_names,
        default=[],
        metavar="NAMES",
        help="measurements to run, such as decode_b1,prefill_*,linear",
    )
    parser.add_argument("--rounds", type=int, default=0, help="rounds of each measurement; 0: its own default")
    parser.add_argument(
        "--rates", type=parse_rates, default=list(openloop.RATES), help="requests per second in the open loop"
    )
    parser.add_argument("--seconds", type=float, default=openloop.LOAD_SECONDS, help="seconds of arrivals at each rate")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="checkpoint of the cold start, written if absent"
    )
    parser.add_argument(
        "--peers", type=parse_names, default=[], help="peers to measure, if installed: vllm,transformers"
    )
    parser.add_argument(
        "--set",
        type=parse_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="setting of the engine; shape=NAME and routing=NAME: the model, as in shapes.py; prefix=NAME: results are"
        " called NAME_b1_ms instead of decode_b1_ms, and so on",
    )
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for all parts together")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    args = _argument_parser().parse_args()
    chosen = select_parts(args)
    if args.part:
        run_part(next(part for part in chosen if part.name == args.part), args.lines)
        return
    deadline = time.monotonic() + args.deadline
    report = BenchReport(f"gpu-{args.what}", {"peers": PEER_FIGURES_NOTE, "failed": {}})
    command = [sys.executable, "-m", "emberline.bench.gpu", *sys.argv[1:]]
    for part in chosen:
        left = deadline - time.monotonic()
        if left < 5.0:
            report.config["failed"][part.name] = "skipped: the deadline was reached"
            continue
        run_part_in_child(part, command, report, min(part.timeout, left))
    report.print_and_save(args.json, args.commit)
    for name, reason in report.config["failed"].items():
        print(f"measurement failed: name={name} reason={reason}", file=sys.stderr)
    sys.exit(1 if report.config["failed"] else 0)


if __name__ == "__main__":
    main()
