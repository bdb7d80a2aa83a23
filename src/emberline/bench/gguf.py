"""`emberline bench gguf`: compares a GGUF model on the CPU with llama.cpp, built for this machine, on the same file.

It measures the speed in alternating rounds, the memory of the weights, the time from start to ready, and the errors of
both engines' logits compared with those of dequantised weights in float32.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from emberline.bench import start, workload
from emberline.bench.bench_task import BenchTask
from emberline.bench.contender import ContenderFailed, ContenderProcess
from emberline.bench.contenders import BenchEnvironment, make_emberline_spec, make_peer_spec
from emberline.bench.cpu import WARM_UP, CPUBenchSettings, MeasuredContender, run_round
from emberline.bench.report import BenchReport
from emberline.core.config import cache_dir
from emberline.core.cpus import core_count
from emberline.core.errors import EmberlineError, InvalidRequest
from emberline.core.jsonfile import read_object
from emberline.hub.builtin_models import KNOWN_MODELS
from emberline.hub.pull import pull_gguf
from emberline.hub.source import resolve_model
from emberline.models.config import ModelConfig
from emberline.tokens.tokenizer import Tokenizer

TASKS = ("decode_1", "decode_8", "decode_16", "prefill_512")
PEER = "llamacpp-native-q4_1"  # runs the file as it is, whatever its type
CHILD_TIMEOUT_S = 600.0
TEXTS = (
    "The history of the city begins with a small settlement on the banks of the river, where traders from the coast"
    " met farmers of the valley. In the second century its inhabitants built a wall of stone and a bridge.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\nprint(",
    "Water boils at 100 degrees Celsius at sea level. On a mountain the pressure of the air is lower, and so",
    "Question: What is the sum of 17 and 25?\nAnswer: The sum is 42.\nQuestion: What is the capital of Germany?\n",
)


def bench(model: str, settings: CPUBenchSettings, start_rounds: int, peers_dir: Path) -> BenchReport:
    """Measure everything and return the report. Raises EmberlineError if llama.cpp is not installed."""
    file = _find_file(model)
    environment = BenchEnvironment(resolve_model(model), file, settings.threads or core_count(), peers_dir)
    config = {"model": model, "file": file.name, "file_bytes": file.stat().st_size, "threads": environment.threads}
    report = BenchReport("gguf", {**config, "rounds": settings.rounds})
    _measure_speed(report, environment, settings)
    _measure_memory(report, environment, file)
    _measure_errors(report, environment, file)
    started = start.bench(model, start_rounds, peers_dir).results
    report.results["gguf_ready_s"] = started.pop("ready")
    report.results |= {f"gguf_{name}": result for name, result in started.items()}
    return report


def _find_file(model: str) -> Path:
    if model in KNOWN_MODELS and KNOWN_MODELS[model].is_gguf:
        return pull_gguf(model, cache_dir())
    if not model.endswith(".gguf"):
        raise InvalidRequest(f"model {model!r} is not a GGUF file", param="model", hint="give the path of a .gguf file")
    return Path(model)


def _measure_speed(report: BenchReport, environment: BenchEnvironment, settings: CPUBenchSettings) -> None:
    vocab = ModelConfig.from_hf(read_object(environment.model / "config.json")).vocab
    tasks = [BenchTask.from_name(name, vocab) for name in TASKS]
    with ExitStack() as stack:
        entries: list[MeasuredContender] = []
        for spec in (make_emberline_spec(environment), make_peer_spec(PEER, environment)):
            contender = ContenderProcess(spec, environment.peers_dir / "logs" / f"{spec.name}.log")
            stack.callback(contender.stop)
            contender.run_job(workload.make_job([WARM_UP], vocab), timeout_s=CHILD_TIMEOUT_S)
            entries.append(MeasuredContender(contender))
        for task in tasks:
            for turn in range(settings.rounds):
                for entry in entries:
                    run_round(entry, task, turn, settings)
    for task in tasks:
        ours, theirs = (entry.token_rates(task) for entry in entries)
        if not ours or not theirs:
            raise ContenderFailed(f"no result of {task.name}: {[entry.failed for entry in entries]}")
        report.add(task.name, ours, "tok/s", peer=median(theirs))
        report.add(f"{task.name}/llamacpp", theirs, "tok/s")
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=False)]
        report.add(f"gguf_{task.name}_ratio", ratios, "x")
    report.add("noise", [noise for entry in entries for noise in entry.noise], "cores")
    report.config["contenders"] = {entry.name: entry.contender.facts for entry in entries}


def _measure_memory(report: BenchReport, environment: BenchEnvironment, file: Path) -> None:
    found = json.loads(_run_child(environment, dtype="auto"))
    report.add("weights", found["weight_bytes"] / 1e6, "MB")
    report.add("resident_growth", found["resident_bytes"] / 1e6, "MB")
    report.add("gguf_memory_ratio", found["resident_bytes"] / file.stat().st_size, "x")


def _measure_errors(report: BenchReport, environment: BenchEnvironment, file: Path) -> None:
    """Add the relative errors of the logits of all tokens.

    An error is the norm of the difference to the float32 logits, divided by the norm of the float32 logits."""
    tokenizer = Tokenizer.load(environment.model)
    sequences = [tokenizer.encode(text) for text in TEXTS]
    with tempfile.TemporaryDirectory() as folder:
        outs = {name: str(Path(folder) / f"{name}.npz") for name in ("auto", "float32", "llamacpp")}
        for dtype in ("auto", "float32"):
            _run_child(environment, dtype=dtype, sequences=sequences, out=outs[dtype])
        settings = {"model": str(file), "threads": environment.threads, "sequences": sequences}
        script = Path(__file__).parent / "peers" / "llamacpp_logits.py"
        python = environment.peer_python_path("llamacpp-native")
        _run_command([str(python), str(script), json.dumps({**settings, "out": outs["llamacpp"]})])
        logits = {name: _read_logits(Path(out)) for name, out in outs.items()}
    exact = logits.pop("float32")
    errors = {name: float(np.linalg.norm(found - exact) / np.linalg.norm(exact)) for name, found in logits.items()}
    report.add("gguf_logit_error", errors["auto"], "", peer=errors["llamacpp"], limit=2 * errors["llamacpp"])
    report.add("gguf_logit_error/llamacpp", errors["llamacpp"], "")
    report.add("gguf_logit_error_ratio", errors["auto"] / errors["llamacpp"], "x")


def _read_logits(path: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    with np.load(path) as arrays:
        return np.concatenate([arrays[name] for name in arrays.files])


def _run_child(environment: BenchEnvironment, **settings: object) -> str:
    request = {"model": str(environment.model), "threads": environment.threads, **settings}
    return _run_command([sys.executable, "-m", "emberline.bench.gguf_child", json.dumps(request)])


def _run_command(command: list[str]) -> str:
    """Return what a command prints. Raises EmberlineError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False)
    if done.returncode:
        raise EmberlineError(f"{command[:3]} failed with status {done.returncode}: {done.stderr[-500:]}")
    return done.stdout
