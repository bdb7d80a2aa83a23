"""Reference of the uw12 format, in torch on a CPU.

It gives the same bytes as the kernels in `cuda/uw12.cu`. uw12 stores bf16 weights losslessly in a little over 12 bits.
Each row has a base in 0..127. A weight with sign s, exponent e and mantissa m is coded if it is +0 or -0, or if c = e -
base is in 1..15. Its code is s 0000 cccc mmmmmmm, which is the weight divided by 2^base; the four zero bits are not
stored. Any other weight is an escape: its code is that of +0, and its 16 bits are stored in a separate list. The base
of a row is the one with the fewest escapes; of several such bases, the smallest. `cuda/uw12.cuh` describes the memory
layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.kernels.cuda.uw12 import (
    BLOCK_ROWS,
    MAX_BITS,
    STARTS_OFFSET,
    UNIT_BYTES,
    UNIT_K,
    UW12Weight,
    escapes_offset,
    header_bytes,
    is_worth_packing,
)
from emberline.kernels.cuda.uw12 import supports as can_be_packed

NUM_BASES, EXPONENT_WINDOW = 128, 15
SIGN_EXPONENT_MASK = 0x87878787
WORD_MASK = 0xFFFFFFFF


def reference_pack(weight: Tensor, *, max_bits: float = MAX_BITS) -> UW12Weight | None:
    """Return the packed weight, or None if the shape is unsupported or packing does not save enough.

    The packed weight must need less than `max_bits` bits per element.
    """
    n, k = weight.shape
    if not can_be_packed(n, k):
        return None
    bits = weight.contiguous().view(torch.int16).long() & 0xFFFF
    bases = reference_bases(weight)
    codes, escaped = _encode_weights(bits, bases)
    escape_mask = (
        _to_mma_fragments(escaped).unflatten(-1, (4, 2)).permute(0, 1, 5, 2, 4, 3)
    )  # [block, unit, half, f, r, lane]
    counts = escape_mask.flatten(2).sum(-1)
    max_escapes = int(counts.sum(1).max())
    if not is_worth_packing(n, k, max_escapes, max_bits):
        return None
    words = _to_mma_fragments(bits).unflatten(-1, (4, 2)).permute(0, 1, 5, 2, 4, 3)
    headers = _make_headers(bases, counts, escape_mask, words, header_bytes(k, max_escapes))
    return UW12Weight(_to_byte_planes(_to_mma_fragments(codes)), headers, n, k)


def reference_unpack(packed: UW12Weight) -> Tensor:
    blocks, units = packed.n // BLOCK_ROWS, packed.k // UNIT_K
    planes = packed.planes.transpose(1, 2).reshape(blocks, units, UNIT_BYTES)
    low = _to_words(planes[..., :1024]).view(blocks, units, 2, 32, 2, 2).transpose(3, 4).flatten(2, 3)
    high = _to_words(planes[..., 1024:]).view(blocks, units, 32, 4).transpose(2, 3)
    scales = _to_words(packed.headers[:, :STARTS_OFFSET]).view(blocks, 1, 1, 2, 8, 1)
    scales = scales.expand(blocks, units, 4, 2, 8, 4).flatten(4)  # for rows g and g + 8 of lane 4 g + t
    pairs = reference_decode(low[..., 0], low[..., 1], high, scales[..., 0, :], scales[..., 1, :])
    halves = torch.stack((pairs & 0xFFFF, pairs >> 16), -1)  # [block, unit, f, lane, r, half]
    _restore_escapes(halves, packed)
    g, t, q, h = 8, 4, 2, 2
    rows = halves.view(blocks, units, 4, g, t, q, h, 2).permute(0, 6, 3, 1, 2, 5, 4, 7)
    return _sign_extend(rows.reshape(packed.n, packed.k), 16).to(torch.int16).view(torch.bfloat16)


def reference_bases(weight: Tensor) -> Tensor:
    exponents = weight.contiguous().view(torch.int16).long() >> 7 & 0xFF
    counts = torch.zeros(len(weight), 257, dtype=torch.int64).scatter_add_(1, exponents + 1, torch.ones_like(exponents))
    below = counts.cumsum(1)  # [:, e]: number of weights with an exponent below e
    coded = below[:, EXPONENT_WINDOW + 1 : EXPONENT_WINDOW + 1 + NUM_BASES] - below[:, 1 : 1 + NUM_BASES]
    return (coded * NUM_BASES + torch.arange(NUM_BASES - 1, -1, -1)).argmax(1)


def reference_decode(low0: Tensor, low1: Tensor, high: Tensor, scale: Tensor, scale8: Tensor) -> Tensor:
    """Decode one thread's words into four registers of an MMA operand, step by step as the kernel does."""
    first, second = high & SIGN_EXPONENT_MASK, _rotate_left(high, 4) & SIGN_EXPONENT_MASK
    return torch.stack(
        (
            _multiply_pairs(_select_bytes(low0, first, 0x5140), scale),
            _multiply_pairs(_select_bytes(low0, first, 0x7362), scale8),
            _multiply_pairs(_select_bytes(low1, second, 0x5140), scale),
            _multiply_pairs(_select_bytes(low1, second, 0x7362), scale8),
        ),
        -1,
    )


