"""uw12 on a CPU, in torch: what `cuda/uw12.cu` packs, byte for byte, and how its kernels decode it, word for word.

Lossless bf16 in 12 bits and a little. A row has a base in 0..127. A weight with sign s, exponent e and mantissa m is
coded if it is +-0, or if c = e - base is in 1..15: as s 0000 cccc mmmmmmm, the same weight divided by 2^base, of which
four bits need not be kept. Anything else is an escape: +0 here, and its bits in a list. The base is the one that codes
most of the row's weights, the smallest among equals. How the rest lies in memory is told in `cuda/uw12.cuh`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.kernels.cuda.uw12 import BLOCK, MOST_BITS, STARTS_AT, UNIT, UNIT_BYTES, Packed, fits, lists_at, stride_of
from emberline.kernels.cuda.uw12 import supports as can_be_packed

BASES, WINDOW = 128, 15
SIGN_AND_EXPONENT = 0x87878787
WORD = 0xFFFFFFFF


def reference_pack(weight: Tensor, *, most_bits: float = MOST_BITS) -> Packed | None:
    """None where it would take more bits a weight than that, or cannot be."""
    n, k = weight.shape
    if not can_be_packed(n, k):
        return None
    bits = weight.contiguous().view(torch.int16).long() & 0xFFFF
    bases = reference_bases(weight)
    codes, escaped = _coded(bits, bases)
    missed = _fragments(escaped).unflatten(-1, (4, 2)).permute(0, 1, 5, 2, 4, 3)  # [block, unit, half, f, r, lane]
    counts = missed.flatten(2).sum(-1)
    most = int(counts.sum(1).max())
    if not fits(n, k, most, most_bits):
        return None
    words = _fragments(bits).unflatten(-1, (4, 2)).permute(0, 1, 5, 2, 4, 3)
    headers = _headers(bases, counts, missed, words, stride_of(k, most))
    return Packed(_planes(_fragments(codes)), headers, n, k)


def reference_unpack(packed: Packed) -> Tensor:
    blocks, units = packed.n // BLOCK, packed.k // UNIT
    planes = packed.planes.transpose(1, 2).reshape(blocks, units, UNIT_BYTES)
    low = _words(planes[..., :1024]).view(blocks, units, 2, 32, 2, 2).transpose(3, 4).flatten(2, 3)
    high = _words(planes[..., 1024:]).view(blocks, units, 32, 4).transpose(2, 3)
    scales = _words(packed.headers[:, :STARTS_AT]).view(blocks, 1, 1, 2, 8, 1)
    scales = scales.expand(blocks, units, 4, 2, 8, 4).flatten(4)  # of rows g and g + 8 of lane 4 g + t
    pairs = reference_decode(low[..., 0], low[..., 1], high, scales[..., 0, :], scales[..., 1, :])
    halves = torch.stack((pairs & 0xFFFF, pairs >> 16), -1)  # [block, unit, f, lane, r, half]
    _patch(halves, packed)
    g, t, q, h = 8, 4, 2, 2
    rows = halves.view(blocks, units, 4, g, t, q, h, 2).permute(0, 6, 3, 1, 2, 5, 4, 7)
    return _signed(rows.reshape(packed.n, packed.k), 16).to(torch.int16).view(torch.bfloat16)


def reference_bases(weight: Tensor) -> Tensor:
    exponents = weight.contiguous().view(torch.int16).long() >> 7 & 0xFF
    counts = torch.zeros(len(weight), 257, dtype=torch.int64).scatter_add_(1, exponents + 1, torch.ones_like(exponents))
    below = counts.cumsum(1)  # [:, e]: of weights with an exponent under e
    coded = below[:, WINDOW + 1 : WINDOW + 1 + BASES] - below[:, 1 : 1 + BASES]
    return (coded * BASES + torch.arange(BASES - 1, -1, -1)).argmax(1)


def reference_decode(low0: Tensor, low1: Tensor, high: Tensor, scale: Tensor, scale8: Tensor) -> Tensor:
    """A fragment's four registers (last dimension) from the words of a lane, by the instructions of the kernel."""
    first, second = high & SIGN_AND_EXPONENT, _rotated_left(high, 4) & SIGN_AND_EXPONENT
    return torch.stack(
        (
            _multiplied(_bytes_of(low0, first, 0x5140), scale),
            _multiplied(_bytes_of(low0, first, 0x7362), scale8),
            _multiplied(_bytes_of(low1, second, 0x5140), scale),
            _multiplied(_bytes_of(low1, second, 0x7362), scale8),
        ),
        -1,
    )


