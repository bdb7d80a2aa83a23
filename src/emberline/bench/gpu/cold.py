"""A cold start: a fresh process, a checkpoint that is on the disk and nowhere else, and the time to its first token.
Nothing here imports torch, so that the child pays for it where a real start does."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

from emberline.bench.report import Report
from emberline.core.config import GPUConfig, cache_dir
from emberline.core.errors import EmberlineError
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine

ROUNDS = 1
DISK = 4.1e9  # bytes a second: one stream of direct reads, measured
VLLM_READY = 86.0  # vLLM 0.24.0 on the same machine, and its weights were not even read
WRITE_SECONDS, START_SECONDS = 90.0, 60.0  # at most
READ_SHARE = 0.9  # of the checkpoint must have come from the disk, or it was not cold
PROMPT = list(range(1, 17))
SETTINGS: dict[str, Any] = {"max_running": 256, "max_batch_tokens": 8192, "max_context": 8192}
RULES = (
    "the first start is a rehearsal, in which kernels may be compiled; before cold_ready all page caches are dropped "
    "if the system allows, before cold_ready_libraries_cached only the checkpoint"
)


def default_directory() -> Path:
    return cache_dir() / "bench" / "llama-8b"


def measure(
    report: Report, directory: Path | None = None, settings: dict[str, Any] | None = None, rounds: int = 0
) -> None:
    directory = directory or default_directory()
    chosen = SETTINGS | (settings or {})
    if not (directory / "model.safetensors.index.json").exists():
        began = time.monotonic()
        _child("write", directory, {}, WRITE_SECONDS)
        report.config["write_s"] = time.monotonic() - began
    size = sum(file.stat().st_size for file in _shards(directory))
    starts = {"rehearsal": [_start(directory, chosen, size)], "ready": [], "ready_libraries_cached": []}
    for _ in range(rounds or ROUNDS):
        starts["ready"].append(_start(directory, chosen, size))
        starts["ready_libraries_cached"].append(_start(directory, chosen, size, everything=False))
    report.config |= {"settings": chosen, "rules": RULES, "bytes": size, "starts": starts}
    warm = [start for group in starts.values() for start in group if not start["cold"]]
    prefix = "cached" if warm else "cold"
    for name, group in starts.items():
        seconds = [start["ready"] for start in group]
        report.add(f"{prefix}_{name}_s", seconds, "s", peer=VLLM_READY, limit=size / DISK)
    for phase in starts["ready"][0]["seconds"]:
        report.add(f"{prefix}_{phase}_s", [start["seconds"][phase] for start in starts["ready"]], "s")
    if warm:
        raise EmberlineError(f"of {size} bytes only {warm[0]['read_bytes']} were read from the disk: it was cached")


def _start(directory: Path, settings: dict[str, Any], size: int, everything: bool = True) -> dict[str, Any]:
    dropped = drop(directory, everything)
    before = time.monotonic()  # the clock is one for all processes
    said = _child("start", directory, settings, START_SECONDS)
    said["ready"] -= before
    said["seconds"] = {"python": said.pop("entered") - before} | said["seconds"]
    return said | {"cold": said["read_bytes"] >= READ_SHARE * size, "dropped_all_caches": dropped}


def drop(directory: Path, everything: bool) -> bool:
    """The checkpoint out of the page cache, or all files: the libraries too. Whether all were."""
    for file in _shards(directory):
        with file.open("rb") as f:
            os.fsync(f.fileno())  # dirty pages stay
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if not everything:
        return False
    with contextlib.suppress(OSError):  # only root may
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n", "ascii")
        return True
    return False


def _shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def _child(what: str, directory: Path, settings: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Runs this module; what it says last, on a line of its own."""
    command = [sys.executable, "-m", "emberline.bench.gpu.cold", what, str(directory), json.dumps(settings)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as e:
        raise EmberlineError(f"{what} took longer than {seconds:.0f} s") from e
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise EmberlineError(f"{what} ended with {done.returncode} and said {done.stdout[-200:]!r}")
    said: dict[str, Any] = json.loads(lines[-1])
    return said


def write(directory: Path) -> dict[str, Any]:
    from emberline.bench.gpu.model import write_checkpoint

    write_checkpoint(directory)
    return {}


def start(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Loads and generates one token, by the path a server takes."""
    entered = time.monotonic()
    from emberline.hub.checkpoint import Checkpoint
    from emberline.models.reader import Reader, files_of

    reader = Reader.start(files_of(Checkpoint.open(directory)))  # from here as engine/process.py does it
    sys.modules["torch._meta_registrations"] = types.ModuleType("torch._meta_registrations")
    from emberline.engine.gpu.boot import boot_from

    imported = time.monotonic()
    booted = boot_from(directory, GPUConfig(**settings), reader=reader)
    up = time.monotonic()
    _first_token(booted.engine)
    ready = time.monotonic()
    phases = {f"boot_{name}": seconds for name, seconds in booted.seconds.items()}
    seconds = {"import": imported - entered, "boot": up - imported, **phases, "first_token": ready - up}
    return {"entered": entered, "ready": ready, "seconds": seconds, "read_bytes": read_bytes()}


def _first_token(engine: Engine) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    engine.add(Submission("first", PROMPT, params))
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        for output in engine.step():
            if output.error is not None:
                raise EmberlineError(output.error)
            if output.tokens:
                return
    raise EmberlineError("no token came")


def read_bytes() -> int:
    """What this process had fetched from storage, direct or through the page cache."""
    with contextlib.suppress(OSError):
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text("ascii").splitlines())
        return int(fields["read_bytes"])
    return 0


if __name__ == "__main__":
    action, where, given = sys.argv[1:]
    result = write(Path(where)) if action == "write" else start(Path(where), json.loads(given))
    print(json.dumps(result), flush=True)
