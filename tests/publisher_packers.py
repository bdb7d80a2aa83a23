"""Packs matrices as publishers of quantised checkpoints do, one code at a time, and says which values they stand for.

A packer takes a matrix [n, k] and returns the tensors of the module `x`, and the values in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Packed = tuple[dict[str, Tensor], Tensor]


class PublishedFormat(NamedTuple):
    config: dict[str, Any]  # quantization_config
    pack: Callable[[Tensor], Packed]
    kind: str  # of the codes
    error: float  # of a value, at most, relative to the largest of its group


def to_words(codes: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Return int32 words of eight codes along a dimension; place i of a word has code order[i]."""
    codes = codes.to(torch.int64).movedim(dim, -1)
    short = -codes.shape[-1] % 8
    groups = torch.nn.functional.pad(codes, (0, short)).unflatten(-1, (-1, 8))
    words = sum(groups[..., order[i]] << 4 * i for i in range(8))
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return words.movedim(-1, dim).contiguous()


def quantise_integers(matrix: Tensor, group: int, *, zero_points: bool, order: Tensor | None = None) -> list[Tensor]:
    """Return codes [n, k], scales and zero points [n, groups], the group of each column, and values.

    `order`: columns by their importance; the first `group` of them form the first group."""
    n, k = matrix.shape
    groups = torch.empty(k, dtype=torch.int64)
    groups[torch.arange(k) if order is None else order] = torch.arange(k) // group
    scales, zeros = torch.zeros(n, k // group), torch.full((n, k // group), 8)
    for g in range(k // group):
        part = matrix[:, groups == g]
        if zero_points:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, g] = (high - low) / 15
            zeros[:, g] = (-low / scales[:, g]).round().clamp(0, 15).long()
        else:
            scales[:, g] = part.abs().amax(1) / 7
    scales = scales.to(torch.float16)
    wide, zero = scales.float()[:, groups], zeros[:, groups]
    codes = (matrix / wide + zero).round().clamp(0, 15).long()
    return [codes, scales, zeros, groups, (codes - zero) * wide]


def pack_compressed(group: int = 32, *, zero_points: bool = False, order: bool = False) -> Callable[[Tensor], Packed]:
    def pack(matrix: Tensor) -> Packed:
        columns = torch.randperm(matrix.shape[1], generator=torch.Generator().manual_seed(1)) if order else None
        size = group or matrix.shape[1]
        codes, scales, zeros, groups, values = quantise_integers(matrix, size, zero_points=zero_points, order=columns)
        tensors = {"weight_packed": to_words(codes, 1), "weight_scale": scales}
        tensors["weight_shape"] = torch.tensor(matrix.shape)
        tensors |= {"weight_zero_point": to_words(zeros, 0)} if zero_points else {}
        return tensors | ({"weight_g_idx": groups.int()} if order else {}), values

    return pack


def pack_awq(matrix: Tensor) -> Packed:
    codes, scales, zeros, _, values = quantise_integers(matrix, 32, zero_points=True)
    tensors = {"qweight": to_words(codes.t(), 1, AWQ_ORDER), "qzeros": to_words(zeros.t(), 1, AWQ_ORDER)}
    return tensors | {"scales": scales.t().contiguous()}, values


def pack_gptq(*, zero_points: bool, offset: int, order: bool = False) -> Callable[[Tensor], Packed]:
    def pack(matrix: Tensor) -> Packed:
        columns = torch.randperm(matrix.shape[1], generator=torch.Generator().manual_seed(2)) if order else None
        codes, scales, zeros, groups, values = quantise_integers(matrix, 32, zero_points=zero_points, order=columns)
        tensors = {"qweight": to_words(codes.t(), 0), "qzeros": to_words((zeros.t() - offset) % 16, 1)}
        return tensors | {"scales": scales.t().contiguous(), "g_idx": groups.int()}, values

    return pack


def to_float4(matrix: Tensor) -> Tensor:
    """Return the codes of the nearest values."""
    distances = (matrix[..., None] - torch.tensor(FLOAT4)).abs()
    return distances.argmin(-1)


def pack_nvfp4(*, divides: bool) -> Callable[[Tensor], Packed]:
    def pack(matrix: Tensor) -> Packed:
        groups = matrix.unflatten(1, (-1, 16))
        whole = float(matrix.abs().max()) / (448 * 6)
        scales = (groups.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
        wide = scales.float()[..., None] * whole
        codes = to_float4(groups / wide)
        values = (torch.tensor(FLOAT4)[codes] * wide).flatten(1)
        halves = codes.flatten(1).to(torch.uint8)
        packed = halves[:, ::2] | halves[:, 1::2] << 4
        if divides:
            return {
                "weight_packed": packed,
                "weight_scale": scales,
                "weight_global_scale": torch.tensor([1 / whole]),
                "input_global_scale": torch.ones(1),
            }, values
        names = {"weight": packed, "weight_scale": scales, "weight_scale_2": torch.tensor(whole)}
        return names | {"input_scale": torch.tensor(1.0)}, values

    return pack


def pack_mxfp4(matrix: Tensor) -> Packed:
    groups = matrix.unflatten(1, (-1, 32))
    powers = torch.floor(torch.log2(groups.abs().amax(2))) - 2
    codes = to_float4(groups / torch.exp2(powers)[..., None])
    values = (torch.tensor(FLOAT4)[codes] * torch.exp2(powers)[..., None]).flatten(1)
    halves = codes.flatten(1).to(torch.uint8)
    packed = halves[:, ::2] | halves[:, 1::2] << 4
    return {"weight_packed": packed, "weight_scale": (powers + 127).to(torch.uint8)}, values


def pack_fp8(rows: int, columns: int, scale: str = "weight_scale") -> Callable[[Tensor], Packed]:
    """`rows`, `columns`: that share a scale; 0: all."""

    def pack(matrix: Tensor) -> Packed:
        n, k = matrix.shape
        height, width = rows or n, columns or k
        scales = torch.empty(-(-n // height), -(-k // width))
        codes, values = torch.empty(n, k, dtype=torch.float8_e4m3fn), torch.empty(n, k)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
                scales[i, j] = matrix[block].abs().max() / 448
                codes[block] = (matrix[block] / scales[i, j]).to(torch.float8_e4m3fn)
                values[block] = codes[block].float() * scales[i, j]
        return {"weight": codes, scale: scales if rows or columns else scales.reshape(())}, values

    return pack


def with_input_scale(pack: Callable[[Tensor], Packed]) -> Callable[[Tensor], Packed]:
    def pack_both(matrix: Tensor) -> Packed:
        tensors, values = pack(matrix)
        return tensors | {"input_scale": torch.tensor(0.5)}, values

    return pack_both


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"a": group},
        "ignore": ["lm_head"],
    }


INT4_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
FORMATS: dict[str, PublishedFormat] = {
    "int4": PublishedFormat(compressed("pack-quantized", **INT4_GROUPS), pack_compressed(), "int4", 0.08),
    "int4 zeros": PublishedFormat(
        compressed("pack-quantized", **INT4_GROUPS, symmetric=False), pack_compressed(zero_points=True), "int4", 0.08
    ),
    "int4 channel": PublishedFormat(
        compressed("pack-quantized", num_bits=4, type="int", strategy="channel"), pack_compressed(0), "int4", 0.08
    ),
    "int4 order": PublishedFormat(
        compressed("pack-quantized", **INT4_GROUPS, actorder="group"), pack_compressed(order=True), "int4", 0.08
    ),
    "int4 static order": PublishedFormat(
        compressed("pack-quantized", **INT4_GROUPS, actorder="static"), pack_compressed(), "int4", 0.08
    ),
    "awq": PublishedFormat(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        pack_awq,
        "int4",
        0.08,
    ),
    "gptq": PublishedFormat({**GPTQ, "sym": True}, pack_gptq(zero_points=False, offset=1), "int4", 0.08),
    "gptq zeros": PublishedFormat({**GPTQ, "sym": False}, pack_gptq(zero_points=True, offset=1), "int4", 0.08),
    "gptq_v2": PublishedFormat(
        {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, pack_gptq(zero_points=True, offset=0), "int4", 0.08
    ),
    "gptq order": PublishedFormat(
        {**GPTQ, "sym": False, "desc_act": True}, pack_gptq(zero_points=True, offset=1, order=True), "int4", 0.08
    ),
    "fp8 block": PublishedFormat(
        {"quant_method": "fp8", "weight_block_size": [16, 32]}, pack_fp8(16, 32, "weight_scale_inv"), "fp8", 0.04
    ),
    "fp8 tensor": PublishedFormat(
        {"quant_method": "fp8", "activation_scheme": "static"}, with_input_scale(pack_fp8(0, 0)), "fp8", 0.04
    ),
    "fbgemm": PublishedFormat({"quant_method": "fbgemm_fp8"}, pack_fp8(1, 0), "fp8", 0.04),
    "float tensor": PublishedFormat(
        compressed("naive-quantized", num_bits=8, type="float", strategy="tensor"), pack_fp8(0, 0), "fp8", 0.04
    ),
    "float channel": PublishedFormat(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"), pack_fp8(1, 0), "fp8", 0.04
    ),
    "float block": PublishedFormat(
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]),
        pack_fp8(16, 32),
        "fp8",
        0.04,
    ),
    "modelopt fp8": PublishedFormat(
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        with_input_scale(pack_fp8(0, 0)),
        "fp8",
        0.04,
    ),
    "modelopt nvfp4": PublishedFormat(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, pack_nvfp4(divides=False), "nvfp4", 0.2
    ),
    "nvfp4": PublishedFormat(
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        pack_nvfp4(divides=True),
        "nvfp4",
        0.2,
    ),
    "mxfp4": PublishedFormat(
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        pack_mxfp4,
        "mxfp4",
        0.26,
    ),
}
