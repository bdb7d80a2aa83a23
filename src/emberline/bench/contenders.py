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
    peers_dir: Path  # directory of the peers' environments

    def peer_python(self, environment_name: str) -> Path:
        return self.peers_dir / environment_name / "bin" / "python"


def emberline_spec(environment: BenchEnvironment) -> ContenderSpec:
    settings = {"model": str(environment.model), "threads": environment.threads}
    return ContenderSpec("emberline", Path(sys.executable), "emberline.bench.offline_engine", settings)


def peer_spec(peer_name: str, environment: BenchEnvironment) -> ContenderSpec:
    if peer_name not in PEERS:
        raise InvalidRequest(f"no peer {peer_name!r}", param="--peers", hint=f"known: {', '.join(PEERS)}")
    return PEERS[peer_name](peer_name, environment)


def _vllm_spec_factory(dtype: str, enforce_eager: bool) -> Callable[[str, BenchEnvironment], ContenderSpec]:
    def make(name: str, ground: BenchEnvironment) -> ContenderSpec:
        settings = {
            "model": str(ground.model.absolute()),
            "dtype": dtype,
            "enforce_eager": enforce_eager,
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
        return ContenderSpec(name, ground.peer_python("vllm"), "emberline.bench.peers.vllm", settings, env)

    return make


def _transformers_spec_factory(dtype: str) -> Callable[[str, BenchEnvironment], ContenderSpec]:
    def make(name: str, ground: BenchEnvironment) -> ContenderSpec:
        settings = {"model": str(ground.model), "threads": ground.threads, "dtype": dtype}
        env = {"HF_HUB_OFFLINE": "1"}
        return ContenderSpec(name, Path(sys.executable), "emberline.bench.peers.transformers", settings, env)

    return make


def _llamacpp_spec_factory(build_name: str, tensor_type: str) -> Callable[[str, BenchEnvironment], ContenderSpec]:
    def make(name: str, ground: BenchEnvironment) -> ContenderSpec:
        if ground.gguf is None:
            raise InvalidRequest(f"{name} needs a model that comes from a GGUF file", param="--peers")
        file = ground.gguf
        if tensor_type != "shipped":
            from emberline.bench.peers.gguf16 import widen_gguf

            file = widen_gguf(file, ground.peers_dir / "models" / f"{file.stem}.{tensor_type}.gguf", tensor_type)
        settings = {"model": str(file), "threads": ground.threads}
        module = f"emberline.bench.peers.{build_name.replace('-', '_')}"
        return ContenderSpec(
            name, ground.peer_python(build_name), module, settings, same_weights=tensor_type != "shipped"
        )

    return make


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
