"""Dequantises GGUF block formats to float32 with numpy.

Each format has one function. It takes an array (blocks, bytes) and returns an array (blocks, elements).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def dequantise(raw: memoryview, type_name: str, block_bytes: int) -> Floats:
    """Return the values of consecutive whole blocks as a flat float32 array."""
    blocks = np.frombuffer(raw, dtype=np.uint8).reshape(-1, block_bytes)
    return DECODERS[type_name](blocks).reshape(-1)


def round_to_bf16(x: Floats) -> NDArray[np.uint16]:
    """Return bfloat16 bits, rounded to nearest even as torch does; NaN stays NaN."""
    bits = x.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        rounded[nan] = 0x7FC0
    return rounded


def _half(b: Bytes) -> Floats:
    return np.ascontiguousarray(b).view("<f2").astype(np.float32)


def _nibbles(q: Bytes) -> Bytes:
    """Return the low four bits of all bytes, followed by the high four bits of all bytes."""
    return np.concatenate([q & 15, q >> 4], axis=-1)


def _fifth_bits(b: Bytes) -> Bytes:
    return np.unpackbits(b, axis=-1, bitorder="little") << np.uint8(4)


def _f32(b: Bytes) -> Floats:
    return np.ascontiguousarray(b).view("<f4").astype(np.float32, copy=False)


def _bf16(b: Bytes) -> Floats:
    return (np.ascontiguousarray(b).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(b: Bytes) -> Floats:
    return _half(b[:, :2]) * b[:, 2:].view(np.int8)


def _q4_0(b: Bytes) -> Floats:
    return _half(b[:, :2]) * (_nibbles(b[:, 2:]).view(np.int8) - np.int8(8))


def _q4_1(b: Bytes) -> Floats:
    return _half(b[:, :2]) * _nibbles(b[:, 4:]) + _half(b[:, 2:4])


def _q5_0(b: Bytes) -> Floats:
    q = _nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])
    return _half(b[:, :2]) * (q.view(np.int8) - np.int8(16))


def _q5_1(b: Bytes) -> Floats:
    q = _nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])
    return _half(b[:, :2]) * q + _half(b[:, 2:4])


def _k_scales(b: Bytes) -> tuple[Floats, Floats]:
    """Return the eight scales and the eight minima of each K-quant block.

    A block stores them with six bits each, in twelve bytes that follow two float16 numbers.
    """
    packed = b[:, 4:16].reshape(-1, 3, 4)
    low, mid, high = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], axis=1)
    return (_half(b[:, :2]) * scales)[:, :, None], (_half(b[:, 2:4]) * minima)[:, :, None]


def _q4_k(b: Bytes) -> Floats:
    scales, minima = _k_scales(b)
    q = _nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return scales * q - minima


def _q5_k(b: Bytes) -> Floats:
    scales, minima = _k_scales(b)
    q = _nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = np.unpackbits(b[:, 16:48, None], axis=2, bitorder="little").transpose(0, 2, 1)  # bit i: group i
    return scales * (q | fifth << 4) - minima


def _q6_k(b: Bytes) -> Floats:
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 8, 32)
    q = ((low | high << 4).view(np.int8) - np.int8(32)).reshape(-1, 16, 16)
    scales = _half(b[:, 208:210]) * b[:, 192:208].view(np.int8)
    return scales[:, :, None] * q


DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _f32,
    "F16": _half,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
