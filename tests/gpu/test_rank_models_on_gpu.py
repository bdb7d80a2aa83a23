"""Models on several ranks of one GPU, which are threads with the same stream: logits equal those of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import family_cases
import numpy as np
import pytest
import tiny
import tiny_deepseek
import tiny_families
import torch
from publisher_packers import FORMATS
from torch import Tensor

from emberline.drafter.target import TargetStates
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kernels.comm.thread_group import ThreadGroup
from emberline.models.config import ModelConfig
from emberline.models.device_weights import DeviceWeights
from emberline.models.shard import Shard
from emberline.models.tensor_names import ignorable_tensors, load_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS = (70, 21, 1)
WIDE = family_cases.WIDE_CONFIGS
HEADS = family_cases.HEAD_64 | {"num_hidden_layers": 2}
MLA = tiny_deepseek.LITE_SIZES | {"hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 16}
MLA |= {"vocab_size": 1000, "num_hidden_layers": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1}


@pytest.fixture(autouse=True)
def restored_backend() -> Iterator[None]:
    yield
    ops.start_backend()


def write(directory: Path, name: str, dtype: torch.dtype) -> None:
    if name.startswith("deepseek"):
        sizes = MLA | ({} if name == "deepseek-v3" else {"first_k_dense_replace": 2})  # no experts
        tiny_deepseek.write_deepseek(directory, name.removeprefix("deepseek-"), dtype=dtype, **sizes)
        return
    family, config = WIDE[name]
    if "layer_types" not in config:
        config = config | {"num_hidden_layers": 2}
    tiny.write_tensors(directory, config, family.tensors(config, dtype=dtype))


def compute_logits(checkpoint: Checkpoint, dtype: torch.dtype, shard: Shard, comm: Any, **options: Any) -> Tensor:
    weights = DeviceWeights(checkpoint, dtype, "cuda", shard=shard, comm=comm, **options)
    config = ModelConfig.from_checkpoint(checkpoint)
    model = load_model(shard.shard_config(config), weights, 128)
    weights.finish(ignorable_tensors(config))
    random = np.random.default_rng(1)
    sequences = [random.integers(0, config.vocab, length) for length in LENGTHS]
    states = TargetStates(model, (0,), max(LENGTHS))
    spans = [range(length) for length in LENGTHS]
    return torch.cat([logits.float().cpu() for _, logits in states.compute(sequences, spans)])


def check_ranks(
    directory: Path, ranks: int, dtype: torch.dtype, bound: float, expert_parts: int = 1, **options: Any
) -> None:
    checkpoint = Checkpoint.open(directory)
    whole = compute_logits(checkpoint, dtype, Shard(), None, **options)

    def run(comm: Any) -> Tensor:
        return compute_logits(checkpoint, dtype, Shard(comm.rank, ranks, expert_parts), comm, **options)

    parts = ThreadGroup(ranks, in_turns=True).run(run)
    assert all(torch.equal(part, parts[0]) for part in parts), "ranks have different logits"
    error = (parts[0] - whole).abs() / whole.abs().max()
    found = float(error.max() if dtype is torch.float32 else error.mean())
    print(f"{directory.name} ranks={ranks} {dtype}: {found:.2g}")
    assert found < bound


NAMES = ["llama-128", "qwen3-moe-64", "glm4-128", "gemma3-256", "phi3-96", "olmo2-128", "cohere-64"]
NAMES += ["llama4-stacked-128", "gpt-oss-stacked-64", "deepseek-v2-lite", "deepseek-v3"]


@pytest.mark.parametrize("name", NAMES)
def test_bf16_families(name: str, tmp_path: Path) -> None:
    write(tmp_path / name, name, torch.bfloat16)
    check_ranks(tmp_path / name, 2, torch.bfloat16, 0.02)


@pytest.mark.parametrize("name", ["llama-128", "qwen3-moe-64", "gpt-oss-stacked-64", "deepseek-v3", "olmo2-128"])
def test_float32_families(name: str, tmp_path: Path) -> None:
    write(tmp_path / name, name, torch.float32)
    check_ranks(tmp_path / name, 4, torch.float32, 1e-4)
    if name in ("qwen3-moe-64", "deepseek-v3"):  # gpt-oss has 5 experts here
        check_ranks(tmp_path / name, 2, torch.float32, 1e-4, 2)


@pytest.mark.parametrize("name", ["qwen3-moe-64", "glm4-128", "deepseek-v3"])
def test_whole_experts_in_bf16(name: str, tmp_path: Path) -> None:
    write(tmp_path / name, name, torch.bfloat16)
    check_ranks(tmp_path / name, 2, torch.bfloat16, 0.02, 2)


@pytest.mark.parametrize("name", ["int4", "int4 zeros", "fp8 block", "float channel", "mxfp4", "nvfp4", "packed"])
def test_formats(name: str, tmp_path: Path) -> None:
    """Quantised matrices stay quantised, and bf16 ones are packed, after they were cut."""
    config = tiny.config("llama", **HEADS | {"intermediate_size": 1024, "hidden_size": 512})
    tensors = tiny.tensors(config, dtype=torch.bfloat16)
    if name != "packed":
        for matrix in [tensor for tensor in tensors if "_proj.weight" in tensor]:
            packed, _ = FORMATS[name].pack(tensors.pop(matrix).float())
            tensors |= {f"{matrix.removesuffix('.weight')}.{part}": tensor for part, tensor in packed.items()}
        config |= {"quantization_config": FORMATS[name].config}
    tiny.write_tensors(tmp_path / "model", config, tensors)
    # Rows of activations get one scale on each rank with "float channel", so 8-bit rounding differs, not only sums.
    bound = 0.03 if name == "float channel" else 0.02
    check_ranks(tmp_path / "model", 2, torch.bfloat16, bound, packed=name == "packed")


def test_fused_tensors_of_families_without_a_gpu_case(tmp_path: Path) -> None:
    config = tiny_families.granite("granite", **HEADS, attention_bias=True)
    tiny.write_tensors(tmp_path / "granite", config, tiny_families.tensors(config, dtype=torch.bfloat16))
    check_ranks(tmp_path / "granite", 2, torch.bfloat16, 0.02)
