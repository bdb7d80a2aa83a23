"""The engines that `emberline bench cpu` compares, with their settings.

Each name stands for one engine with one number format of the weights.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from emberline.bench.contender import ContenderSpec
from emberline.core.cpus import core_count
from emberline.core.errors import InvalidRequest

MAX_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class BenchEnvironment:
    """The settings that all compared engines share."""

    model: Path  # the checkpoint directory
    gguf: Path | None  # the quantised file of the checkpoint
    threads: int
    peers_dir: Path  # directory of the peers' environments

    def peer_python_path(self, environment_name: str) -> Path:
        return self.peers_dir / environment_name / "bin" / "python"


def make_emberline_spec(environment: BenchEnvironment) -> ContenderSpec:
    settings = {"model": str(environment.model), "threads": environment.threads}
    return ContenderSpec("emberline", Path(sys.executable), "emberline.bench.offline_engine", settings)


def make_peer_spec(peer_name: str, environment: BenchEnvironment) -> ContenderSpec:
    if peer_name not in PEERS:
        raise InvalidRequest(f"unknown peer {peer_name!r}", param="--peers", hint=f"choose from {', '.join(PEERS)}")
    return PEERS[peer_name](peer_name, environment)


def _vllm_spec_factory(dtype: str, enforce_eager: bool) -> Callable[[str, BenchEnvironment], ContenderSpec]:
    def make_spec(name: str, environment: BenchEnvironment) -> ContenderSpec:
        settings = {
            "model": str(environment.model.absolute()),
            "dtype": dtype,
            "enforce_eager": enforce_eager,
            "max_model_len": MAX_CONTEXT,
            "max_num_seqs": 64,
        }
        usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(core_count())
        cores = usable[: environment.threads]
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return ContenderSpec(name, environment.peer_python_path("vllm"), "emberline.bench.peers.vllm", settings, env)

    return make_spec


def _transformers_spec_factory(dtype: str) -> Callable[[str, BenchEnvironment], ContenderSpec]:
    def make_spec(name: str, environment: BenchEnvironment) -> ContenderSpec:
        settings = {"model": str(environment.model), "threads": environment.threads, "dtype": dtype}
        env = {"HF_HUB_OFFLINE": "1"}
        return ContenderSpec(name, Path(sys.executable), "emberline.bench.peers.transformers", settings, env)

    return make_spec


def _llamacpp_spec_factory(build_name: str, tensor_type: str) -> Callable[[str, BenchEnvironment], ContenderSpec]:
    def make_spec(name: str, environment: BenchEnvironment) -> ContenderSpec:
        if environment.gguf is None:
            raise InvalidRequest(f"peer {name} can only run a model from a GGUF file", param="--peers")
        file = environment.gguf
        if tensor_type != "shipped":
            from emberline.bench.peers.gguf16 import widen_gguf

            file = widen_gguf(file, environment.peers_dir / "models" / f"{file.stem}.{tensor_type}.gguf", tensor_type)
        settings = {"model": str(file), "threads": environment.threads}
        module = f"emberline.bench.peers.{build_name.replace('-', '_')}"
        return ContenderSpec(
            name, environment.peer_python_path(build_name), module, settings, same_weights=tensor_type != "shipped"
        )

    return make_spec


PEERS: dict[str, Callable[[str, BenchEnvironment], ContenderSpec]] = {
    "vllm": _vllm_spec_factory("bfloat16", enforce_eager=False),
    "vllm-eager": _vllm_spec_factory("bfloat16", enforce_eager=True),
    "vllm-float16": _vllm_spec_factory("float16", enforce_eager=False),
    "vllm-float16-eager": _vllm_spec_factory("float16", enforce_eager=True),
    "vllm-float32": _vllm_spec_factory("float32", enforce_eager=False),
    "vllm-float32-eager": _vllm_spec_factory("float32", enforce_eager=True),
    "llamacpp": _llamacpp_spec_factory("llamacpp", "bf16"),
    "llamacpp-f16": _llamacpp_spec_factory("llamacpp", "f16"),
    "llamacpp-q4_1": _llamacpp_spec_factory("llamacpp", "shipped"),
    "llamacpp-native": _llamacpp_spec_factory("llamacpp-native", "bf16"),
    "llamacpp-native-f16": _llamacpp_spec_factory("llamacpp-native", "f16"),
    "llamacpp-native-q4_1": _llamacpp_spec_factory("llamacpp-native", "shipped"),
    "transformers": _transformers_spec_factory("bfloat16"),
    "transformers-float32": _transformers_spec_factory("float32"),
}
