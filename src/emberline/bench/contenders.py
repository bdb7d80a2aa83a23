"""The engines of `bench cpu` and their settings. Every name is one engine in one number format."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from emberline.bench.contender import ContenderSpec
from emberline.core.config import core_count
from emberline.core.errors import InvalidRequest

MAX_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class BenchEnvironment:
    """The settings that all contenders share."""

    model: Path  # the checkpoint directory
    gguf: Path | None  # the quantised file of the checkpoint
    threads: int
    root: Path  # directory of the peers' environments

    def python(self, peer: str) -> Path:
        return self.root / peer / "bin" / "python"


def ours(ground: BenchEnvironment) -> ContenderSpec:
    settings = {"model": str(ground.model), "threads": ground.threads}
    return ContenderSpec("emberline", Path(sys.executable), "emberline.bench.offline_engine", settings)


def peer(name: str, ground: BenchEnvironment) -> ContenderSpec:
    if name not in PEERS:
        raise InvalidRequest(f"no peer {name!r}", param="--peers", hint=f"known: {', '.join(PEERS)}")
    return PEERS[name](name, ground)


def _vllm(dtype: str, eager: bool) -> Callable[[str, BenchEnvironment], ContenderSpec]:
    def make(name: str, ground: BenchEnvironment) -> ContenderSpec:
        settings = {
            "model": str(ground.model.absolute()),
            "dtype": dtype,
            "enforce_eager": eager,
            "max_model_len": MAX_CONTEXT,
            "max_num_seqs": 64,
        }
        usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(core_count())
        cores = usable[: ground.threads]
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return ContenderSpec(name, ground.python("vllm"), "emberline.bench.peers.vllm", settings, env)

    return make


def _transformers(dtype: str) -> Callable[[str, BenchEnvironment], ContenderSpec]:
    def make(name: str, ground: BenchEnvironment) -> ContenderSpec:
        settings = {"model": str(ground.model), "threads": ground.threads, "dtype": dtype}
        env = {"HF_HUB_OFFLINE": "1"}
        return ContenderSpec(name, Path(sys.executable), "emberline.bench.peers.transformers", settings, env)

    return make


def _llamacpp(build: str, kind: str) -> Callable[[str, BenchEnvironment], ContenderSpec]:
    def make(name: str, ground: BenchEnvironment) -> ContenderSpec:
        if ground.gguf is None:
            raise InvalidRequest(f"{name} needs a model that comes from a GGUF file", param="--peers")
        file = ground.gguf
        if kind != "shipped":
            from emberline.bench.peers.gguf16 import widen

            file = widen(file, ground.root / "models" / f"{file.stem}.{kind}.gguf", kind)
        settings = {"model": str(file), "threads": ground.threads}
        module = f"emberline.bench.peers.{build.replace('-', '_')}"
        return ContenderSpec(name, ground.python(build), module, settings, same_weights=kind != "shipped")

    return make


PEERS: dict[str, Callable[[str, BenchEnvironment], ContenderSpec]] = {
    "vllm": _vllm("bfloat16", eager=False),
    "vllm-eager": _vllm("bfloat16", eager=True),
    "vllm-float16": _vllm("float16", eager=False),
    "vllm-float16-eager": _vllm("float16", eager=True),
    "vllm-float32": _vllm("float32", eager=False),
    "vllm-float32-eager": _vllm("float32", eager=True),
    "llamacpp": _llamacpp("llamacpp", "bf16"),
    "llamacpp-f16": _llamacpp("llamacpp", "f16"),
    "llamacpp-q4_1": _llamacpp("llamacpp", "shipped"),
    "llamacpp-native": _llamacpp("llamacpp-native", "bf16"),
    "llamacpp-native-f16": _llamacpp("llamacpp-native", "f16"),
    "llamacpp-native-q4_1": _llamacpp("llamacpp-native", "shipped"),
    "transformers": _transformers("bfloat16"),
    "transformers-float32": _transformers("float32"),
}
