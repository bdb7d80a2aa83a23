"""Measures a cold start: the time from starting a process to its first token, with the checkpoint only on disk.

This module imports torch only inside functions, because a real start also has to import torch, and the child process
measures that time.
"""

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

from emberline.bench.report import BenchReport
from emberline.core.config import cache_dir
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine

ROUNDS = 1
DISK_BYTES_PER_SECOND = 4.1e9  # one stream of direct reads, measured
VLLM_READY_S = 86.0  # vLLM 0.24.0 on the same machine, without reading any weights
WRITE_TIMEOUT_S, START_TIMEOUT_S, IMPORT_TIMEOUT_S = 180.0, 60.0, 30.0  # the first: a checkpoint and its packed copy
MIN_READ_SHARE = 0.9  # share of the checkpoint that must come from the disk for a start to count as cold
PROMPT = list(range(1, 17))
IMPORTS = {
    "torch": "torch",
    "triton": "triton",
    "kernels": "emberline.kernels.cuda.hopper_backend",
    "rest": "emberline.engine.gpu.boot",
}
SETTINGS: dict[str, Any] = {"max_running": 256, "max_batch_tokens": 8192, "max_context": 8192}
PROTOCOL = (
    "the first start is a rehearsal: it may compile kernels, and it records the files that a start needs; "
    "before cold_ready the page cache of all files is dropped if the system allows, "
    "before cold_ready_libraries_cached only that of the checkpoint; cold_import_alone is the import of torch alone "
    "with all caches dropped, cold_import_noted the same after reading the recorded files; names with packed use a "
    "checkpoint whose files are packed"
)


def default_directory() -> Path:
    return cache_dir() / "bench" / "llama-8b"


def packed_directory(directory: Path) -> Path:
    return directory.with_name(directory.name + "-packed")


def measure(
    report: BenchReport, directory: Path | None = None, settings: dict[str, Any] | None = None, rounds: int = 0
) -> None:
    chosen = SETTINGS | (settings or {})
    packed = chosen.get("weights") == "packed"  # then the checkpoint's files are packed too
    directory = _ensure_checkpoint(report, directory or default_directory(), packed)
    size = sum(file.stat().st_size for file in _shard_files(directory))
    starts = {"rehearsal": [_measure_start(directory, chosen, size)], "ready": [], "ready_libraries_cached": []}
    imports = {
        "alone": _measure_import(directory, preload_recorded_files=False),
        "noted": _measure_import(directory, preload_recorded_files=True),
    }
    for _ in range(rounds or ROUNDS):
        starts["ready"].append(_measure_start(directory, chosen, size))
        starts["ready_libraries_cached"].append(_measure_start(directory, chosen, size, drop_all_files=False))
    report.config |= {"settings": chosen, "rules": PROTOCOL, "bytes": size, "starts": starts, "imports": imports}
    warm = [start for group in starts.values() for start in group if not start["cold"]]
    prefix = ("cached" if warm else "cold") + {"packed": "_packed", "both": "_both"}.get(chosen.get("weights", ""), "")
    for name, group in starts.items():
        seconds = [start["ready"] for start in group]
        report.add(f"{prefix}_{name}_s", seconds, "s", peer=VLLM_READY_S, limit=size / DISK_BYTES_PER_SECOND)
    for phase in starts["ready"][0]["seconds"]:
        report.add(f"{prefix}_{phase}_s", [start["seconds"][phase] for start in starts["ready"]], "s")
    for name, result in imports.items():
        if result["dropped_all_caches"]:
            report.add(f"cold_import_{name}_s", [result["ready"] - result["entered"]], "s")
    if warm:
        read = warm[0]["read_bytes"]
        raise EmberlineError(
            f"the start was not cold: only {read} of the checkpoint's {size} bytes were read from disk"
        )


def _ensure_checkpoint(report: BenchReport, directory: Path, packed: bool) -> Path:
    """Write the checkpoint if it is missing, compressed if `packed`, and return its directory."""
    deadline = time.monotonic() + WRITE_TIMEOUT_S
    target = packed_directory(directory) if packed else directory
    for action, checkpoint in (("write", directory), ("pack", target)):
        if not any((candidate / "model.safetensors.index.json").exists() for candidate in (checkpoint, target)):
            began = time.monotonic()
            result = _run_child(action, directory, {}, deadline - began)
            report.config |= {f"{action}_s": time.monotonic() - began, **result}
    return target


def _measure_start(
    directory: Path, settings: dict[str, Any], checkpoint_bytes: int, drop_all_files: bool = True
) -> dict[str, Any]:
    dropped = drop_page_cache(directory, drop_all_files)
    before = time.monotonic()  # all processes share this clock
    result = _run_child("start", directory, settings, START_TIMEOUT_S)
    result["ready"] -= before
    result["seconds"] = {"python": result.pop("entered") - before} | result["seconds"]
    return result | {"cold": result["read_bytes"] >= MIN_READ_SHARE * checkpoint_bytes, "dropped_all_caches": dropped}


def _measure_import(directory: Path, *, preload_recorded_files: bool) -> dict[str, Any]:
    dropped = drop_page_cache(directory, drop_all_files=True)
    return _run_child("import", directory, {"preload_recorded_files": preload_recorded_files}, IMPORT_TIMEOUT_S) | {
        "dropped_all_caches": dropped
    }


