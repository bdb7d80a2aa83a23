"""`python -m emberline.bench.gpu`: kernels, engine, open loop and cold start on one GPU, beside limits and peers."""

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
from emberline.bench.report import Report, Result

KERNELS = ("linear", "decode", "prefill", "elementwise", "sample")
DEADLINE = 460.0  # seconds for everything
WHATS = ("engine", "open", "cold", "handoff", "kernels", "all")
PEERS_FIGURES = "vLLM 0.24.0 on the same machine, measured once; those of kernels are measured in this run"


class Live(Report):
    """A report that also writes every figure down as it comes: what a part measured before it died is not lost."""

    def __init__(self, bench: str, lines: Path) -> None:
        super().__init__(bench)
        self._lines = lines

    def add(self, name: str, values: float | list[float], unit: str, **more: Any) -> None:
        super().add(name, values, unit, **more)
        result = self.results[name]
        print(f"  {name} {result.value:,.4g} {unit}", file=sys.stderr, flush=True)
        self._write({"name": name, "result": asdict(result)})

    def close(self) -> None:
        self._write({"config": self.config})

    def _write(self, message: dict[str, Any]) -> None:
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(message, default=str) + "\n")


@dataclass(frozen=True, slots=True)
class Part:
    """What runs in a process of its own, so that its memory, its crash or its hanging is its own."""

    name: str
    limit: float  # seconds
    measure: Callable[[Report], None]


def parts(args: argparse.Namespace) -> list[Part]:
    """Those asked for, the most telling first."""
    from emberline.bench.gpu import cold, engine, openloop, peers, sampled

    only, given = args.only, dict(args.set)
    rates, seconds, rounds = args.rates, args.seconds, args.rounds
    found: list[Part] = []
    if args.what in ("engine", "all") and any(engine.wanted(name, only) for name in (*engine.NAMES, *sampled.NAMES)):
        work = partial(engine.measure, only=only, settings=given, rounds=rounds)
        found.append(Part("engine", 150.0 + 50.0 * (rounds or engine.ROUNDS), work))
    if args.what in ("open", "all") and any(engine.wanted(name, only) for name in openloop.names(rates)):
        flow = partial(openloop.measure, only=only, settings=given, rates=rates, seconds=seconds)
        found.append(Part("open", 60.0 + len(rates) * (seconds + 2 * openloop.TAIL), flow))
    if args.what in ("cold", "all") and engine.wanted("cold", only):
        start = partial(cold.measure, directory=args.checkpoint, settings=given, rounds=rounds)
        found.append(Part("cold", 90.0 + cold.WRITE_SECONDS + 60.0 * (rounds or cold.ROUNDS), start))
    if args.what == "handoff":  # takes two processes, and so is no part of all
        from emberline.bench.gpu import handoff

        found.append(Part("handoff", 180.0, partial(handoff.measure, rounds=rounds)))
    if args.what in ("kernels", "all"):
        found += [Part(f"kernels.{name}", 100.0, _kernel(name)) for name in KERNELS if not only or name in only]
    for who in args.peers:
        peer = partial(peers.measure, who=who, only=only, rounds=rounds, rates=rates, seconds=seconds)
        found.append(Part(f"peers.{who}", 400.0, peer))
    return found


def _kernel(name: str) -> Callable[[Report], None]:
    module = f"emberline.bench.gpu.{name}"

    def measure(report: Report) -> None:
        if find_spec(module) is None:
            report.config["skipped"] = {name: "there is no such bench yet"}
            return
        import_module(module).measure(report)

    return measure


def run_here(part: Part, lines: Path) -> None:
    """In the child. Figures go to `lines`; so does why it failed, if it did."""
    from emberline.bench.gpu.engine import attempt

    report = Live(part.name, lines)
    attempt(report, part.name, partial(part.measure, report))
    if "torch" in sys.modules:
        report.config["gpu"] = _gpu()
    report.close()


def _gpu() -> dict[str, Any]:
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
    except RuntimeError as error:  # after a fault in a kernel nothing answers
        return {"error": str(error)[:200]}


def run_apart(part: Part, command: list[str], report: Report, seconds: float) -> None:
    """Runs a part as a child that may take so long, and takes over what it wrote down, however it ended."""
    print(f"{part.name}: at most {seconds:.0f} s", file=sys.stderr, flush=True)
    with TemporaryDirectory() as directory:
        lines = Path(directory) / "lines"
        why = _watch([*command, "--part", part.name, "--lines", str(lines)], seconds)
        config = take(lines, report)
    failed: dict[str, str] = dict(config.get("failed", {}))
    if why:
        failed[part.name] = why
    config.pop("failed", None)
    report.config.setdefault("parts", {})[part.name] = config
    report.config["failed"] |= failed


def _watch(command: list[str], seconds: float) -> str:
    """Why the command did not end well, or nothing. Its output is not ours: the last line of that is the result."""
    with subprocess.Popen(command, stdout=sys.stderr, start_new_session=True) as child:
        try:
            code = child.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # its own session: it, and what it started
            return f"did not end within {seconds:.0f} s"
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    return f"ended with {code}" if code else ""


def take(lines: Path, report: Report) -> dict[str, Any]:
    """The figures that a child wrote down, into the report; and its config, if it came so far."""
    config: dict[str, Any] = {}
    for line in lines.read_text("utf-8").splitlines() if lines.exists() else ():
        try:
            message = json.loads(line)
        except ValueError:  # it was killed while it wrote
            continue
        if "config" in message:
            config = message["config"]
        else:
            report.results[message["name"]] = Result(**message["result"])
    return config


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _arguments() -> argparse.ArgumentParser:
    from emberline.bench.gpu import openloop

    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    def rates(text: str) -> list[float]:
        return [float(rate) for rate in names(text)]

    parser = argparse.ArgumentParser(prog="python -m emberline.bench.gpu", description=__doc__)
    parser.add_argument("what", nargs="?", choices=WHATS, default="all")
    reports.add_arguments(parser)
    parser.add_argument("--only", type=names, default=[], metavar="NAMES", help="such as decode_b1,prefill_*,linear")
    parser.add_argument("--rounds", type=int, default=0, help="of each measurement; 0: as each thinks best")
    parser.add_argument("--rates", type=rates, default=list(openloop.RATES), help="requests a second, open loop")
    parser.add_argument("--seconds", type=float, default=openloop.SECONDS, help="of arrivals at each rate")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="of the cold start; written if absent")
    parser.add_argument("--peers", type=names, default=[], help="vllm,transformers: measured too, where installed")
    parser.add_argument("--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="of GPUConfig")
    parser.add_argument("--deadline", type=float, default=DEADLINE, help="seconds for everything")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    args = _arguments().parse_args()
    chosen = parts(args)
    if args.part:
        run_here(next(part for part in chosen if part.name == args.part), args.lines)
        return
    until = time.monotonic() + args.deadline
    report = Report(f"gpu-{args.what}", {"peers": PEERS_FIGURES, "failed": {}})
    command = [sys.executable, "-m", "emberline.bench.gpu", *sys.argv[1:]]
    for part in chosen:
        left = until - time.monotonic()
        if left < 5.0:
            report.config["failed"][part.name] = "no time was left for it"
            continue
        run_apart(part, command, report, min(part.limit, left))
    report.emit(args.json, args.commit)
    for name, why in report.config["failed"].items():
        print(f"failed: {name}: {why}", file=sys.stderr)
    sys.exit(1 if report.config["failed"] else 0)


if __name__ == "__main__":
    main()
