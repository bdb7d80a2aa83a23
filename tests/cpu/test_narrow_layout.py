"""The layout of 4-bit codes for CUDA kernels: decoded as the kernels do, it has the values of the matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from narrow_cases import FORMATS, make_matrix

from emberline.kernels.cuda import narrow, narrow_experts, narrow_wide
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES
from emberline.kernels.cuda.narrow_layout import MAX_MXFP4_SCALE, FourBitWeight, count_bytes, pack
from emberline.kernels.four_bit_size import CODE_BYTES
from emberline.kernels.quantise import quantise
from emberline.kernels.quantised_matrix import CodeKind, QuantisedMatrix, dequantise

PACKED = [name for name in FORMATS if not name.startswith("fp8")]
FLOAT4_MASK = 0x81C081C0  # of the bits of two bf16 that codes become


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def unpack(weight: FourBitWeight) -> Tensor:
    """Return the values of all packed rows and columns, [experts, rows, columns]."""
    experts, groups, units, _, _ = weight.data.shape
    words = weight.data[..., :CODE_BYTES].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    words = words.view(experts, groups, units, 4, 2, 8, 4, 4)  # half of columns, row, pair, step
    codes = torch.empty(experts, groups, 4, 2, 8, units, 2, 4, 2, 4, 2)
    for register in range(4):
        decoded = decode_register(words, register, is_float4=weight.format.startswith("Float4"))
        codes[:, :, :, register % 2, :, :, :, :, register // 2] = decoded.permute(0, 1, 3, 5, 2, 4, 7, 6, 8)
    values = codes.reshape(experts, groups * 64, units * 128)
    scales = weight.data[..., CODE_BYTES:].view(experts, groups, units, 4, 16, -1).permute(0, 1, 3, 4, 2, 5)
    return apply_scales(values, scales.reshape(experts, groups * 64, -1), weight)


def decode_register(words: Tensor, register: int, *, is_float4: bool) -> Tensor:
    """Return the two values of a register that the kernels decode from each word."""
    if not is_float4:
        return split_halves(words >> 4 * register & 0xF000F).float()
    rotated = words >> 4 | words << 28
    shifted = (words, words << 6, rotated, words << 2 ^ words >> 6)[register]
    return (from_bf16_bits(split_halves(shifted & FLOAT4_MASK)).double() * 2.0**126).float()


def split_halves(words: Tensor) -> Tensor:
    return torch.stack([words & 0xFFFF, words >> 16], dim=-1)


def from_bf16_bits(bits: Tensor) -> Tensor:
    return (bits << 16).to(torch.int32).view(torch.float32)


def apply_scales(values: Tensor, scales: Tensor, weight: FourBitWeight) -> Tensor:
    rows = 1.0 if weight.row_scales is None else weight.row_scales[..., None]
    if weight.format.startswith("Float4"):
        # As in the kernels: a repeated byte is masked.
        mask, exponent = (0x7F80, 0) if weight.format == "Float4<4>" else (0x7F0, 220)
        scale = from_bf16_bits(scales.long() * 0x101 & mask).double() * 2.0**exponent
        expanded = (scale * 2.0**-126 * weight.factor * rows).float()
    else:
        parts, zeros = scales.contiguous().view(torch.int16), torch.tensor(8.0)
        if "true" in weight.format:
            zeros = parts[..., 1::2].contiguous().view(torch.bfloat16).float() * -64
            parts = parts[..., ::2].contiguous()
            zeros = zeros.repeat_interleave(values.shape[-1] // zeros.shape[-1], -1)
        values, expanded = (values - zeros) / 64, parts.view(torch.float16).float() * weight.factor * rows
    return values * expanded.repeat_interleave(values.shape[-1] // expanded.shape[-1], -1)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("shape", [(96, 384), (3, 32, 256), (64, 192)])
def test_packed_matrices_have_the_same_values(name: str, shape: tuple[int, ...]) -> None:
    if ("128" in name and shape[-1] % 128) or ("order" in name and len(shape) == 3):
        return
    matrix = make_matrix(name, *shape, device="cpu")
    packed = pack(matrix)
    assert packed is not None
    wanted = dequantise(replace(matrix, columns=None)).view(-1, *shape[-2:])
    torch.testing.assert_close(unpack(packed)[:, : matrix.n, : matrix.k], wanted, rtol=1e-6, atol=0)
    assert packed.data.shape[1:3] == (-(-matrix.n // 64), -(-matrix.k // 128))
    assert packed.nbytes == count_bytes(matrix)
    gated = pack(matrix, gated=True)
    assert gated is not None and gated.gated
    pairs = wanted.view(-1, 2, matrix.n // 16, 8, matrix.k).transpose(1, 2).reshape(wanted.shape)
    if gated.row_scales is None:  # those have the order of the rows, which are not packed
        torch.testing.assert_close(unpack(gated)[:, : matrix.n, : matrix.k], pairs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_float4_codes_are_exact_with_each_scale(kind: CodeKind) -> None:
    n, k = 128, 1024
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    if kind == "mxfp4":  # smaller exponents have no bf16
        scales, group = torch.arange(n * k // 32).remainder(MAX_MXFP4_SCALE - 26).add(27).to(torch.uint8), 32
    else:
        scales, group = torch.arange(n * k // 16).remainder(127).to(torch.uint8).view(torch.float8_e4m3fn), 16
    row_scale = torch.exp2(torch.randint(-3, 3, (n,)).float()) if kind == "nvfp4" else None
    matrix = QuantisedMatrix(kind, codes, scales.view(n, -1), 1, group, row_scale=row_scale)
    packed = pack(matrix)
    assert packed is not None
    values = unpack(packed)[0]
    assert torch.equal(values, dequantise(matrix))
    assert torch.equal(values, values.bfloat16().float())


def test_matrices_that_cannot_be_packed() -> None:
    values = torch.randn(32, 384)
    assert pack(quantise(values, "fp8")) is None
    assert pack(quantise(values, "int4", 1, 48)) is None
    assert pack(quantise(values[:24], "int4", 1, 128)) is None
    matrix = quantise(values, "int4", 1, 128)
    assert pack(replace(matrix, scales=matrix.scales.float() * 1.0001)) is None


def test_scales_that_need_factors_of_rows() -> None:
    """Whether a matrix can be packed does not depend on its values: zeros stand for it while kernels are compiled."""
    values = torch.randn(32, 384)
    large = quantise(values, "mxfp4")
    large = replace(large, scales=large.scales + torch.arange(0, 64, 2, dtype=torch.uint8)[:, None])
    different = quantise(values, "int4", 1, 128)
    powers = torch.exp2(2.0 * torch.arange(-16, 16)).to(different.scales.dtype)
    different = replace(different, scales=different.scales * powers[:, None])
    for matrix in (large, different):
        packed = pack(matrix)
        assert packed is not None and packed.row_scales is not None
        torch.testing.assert_close(unpack(packed)[0, :32], dequantise(matrix), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("n", "k", "unit_bytes"), [(28672, 4096, 1056), (5760, 2880, 1088), (7168, 256, 1152)])
def test_plans_fit_into_shared_memory(n: int, k: int, unit_bytes: int) -> None:
    units = -(-k // 128)
    for rows in (1, 8, 9, 16, 32):
        for tiles in (1, 40):
            plan = narrow.choose_plan(rows, tiles, n, units, unit_bytes)
            limit = MAX_SHARED_BYTES // plan.ctas_per_sm
            assert 8 * plan.tiles >= rows and plan.stages > 1 and plan.layout_bytes(rows, unit_bytes) <= limit
    for rows in (17, 64, 65, 256):
        wide = narrow_wide.choose_plan(rows, 1, n, units, unit_bytes)
        assert wide.stages > 1 and wide.shared_bytes(unit_bytes) <= MAX_SHARED_BYTES and wide.parts <= units


def test_few_rows_get_small_tiles() -> None:
    assert [narrow.choose_tile_rows(rows * 8, 384) for rows in (1, 64, 512)] == [8, 8, 16]
    assert [narrow_wide.choose_tile_rows(rows * 4, 32) for rows in (64, 512, 4096)] == [32, 128, 128]


@pytest.mark.parametrize("kind,most", [("mxfp4", 8), ("int4", 16)])
def test_experts_with_many_rows_get_the_kernels_for_them(kind: CodeKind, most: int) -> None:
    """Of mxfp4 from fewer rows on, since products overlap with decoding there."""
    packed = pack(quantise(torch.randn(64, 128), kind, group_columns=32))
    assert packed is not None
    assert narrow_experts.choose_kernels(most * 32, 32, (packed, packed)) is narrow
    assert narrow_experts.choose_kernels(most * 32 + 1, 32, (packed, packed)) is narrow_wide
