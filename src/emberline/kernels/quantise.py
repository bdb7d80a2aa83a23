"""quantise: makes a QuantisedMatrix of a matrix of floats, by rounding each value to the nearest code."""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.kernels.quantised_matrix import (
    EXPONENT_BIAS,
    FLOAT4_VALUES,
    INT4_ZERO,
    MXFP4_COLUMNS,
    NVFP4_COLUMNS,
    CodeKind,
    QuantisedMatrix,
)

MAX_FP8, MAX_FLOAT4, MAX_INT4 = 448.0, 6.0, 7.0
MAX_FLOAT4_EXPONENT = 2  # of the largest float4, 6.0
SHRINKS = tuple(1 - 0.05 * step for step in range(9))  # factors of the scale that reaches the largest value
MIN_SCALE = 2.0**-100  # so that a group of zeros can be divided by its scale


def quantise(
    values: Tensor, kind: CodeKind, group_rows: int = 1, group_columns: int = 0, *, search: bool = False
) -> QuantisedMatrix:
    """Quantise a matrix [.., n, k] of finite values.

    `group_rows` is used by fp8 only, `group_columns` by fp8 and int4, where 0 means the whole row. The group of a
    float4 format is fixed. With `search`, each int4 scale is multiplied by the factor of SHRINKS that gives the least
    squared error in its group, so that large values may be clipped.
    """
    values = values.to(torch.float32)
    match kind:
        case "fp8":
            return _quantise_fp8(values, group_rows, group_columns or values.shape[-1])
        case "int4":
            return _quantise_int4(values, group_columns or values.shape[-1], SHRINKS if search else (1.0,))
        case "mxfp4":
            return _quantise_mxfp4(values)
        case "nvfp4":
            return _quantise_nvfp4(values)


def _quantise_fp8(values: Tensor, rows: int, columns: int) -> QuantisedMatrix:
    n, k = values.shape[-2:]
    padded = torch.nn.functional.pad(values, (0, -k % columns, 0, -n % rows))
    tiles = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))  # [.., groups, rows, groups, columns]
    scales = (tiles.abs().amax(dim=(-3, -1)) / MAX_FP8).clamp_min(MIN_SCALE)
    codes = (tiles / scales[..., :, None, :, None]).clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = codes.flatten(-2).flatten(-3, -2)[..., :n, :k].contiguous()
    return QuantisedMatrix("fp8", codes, scales, rows, columns)


def _quantise_int4(values: Tensor, columns: int, shrinks: tuple[float, ...]) -> QuantisedMatrix:
    groups = values.unflatten(-1, (-1, columns))
    widest, scales, least = groups.abs().amax(dim=-1) / MAX_INT4, None, None
    for shrink in shrinks:
        tried = torch.where(widest > 0, (widest * shrink).clamp_min(MIN_SCALE), 1.0).to(torch.bfloat16)
        wide = tried.float()[..., None]
        error = (_round_to_int4(groups, wide) * wide - groups).square().sum(dim=-1) if len(shrinks) > 1 else widest
        if scales is None or least is None:
            scales, least = tried, error
        else:
            scales, least = torch.where(error < least, tried, scales), torch.minimum(error, least)
    assert scales is not None
    codes = _round_to_int4(groups, scales.float()[..., None]) + INT4_ZERO
    return QuantisedMatrix("int4", _join_halves(codes.to(torch.uint8).flatten(-2)), scales, 1, columns)


def _round_to_int4(groups: Tensor, scales: Tensor) -> Tensor:
    return torch.round(groups / scales).clamp(-INT4_ZERO, MAX_INT4)


def _quantise_mxfp4(values: Tensor) -> QuantisedMatrix:
    groups = values.unflatten(-1, (-1, MXFP4_COLUMNS))
    largest = groups.abs().amax(dim=-1).clamp_min(MIN_SCALE)
    exponent = torch.floor(torch.log2(largest)) - MAX_FLOAT4_EXPONENT
    codes = _round_to_float4(groups / torch.exp2(exponent)[..., None]).flatten(-2)
    scales = (exponent + EXPONENT_BIAS).to(torch.uint8)
    return QuantisedMatrix("mxfp4", _join_halves(codes), scales, 1, MXFP4_COLUMNS)


def _quantise_nvfp4(values: Tensor) -> QuantisedMatrix:
    groups = values.unflatten(-1, (-1, NVFP4_COLUMNS))
    largest = groups.abs().amax(dim=-1) / MAX_FLOAT4
    row_scale = (largest.amax(dim=(-2, -1), keepdim=True) / MAX_FP8).clamp_min(MIN_SCALE)  # one for the whole matrix
    scales = (largest / row_scale).to(torch.float8_e4m3fn)
    divisors = (scales.float() * row_scale).clamp_min(MIN_SCALE)
    codes = _round_to_float4(groups / divisors[..., None]).flatten(-2)
    rows = row_scale[..., 0].expand(values.shape[:-1]).contiguous()
    return QuantisedMatrix("nvfp4", _join_halves(codes), scales, 1, NVFP4_COLUMNS, row_scale=rows)


def _round_to_float4(values: Tensor) -> Tensor:
    """Return the codes of the nearest values."""
    sizes = torch.tensor(FLOAT4_VALUES[:8], device=values.device)
    codes = torch.bucketize(values.abs(), (sizes[1:] + sizes[:-1]) / 2).to(torch.uint8)
    return codes + 8 * (values < 0).to(torch.uint8)


def _join_halves(codes: Tensor) -> Tensor:
    """Return the 4-bit codes with two in each byte; `codes` has one in each byte."""
    return codes[..., ::2] | codes[..., 1::2] << 4