def _encode_weights(bits: Tensor, bases: Tensor) -> tuple[Tensor, Tensor]:
    """Return the code of each weight, and a mask of the escapes (weights that have no code)."""
    above = (bits >> 7 & 0xFF) - bases[:, None]
    zero = bits & 0x7FFF == 0
    inside = (above >= 1) & (above <= EXPONENT_WINDOW)
    codes = torch.where(inside, bits & 0x807F | above << 7, torch.where(zero, bits, 0))
    return codes, ~(inside | zero)


def _to_mma_fragments(rows: Tensor) -> Tensor:
    """Rearrange [n, k] into [n / 16, k / 64, fragment, lane, 2 * register + half]."""
    n, k = rows.shape
    h, g, q, t, p = 2, 8, 2, 4, 2
    return rows.view(n // BLOCK_ROWS, h, g, k // UNIT_K, 4, q, t, p).permute(0, 3, 4, 2, 6, 5, 1, 7).reshape(
        n // BLOCK_ROWS, k // UNIT_K, 4, 32, 8
    )  # fmt: skip


def _to_byte_planes(codes: Tensor) -> Tensor:
    blocks, units = codes.shape[:2]
    low = (codes & 0xFF).to(torch.uint8).view(blocks, units, 2, 2, 32, 8).transpose(3, 4).reshape(blocks, units, 1024)
    nibbles = codes >> 8 & 0x87
    shifts = torch.arange(0, 32, 8)
    first, second = ((nibbles[..., i : i + 4] << shifts).sum(-1) for i in (0, 4))
    high = first | _rotate_left(second, 28)
    planes = torch.cat((low, _to_bytes(high.transpose(2, 3).reshape(blocks, units, 128))), -1)
    return planes.view(blocks // 4, 4, units, UNIT_BYTES).transpose(1, 2).contiguous()


def _make_headers(bases: Tensor, counts: Tensor, escape_mask: Tensor, words: Tensor, header_stride: int) -> Tensor:
    blocks, units = counts.shape
    headers = torch.zeros(blocks, header_stride, dtype=torch.uint8)
    scale = bases + 127 << 7
    headers[:, :STARTS_OFFSET] = _to_bytes((scale << 16 | scale).view(blocks, BLOCK_ROWS))
    starts = torch.cat((torch.zeros(blocks, 1, dtype=torch.int64), counts.cumsum(1)), 1)
    headers[:, STARTS_OFFSET : STARTS_OFFSET + 2 * units + 2] = (
        _sign_extend(starts, 16).to(torch.int16).view(torch.uint8)
    )
    block, _, half, f, r, lane = escape_mask.nonzero().unbind(1)  # ordered in a unit by half, register and lane
    entries = words[escape_mask] << 16 | half << 9 | (4 * f + r) << 5 | lane
    totals = counts.sum(1)
    index = torch.arange(len(block)) - (totals.cumsum(0) - totals)[block]
    lists = headers[:, escapes_offset(UNIT_K * units) :].unflatten(1, (-1, 4))
    lists[block, index] = _to_bytes(entries[:, None])
    return headers


def _restore_escapes(halves: Tensor, packed: UW12Weight) -> None:
    """Set the escapes, which were decoded as +0, to their bits by a bitwise OR, as the kernel does."""
    units = packed.k // UNIT_K
    starts = (
        packed.headers[:, STARTS_OFFSET : STARTS_OFFSET + 2 * units + 2].contiguous().view(torch.int16).long() & 0xFFFF
    )
    counts = starts.diff(dim=1).flatten()
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)  # the unit of each escape
    block, unit = owner // units, owner % units
    index = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner] + starts[block, unit]
    entries = _to_words(packed.headers[:, escapes_offset(packed.k) :])[block, index]
    at = block, unit, entries >> 7 & 3, entries & 31, entries >> 5 & 3, entries >> 9 & 1
    halves[at] = halves[at] | entries >> 16


def _select_bytes(a: Tensor, b: Tensor, selector: int) -> Tensor:
    """Return a word with four of the eight bytes of a and b, which `selector` selects as in the PTX prmt."""
    selected = [selector >> 4 * i & 7 for i in range(4)]
    picked = [((b if byte > 3 else a) >> 8 * (byte % 4) & 0xFF) << 8 * i for i, byte in enumerate(selected)]
    return picked[0] | picked[1] | picked[2] | picked[3]


def _multiply_pairs(a: Tensor, b: Tensor) -> Tensor:
    """Multiply the two bf16 numbers in each word of `a` by those in the word of `b`."""
    x, y = (_sign_extend(word, 32).to(torch.int32)[..., None].view(torch.bfloat16) for word in (a, b.expand_as(a)))
    return _to_words((x * y).view(torch.uint8))[..., 0]


def _rotate_left(word: Tensor, num_bits: int) -> Tensor:
    return (word << num_bits | word >> 32 - num_bits) & WORD_MASK


def _to_words(data: Tensor) -> Tensor:
    """Return the bytes as unsigned 32-bit words in an int64 tensor."""
    return data.contiguous().view(torch.int32).long() & WORD_MASK


def _to_bytes(words: Tensor) -> Tensor:
    return _sign_extend(words, 32).to(torch.int32).view(torch.uint8)


def _sign_extend(value: Tensor, bits: int) -> Tensor:
    return value - (value >> bits - 1 << bits)