def drop_page_cache(directory: Path, drop_all_files: bool) -> bool:
    """Remove the checkpoint's files, or with `drop_all_files` all files, from the page cache.

    Return whether the cache of all files was dropped, which only root may do.
    """
    for file in _shard_files(directory):
        with file.open("rb") as f:
            os.fsync(f.fileno())  # dirty pages cannot be dropped
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if not drop_all_files:
        return False
    with contextlib.suppress(OSError):  # only root may do this
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n", "ascii")
        return True
    return False


def _shard_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def _run_child(action: str, directory: Path, settings: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run an action of this module in a child process and return the JSON object that it prints last."""
    command = [sys.executable, "-m", "emberline.bench.gpu.cold", action, str(directory), json.dumps(settings)]
    try:
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as e:
        raise EmberlineError(f"cold start action {action} timed out after {timeout_s:.0f} s") from e
    lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
    if child.returncode or not lines:
        status, output = child.returncode, child.stdout[-200:]
        raise EmberlineError(f"cold start action {action} failed: status={status} output={output!r}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def write_plain_checkpoint(directory: Path) -> dict[str, Any]:
    from emberline.bench.gpu.model import write_checkpoint

    write_checkpoint(directory)
    return {}


def write_packed_checkpoint(directory: Path) -> dict[str, Any]:
    from emberline.bench.gpu.model import pack_checkpoint

    return {"codec": pack_checkpoint(directory, packed_directory(directory))}


def time_import(preload_recorded_files: bool) -> dict[str, Any]:
    """Import torch and return the duration and the I/O of the import.

    With `preload_recorded_files`, the files that an earlier start recorded are read into the page cache first. Bytes
    that are then still read from disk belong to files that the record misses.
    """
    from emberline.engine import preload
    from emberline.models.reader import FileReader

    began = time.monotonic()
    first = preload.recorded_file_ranges() if preload_recorded_files else []
    with FileReader.start([], prefetch=first) as reader:
        reader.wait_for_prefetch(preload.MAX_PRELOAD_WAIT_S)
    before, entered = read_io_counters(), time.monotonic()
    preload.skip_unused_torch_imports()
    importlib.import_module("torch")
    ready = time.monotonic()
    spent = {name: count - before[name] for name, count in read_io_counters().items()}
    known = preload.read_file_record()
    return {
        "entered": entered,
        "ready": ready,
        "first_files": entered - began,
        "first_files_read_bytes": before["read_bytes"],
        "not_noted": sorted(set(preload.files_in_use()) - set(known)),
        **spent,
    }


def time_start(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Load the model and generate one token in the same steps as a server (engine/process.py). Return the times."""
    phase_times = [("", time.monotonic())]

    def record_phase(phase: str) -> None:
        phase_times.append((phase, time.monotonic()))

    from emberline.engine import preload

    reader = preload.start_preload(directory)
    preload.skip_unused_torch_imports()
    record_phase("first_files")
    before = read_io_counters()
    for phase, module in IMPORTS.items():
        importlib.import_module(module)
        record_phase(f"import_{phase}")
    from emberline.engine.gpu.boot import boot_from_checkpoint

    read_by_then = reader.stats
    imported = {f"import_{name}": count - before[name] for name, count in read_io_counters().items()}
    booted = boot_from_checkpoint(directory, EngineConfig.build("", **settings).with_gpu_defaults(), reader=reader)
    record_phase("boot")
    _generate_tokens(booted.engine, 1)
    record_phase("first_token")
    _generate_tokens(booted.engine, 2)
    record_phase("second_request")  # its second token comes from a captured step
    seconds = {phase: at - before for (_, before), (phase, at) in itertools.pairwise(phase_times)}
    seconds |= {f"boot_{name}": spent for name, spent in booted.seconds.items()}
    preload.write_file_record()
    return {
        "entered": phase_times[0][1],
        "ready": dict(phase_times)["first_token"],
        "seconds": seconds,
        "reader": type(reader).__name__,
        **imported,
        "read_bytes": read_io_counters()["read_bytes"],
        "read_when_imported": read_by_then.bytes,
        "read_seconds": reader.stats.seconds,
        "read_rate": reader.stats.gigabytes_per_second,
        "read_first": sum(end - begin for spans in preload.read_file_record().values() for begin, end in spans),
    }


def _generate_tokens(engine: Engine, num_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    engine.add(Submission(f"{num_tokens} tokens", PROMPT, params))
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        for output in engine.step():
            if output.error is not None:
                raise EmberlineError(output.error)
            num_tokens -= len(output.tokens)
            if num_tokens <= 0:
                return
    raise EmberlineError(f"the engine generated no token in {START_TIMEOUT_S:.0f} s")


def read_io_counters() -> dict[str, int]:
    """Return the bytes that this process has read from storage and the number of its major page faults.

    Both direct reads and reads through the page cache count. The reads of a child process count after it has ended.
    """
    used = {"read_bytes": 0, "major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt}
    with contextlib.suppress(OSError):
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text("ascii").splitlines())
        used["read_bytes"] = int(fields["read_bytes"])
    return used


def main(action: str, directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    if action in ("write", "pack"):
        return write_plain_checkpoint(directory) if action == "write" else write_packed_checkpoint(directory)
    if action == "import":
        return time_import(**settings)
    return time_start(directory, settings)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))), flush=True)
