"""Tiny checkpoints with quantised matrices, in the formats of their publishers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8_BLOCK = (16, 16)
INT4_GROUP = 8
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(FP8_BLOCK)}
INT4_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": INT4_GROUP, "symmetric": True}
INT4_WEIGHTS |= {"actorder": None, "block_structure": None, "dynamic": False, "observer": "minmax"}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4_WEIGHTS, "input_activations": None}},
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "kv_cache_scheme": None,
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def quantise_fp8(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and the values they stand for."""
    rows, columns = matrix.shape
    scales = torch.zeros(-(-rows // FP8_BLOCK[0]), -(-columns // FP8_BLOCK[1]))
    codes, values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = tuple(slice(n * size, (n + 1) * size) for n, size in zip((i, j), FP8_BLOCK, strict=True))
            scales[i, j] = matrix[block].abs().max() / 448
            codes[block] = (matrix[block] / scales[i, j]).to(torch.float8_e4m3fn)
            values[block] = codes[block].float() * scales[i, j]
    return codes, scales, values.to(torch.bfloat16)


def quantise_int4(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, eight to a word with the first in its lowest bits, scales and the values they stand for."""
    rows, columns = matrix.shape
    groups = matrix.view(rows, columns // INT4_GROUP, INT4_GROUP)
    scales = (groups.abs().amax(2) / 7).to(torch.bfloat16)
    codes = (groups / scales.float()[:, :, None]).round().clamp(-8, 7).to(torch.int64).view(rows, columns)
    words = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for i in range(8):
        words |= (codes[:, i::8] + 8) << 4 * i
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    values = codes.view(groups.shape).float() * scales.float()[:, :, None]
    return packed, scales, values.view(rows, columns).to(torch.bfloat16)


def rewrite(directory: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> None:
    """Change the tensors and the config of a checkpoint."""
    tensors, config = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    change(tensors, config)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


def use_fp8(directory: Path, model: Any, *, is_quantised: Callable[[str], bool]) -> None:
    """Quantise matrices of a checkpoint, and give the model the values that the codes stand for."""
    values: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [name for name in tensors if is_quantised(name)]:
            tensors[name], tensors[f"{name}_scale_inv"], values[name] = quantise_fp8(tensors[name])
        config["quantization_config"] = FP8

    rewrite(directory, change)
    load_values(model, values)


def use_int4(directory: Path, model: Any, *, is_quantised: Callable[[str], bool]) -> None:
    values: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [name for name in tensors if is_quantised(name)]:
            matrix = tensors.pop(name)
            tensors[f"{name}_packed"], tensors[f"{name}_scale"], values[name] = quantise_int4(matrix)
            tensors[f"{name}_shape"] = torch.tensor(matrix.shape, dtype=torch.int32)
        config["quantization_config"] = INT4

    rewrite(directory, change)
    load_values(model, values)


def load_values(model: Any, values: Mapping[str, Tensor]) -> None:
    """Give a model of transformers, which has all experts of a layer in two tensors, other weights."""
    state = model.state_dict()
    for name, matrix in values.items():
        before, _, after = name.partition(".mlp.experts.")
        number, _, kind = after.removesuffix(".weight").partition(".")
        if not after:
            state[name].copy_(matrix)
        elif kind == "down_proj":
            state[f"{before}.mlp.experts.down_proj"][int(number)].copy_(matrix)
        else:
            half = state[f"{before}.mlp.experts.gate_up_proj"][int(number)].chunk(2)[kind == "up_proj"]
            half.copy_(matrix)
