"""emberline doctor: what this machine can do, what is missing, and what serving a model would take."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from emberline import __version__
from emberline.core.config import DEFAULT_MODEL, cache_dir, core_count
from emberline.core.errors import EmberlineError

MARKS = {True: "ok", None: "--", False: "!!"}
FEATURES = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve2", "sve", "bf16", "i8mm", "asimddp", "asimdhp", "asimd")


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    says: str
    good: bool | None = True  # None: worth knowing, nothing wrong
    hint: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the one to plan for (default: %(default)s)")
    parser.add_argument("--pull", action="store_true", help="fetch the model if it is not here")


def run(args: argparse.Namespace) -> int:
    findings = [*_machine(), *_software(), *_kernels(), *_model(args.model, pull=args.pull)]
    width = max(len(f.what) for f in findings)
    for f in findings:
        print(f"{MARKS[f.good]}  {f.what:<{width}}  {f.says}")
        if f.hint:
            print(f"    {'':<{width}}  hint: {f.hint}")
    return 1 if any(f.good is False for f in findings) else 0


def _machine() -> Iterator[Finding]:
    info = Path("/proc/cpuinfo").read_text()
    flags = {word for line in info.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}
    yield Finding("emberline", f"{__version__}, Python {platform.python_version()}")
    yield Finding("cpu", f"{core_count()} cores, {platform.machine()}: {' '.join(f for f in FEATURES if f in flags)}")
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free, total = (int(memory[name].split()[0]) / 2**20 for name in ("MemAvailable", "MemTotal"))
    yield Finding("memory", f"{free:.1f} of {total:.1f} GiB free")
    folder = cache_dir()
    disk = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists()))
    hint = "make room for models" if disk.free < 2 << 30 else ""
    yield Finding("cache", f"{folder}, {disk.free / 2**30:.0f} GiB free on its disk", not hint, hint)
    gpu = Path("/proc/driver/nvidia/version").exists()
    yield Finding("gpu", "an NVIDIA driver is here; this version computes on the CPU" if gpu else "none", None)


def _software() -> Iterator[Finding]:
    for name, needed, use in (
        ("torch", True, "the engine"),
        ("tokenizers", True, "text to tokens"),
        ("llguidance", True, "structured output"),
        ("uvicorn", True, "the server"),
        ("huggingface_hub", False, "pulling hf:org/name"),
        ("gguf", False, "tests of GGUF files"),
    ):
        if importlib.util.find_spec(name) is None:
            yield Finding(name, f"missing ({use})", False if needed else None, f"pip install {name}")
        else:
            yield Finding(name, f"{importlib.metadata.version(name)} ({use})")


def _kernels() -> Iterator[Finding]:
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    hint = "" if compiler else "install g++: kernels run several times faster"
    yield Finding("compiler", compiler or "none", not hint, hint)
    if importlib.util.find_spec("torch") is None:
        return
    from emberline.kernels import ops

    backend = ops.start(cache=cache_dir() / "kernels")
    hint = "" if backend.library else "plain torch is used: correct, but slow"
    yield Finding("kernels", str(backend), not hint, hint)


def _model(name: str, *, pull: bool) -> Iterator[Finding]:
    from emberline.hub.checkpoint import Checkpoint
    from emberline.hub.pull import place
    from emberline.hub.source import ALIASES, resolve
    from emberline.models.config import ModelConfig

    try:
        if name in ALIASES and not pull and not place(name, cache_dir()).is_dir():
            yield Finding("model", f"{name} is not in the cache", None, f"emberline pull {name}")
            return
        checkpoint = Checkpoint.open(resolve(name))
        config = ModelConfig.from_hf(checkpoint.config)
    except EmberlineError as e:
        yield Finding("model", e.message, False, e.hint or "")
        return
    weights = sum(t.nbytes for t in checkpoint.tensors.values())
    token = 2 * config.layers * config.kv_heads * config.head_dim * 2
    yield Finding("model", f"{name}: {config.model_type}, {config.layers} layers, context {config.max_context}")
    yield Finding("  weights", f"{weights / 1e6:.0f} MB")
    context = token * config.max_context
    yield Finding("  kv cache", f"{token / 1e3:.1f} kB a token, {context / 1e6:.0f} MB a full context (bfloat16)")