def _coded(bits: Tensor, bases: Tensor) -> tuple[Tensor, Tensor]:
    """The weights' codes, and which of them are escapes."""
    above = (bits >> 7 & 0xFF) - bases[:, None]
    zero = bits & 0x7FFF == 0
    inside = (above >= 1) & (above <= WINDOW)
    codes = torch.where(inside, bits & 0x807F | above << 7, torch.where(zero, bits, 0))
    return codes, ~(inside | zero)


def _fragments(rows: Tensor) -> Tensor:
    """[n, k] as [n / 16, k / 64, fragment, lane, 2 register + half]."""
    n, k = rows.shape
    h, g, q, t, p = 2, 8, 2, 4, 2
    return rows.view(n // BLOCK, h, g, k // UNIT, 4, q, t, p).permute(0, 3, 4, 2, 6, 5, 1, 7).reshape(
        n // BLOCK, k // UNIT, 4, 32, 8
    )  # fmt: skip


def _planes(codes: Tensor) -> Tensor:
    blocks, units = codes.shape[:2]
    low = (codes & 0xFF).to(torch.uint8).view(blocks, units, 2, 2, 32, 8).transpose(3, 4).reshape(blocks, units, 1024)
    nibbles = codes >> 8 & 0x87
    shifts = torch.arange(0, 32, 8)
    first, second = ((nibbles[..., i : i + 4] << shifts).sum(-1) for i in (0, 4))
    high = first | _rotated_left(second, 28)
    planes = torch.cat((low, _as_bytes(high.transpose(2, 3).reshape(blocks, units, 128))), -1)
    return planes.view(blocks // 4, 4, units, UNIT_BYTES).transpose(1, 2).contiguous()


def _headers(bases: Tensor, counts: Tensor, missed: Tensor, words: Tensor, stride: int) -> Tensor:
    blocks, units = counts.shape
    headers = torch.zeros(blocks, stride, dtype=torch.uint8)
    scale = bases + 127 << 7
    headers[:, :STARTS_AT] = _as_bytes((scale << 16 | scale).view(blocks, BLOCK))
    starts = torch.cat((torch.zeros(blocks, 1, dtype=torch.int64), counts.cumsum(1)), 1)
    headers[:, STARTS_AT : STARTS_AT + 2 * units + 2] = _signed(starts, 16).to(torch.int16).view(torch.uint8)
    block, _, half, f, r, lane = missed.nonzero().unbind(1)  # in order: of a unit, by half, register and lane
    entries = words[missed] << 16 | half << 9 | (4 * f + r) << 5 | lane
    totals = counts.sum(1)
    place = torch.arange(len(block)) - (totals.cumsum(0) - totals)[block]
    lists = headers[:, lists_at(UNIT * units) :].unflatten(1, (-1, 4))
    lists[block, place] = _as_bytes(entries[:, None])
    return headers


def _patch(halves: Tensor, packed: Packed) -> None:
    """Escapes where decoding left +0: their bits are added by an OR, as in the kernel."""
    units = packed.k // UNIT
    starts = packed.headers[:, STARTS_AT : STARTS_AT + 2 * units + 2].contiguous().view(torch.int16).long() & 0xFFFF
    counts = starts.diff(dim=1).flatten()
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)  # the unit of each escape
    block, unit = owner // units, owner % units
    place = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner] + starts[block, unit]
    entries = _words(packed.headers[:, lists_at(packed.k) :])[block, place]
    at = block, unit, entries >> 7 & 3, entries & 31, entries >> 5 & 3, entries >> 9 & 1
    halves[at] = halves[at] | entries >> 16


def _bytes_of(a: Tensor, b: Tensor, selector: int) -> Tensor:
    """prmt: a word of four of the eight bytes of a and b."""
    chosen = [selector >> 4 * i & 7 for i in range(4)]
    picked = [((b if byte > 3 else a) >> 8 * (byte % 4) & 0xFF) << 8 * i for i, byte in enumerate(chosen)]
    return picked[0] | picked[1] | picked[2] | picked[3]


def _multiplied(a: Tensor, b: Tensor) -> Tensor:
    """Two products of bf16 in a word."""
    x, y = (_signed(word, 32).to(torch.int32)[..., None].view(torch.bfloat16) for word in (a, b.expand_as(a)))
    return _words((x * y).view(torch.uint8))[..., 0]


def _rotated_left(word: Tensor, by: int) -> Tensor:
    return (word << by | word >> 32 - by) & WORD


def _words(data: Tensor) -> Tensor:
    """Bytes as unsigned 32-bit words, in 64 bits each."""
    return data.contiguous().view(torch.int32).long() & WORD


def _as_bytes(words: Tensor) -> Tensor:
    return _signed(words, 32).to(torch.int32).view(torch.uint8)


def _signed(value: Tensor, bits: int) -> Tensor:
    return value - (value >> bits - 1 << bits)
