"""Dequantises GGUF block formats to float32 with numpy.

Each format has one function. It takes an array (blocks, bytes) and returns an array (blocks, elements).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
TWO_BIT_SHIFTS: Bytes = np.array([0, 2, 4, 6], dtype=np.uint8)
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)
# Twice the values of a four-bit float (E2M1), which are integers; the block's scale is halved for it.
MXFP4_DOUBLED_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
MXFP4_EXPONENT_BIAS = 128  # 127, and one because the values are doubled


def dequantise(raw: memoryview, type_name: str, block_bytes: int) -> Floats:
    """Return the values of consecutive whole blocks as a flat float32 array."""
    blocks = np.frombuffer(raw, dtype=np.uint8).reshape(-1, block_bytes)
    return DECODERS[type_name](blocks).reshape(-1)


def round_to_bf16(values: Floats) -> NDArray[np.uint16]:
    """Return bfloat16 bits, rounded to nearest even as torch does; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = 0x7FC0
    return rounded


def _float16_to_float32(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _split_nibbles(packed: Bytes) -> Bytes:
    """Return the low four bits of all bytes, followed by the high four bits of all bytes."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _unpack_fifth_bits(raw: Bytes) -> Bytes:
    return np.unpackbits(raw, axis=-1, bitorder="little") << np.uint8(4)


def _decode_f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32, copy=False)


def _decode_bf16(blocks: Bytes) -> Floats:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _decode_q8_0(blocks: Bytes) -> Floats:
    return _float16_to_float32(blocks[:, :2]) * blocks[:, 2:].view(np.int8)


def _decode_q4_0(blocks: Bytes) -> Floats:
    return _float16_to_float32(blocks[:, :2]) * (_split_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8))


def _decode_q4_1(blocks: Bytes) -> Floats:
    return _float16_to_float32(blocks[:, :2]) * _split_nibbles(blocks[:, 4:]) + _float16_to_float32(blocks[:, 2:4])


def _decode_q5_0(blocks: Bytes) -> Floats:
    q = _split_nibbles(blocks[:, 6:]) | _unpack_fifth_bits(blocks[:, 2:6])
    return _float16_to_float32(blocks[:, :2]) * (q.view(np.int8) - np.int8(16))


def _decode_q5_1(blocks: Bytes) -> Floats:
    q = _split_nibbles(blocks[:, 8:]) | _unpack_fifth_bits(blocks[:, 4:8])
    return _float16_to_float32(blocks[:, :2]) * q + _float16_to_float32(blocks[:, 2:4])


def _read_k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return the eight scales and the eight minima of each K-quant block.

    A block stores them with six bits each, in twelve bytes that follow two float16 numbers.
    """
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    low, mid, high = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], axis=1)
    return (_float16_to_float32(blocks[:, :2]) * scales)[:, :, None], (_float16_to_float32(blocks[:, 2:4]) * minima)[
        :, :, None
    ]


def _split_bit_pairs(packed: Bytes) -> Bytes:
    """Return the 256 two-bit numbers of 64 bytes, as (blocks, 16, 16).

    Each half of the bytes holds 128 numbers: the lowest two bits of all its bytes, then the next two, and so on.
    """
    pairs: Bytes = packed.reshape(-1, 2, 1, 32) >> TWO_BIT_SHIFTS[:, None] & np.uint8(3)
    return pairs.reshape(-1, 16, 16)


def _decode_q2_k(blocks: Bytes) -> Floats:
    scales: Floats = _float16_to_float32(blocks[:, 80:82]) * (blocks[:, :16] & 15)
    minima: Floats = _float16_to_float32(blocks[:, 82:84]) * (blocks[:, :16] >> 4)
    return scales[:, :, None] * _split_bit_pairs(blocks[:, 16:80]) - minima[:, :, None]


def _decode_q3_k(blocks: Bytes) -> Floats:
    third = np.unpackbits(blocks[:, :32, None], axis=2, bitorder="little").transpose(0, 2, 1)  # bit i: group i
    q = (_split_bit_pairs(blocks[:, 32:96]) | third.reshape(-1, 16, 16) << 2).view(np.int8) - np.int8(4)
    high = (blocks[:, None, 104:108] >> TWO_BIT_SHIFTS[:, None] & 3).reshape(-1, 16)
    codes = (_split_nibbles(blocks[:, 96:104]) | high << 4).view(np.int8) - np.int8(32)
    scales: Floats = _float16_to_float32(blocks[:, 108:110]) * codes
    return scales[:, :, None] * q


def _decode_q4_k(blocks: Bytes) -> Floats:
    scales, minima = _read_k_scales(blocks)
    q = _split_nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return scales * q - minima


def _decode_q5_k(blocks: Bytes) -> Floats:
    scales, minima = _read_k_scales(blocks)
    q = _split_nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").transpose(0, 2, 1)  # bit i: group i
    return scales * (q | fifth << 4) - minima


def _decode_q6_k(blocks: Bytes) -> Floats:
    low = _split_nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    high = _split_bit_pairs(blocks[:, 128:192]).reshape(-1, 8, 32)
    q = ((low | high << 4).view(np.int8) - np.int8(32)).reshape(-1, 16, 16)
    scales = _float16_to_float32(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8)
    return scales[:, :, None] * q


def _decode_iq4_nl(blocks: Bytes) -> Floats:
    return _float16_to_float32(blocks[:, :2]) * IQ4_VALUES[_split_nibbles(blocks[:, 2:])]


def _decode_iq4_xs(blocks: Bytes) -> Floats:
    """Decode eight groups of 32 values. A group's scale has its low four bits in scales_l, its high two in scales_h."""
    high = (blocks[:, 2:4, None] >> TWO_BIT_SHIFTS & 3).reshape(-1, 8)
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    scales: Floats = _float16_to_float32(blocks[:, :2]) * ((low | high << 4).view(np.int8) - np.int8(32))
    return scales[:, :, None] * IQ4_VALUES[_split_nibbles(blocks[:, 8:].reshape(-1, 8, 16))]


def _decode_mxfp4(blocks: Bytes) -> Floats:
    scales: Floats = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - MXFP4_EXPONENT_BIAS)
    return scales * MXFP4_DOUBLED_VALUES[_split_nibbles(blocks[:, 1:])]


DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _decode_f32,
    "F16": _float16_to_float32,
    "BF16": _decode_bf16,
    "Q8_0": _decode_q8_0,
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
    "Q5_0": _decode_q5_0,
    "Q5_1": _decode_q5_1,
    "Q2_K": _decode_q2_k,
    "Q3_K": _decode_q3_k,
    "Q4_K": _decode_q4_k,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
    "IQ4_NL": _decode_iq4_nl,
    "IQ4_XS": _decode_iq4_xs,
    "MXFP4": _decode_mxfp4,
}
