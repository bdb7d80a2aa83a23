"""A cold start: a fresh process, a checkpoint that is on the disk and nowhere else, and the time to its first token.
Nothing here imports torch, so that the child pays for it where a real start does."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import resource
import subprocess
import sys
import time
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
WRITE_SECONDS, START_SECONDS, IMPORT_SECONDS = 180.0, 60.0, 30.0  # at most; a checkpoint and its packed copy
READ_SHARE = 0.9  # of the checkpoint must have come from the disk, or it was not cold
PROMPT = list(range(1, 17))
IMPORTS = {
    "torch": "torch",
    "triton": "triton",
    "kernels": "emberline.kernels.gpu",
    "rest": "emberline.engine.gpu.boot",
}
SETTINGS: dict[str, Any] = {"max_running": 256, "max_batch_tokens": 8192, "max_context": 8192}
RULES = (
    "the first start is a rehearsal, in which kernels may be compiled and the files a start needs are noted; "
    "before cold_ready all page caches are dropped if the system allows, "
    "before cold_ready_libraries_cached only the checkpoint; cold_import_alone is torch's import while nothing else "
    "happens, all caches dropped, and cold_import_noted the same once the noted files were read; names with packed are "
    "of a checkpoint whose files are packed"
)


def default_directory() -> Path:
    return cache_dir() / "bench" / "llama-8b"


def packed_beside(directory: Path) -> Path:
    return directory.with_name(directory.name + "-packed")


def measure(
    report: Report, directory: Path | None = None, settings: dict[str, Any] | None = None, rounds: int = 0
) -> None:
    chosen = SETTINGS | (settings or {})
    packed = chosen.get("weights") == "packed"  # its files too
    directory = _written(report, directory or default_directory(), packed)
    size = sum(file.stat().st_size for file in _shards(directory))
    starts = {"rehearsal": [_start(directory, chosen, size)], "ready": [], "ready_libraries_cached": []}
    imports = {"alone": _import(directory, noted=False), "noted": _import(directory, noted=True)}
    for _ in range(rounds or ROUNDS):
        starts["ready"].append(_start(directory, chosen, size))
        starts["ready_libraries_cached"].append(_start(directory, chosen, size, everything=False))
    report.config |= {"settings": chosen, "rules": RULES, "bytes": size, "starts": starts, "imports": imports}
    warm = [start for group in starts.values() for start in group if not start["cold"]]
    prefix = ("cached" if warm else "cold") + {"packed": "_packed", "both": "_both"}.get(chosen.get("weights", ""), "")
    for name, group in starts.items():
        seconds = [start["ready"] for start in group]
        report.add(f"{prefix}_{name}_s", seconds, "s", peer=VLLM_READY, limit=size / DISK)
    for phase in starts["ready"][0]["seconds"]:
        report.add(f"{prefix}_{phase}_s", [start["seconds"][phase] for start in starts["ready"]], "s")
    for name, said in imports.items():
        if said["dropped_all_caches"]:
            report.add(f"cold_import_{name}_s", [said["ready"] - said["entered"]], "s")
    if warm:
        raise EmberlineError(f"of {size} bytes only {warm[0]['read_bytes']} were read from the disk: it was cached")


def _written(report: Report, directory: Path, packed: bool) -> Path:
    """Where the checkpoint is, written if it is not there; the packed one is beside it."""
    until = time.monotonic() + WRITE_SECONDS
    target = packed_beside(directory) if packed else directory
    for action, made in (("write", directory), ("pack", target)):
        if not any((whole / "model.safetensors.index.json").exists() for whole in (made, target)):
            began = time.monotonic()
            said = _child(action, directory, {}, until - began)
            report.config |= {f"{action}_s": time.monotonic() - began, **said}
    return target


def _start(directory: Path, settings: dict[str, Any], size: int, everything: bool = True) -> dict[str, Any]:
    dropped = drop(directory, everything)
    before = time.monotonic()  # the clock is one for all processes
    said = _child("start", directory, settings, START_SECONDS)
    said["ready"] -= before
    said["seconds"] = {"python": said.pop("entered") - before} | said["seconds"]
    return said | {"cold": said["read_bytes"] >= READ_SHARE * size, "dropped_all_caches": dropped}


def _import(directory: Path, *, noted: bool) -> dict[str, Any]:
    dropped = drop(directory, everything=True)
    return _child("import", directory, {"noted": noted}, IMPORT_SECONDS) | {"dropped_all_caches": dropped}


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


def pack(directory: Path) -> dict[str, Any]:
    from emberline.bench.gpu.model import pack_checkpoint

    return {"codec": pack_checkpoint(directory, packed_beside(directory))}


def import_torch(noted: bool) -> dict[str, Any]:
    """With no reader. How much of it came from the disk says what the note misses."""
    from emberline.engine import early
    from emberline.models.reader import Reader

    began = time.monotonic()
    first = early.first() if noted else []
    with Reader.start([], first=first) as reader:
        reader.wait_first(early.WAIT)
    before, entered = usage(), time.monotonic()
    early.without_tracing()
    importlib.import_module("torch")
    ready = time.monotonic()
    spent = {name: count - before[name] for name, count in usage().items()}
    known = early.noted()
    return {
        "entered": entered,
        "ready": ready,
        "first_files": entered - began,
        "first_files_read_bytes": before["read_bytes"],
        "not_noted": sorted(set(early.touched()) - set(known)),
        **spent,
    }


def start(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Loads and generates one token, by the path a server takes: engine/process.py."""
    marks = [("", time.monotonic())]

    def done(phase: str) -> None:
        marks.append((phase, time.monotonic()))

    from emberline.engine import early

    reader = early.begin(directory)
    early.without_tracing()
    done("first_files")
    before = usage()
    for phase, module in IMPORTS.items():
        importlib.import_module(module)
        done(f"import_{phase}")
    from emberline.engine.gpu.boot import boot_from

    read_by_then = reader.stats
    imported = {f"import_{name}": count - before[name] for name, count in usage().items()}
    booted = boot_from(directory, GPUConfig(**settings), reader=reader)
    done("boot")
    _generate(booted.engine, 1)
    done("first_token")
    _generate(booted.engine, 2)
    done("second_request")  # whose second token comes of a captured step
    seconds = {phase: at - before for (_, before), (phase, at) in itertools.pairwise(marks)}
    seconds |= {f"boot_{name}": spent for name, spent in booted.seconds.items()}
    early.remember()
    return {
        "entered": marks[0][1],
        "ready": dict(marks)["first_token"],
        "seconds": seconds,
        "reader": type(reader).__name__,
        **imported,
        "read_bytes": usage()["read_bytes"],
        "read_when_imported": read_by_then.bytes,
        "read_seconds": reader.stats.seconds,
        "read_rate": reader.stats.rate,
        "read_first": sum(end - begin for spans in early.noted().values() for begin, end in spans),
    }


def _generate(engine: Engine, count: int) -> None:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    engine.add(Submission(f"{count} tokens", PROMPT, params))
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        for output in engine.step():
            if output.error is not None:
                raise EmberlineError(output.error)
            count -= len(output.tokens)
            if count <= 0:
                return
    raise EmberlineError("no token came")


def usage() -> dict[str, int]:
    """What this process had fetched from storage, direct or through the page cache, and how often a page it touched
    was not there. Processes it started count once they have ended."""
    used = {"read_bytes": 0, "major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt}
    with contextlib.suppress(OSError):
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text("ascii").splitlines())
        used["read_bytes"] = int(fields["read_bytes"])
    return used


def main(action: str, where: Path, settings: dict[str, Any]) -> dict[str, Any]:
    if action in ("write", "pack"):
        return write(where) if action == "write" else pack(where)
    if action == "import":
        return import_torch(**settings)
    return start(where, settings)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))), flush=True)
