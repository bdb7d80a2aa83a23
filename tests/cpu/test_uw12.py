"""The uw12 format on a CPU is lossless, has the specified layout, and shows every changed byte."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from emberline.kernels.cuda.uw12 import MAX_HEADER_BYTES, UW12Weight, escapes_offset, header_bytes, is_worth_packing
from emberline.kernels.uw12_ref import reference_bases, reference_decode, reference_pack, reference_unpack

ANY = 99.0  # bits per weight: no limit


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def normal(n: int, k: int, scale: float = 0.02) -> Tensor:
    return (torch.randn(n, k) * scale).bfloat16()


def bits(weight: Tensor) -> Tensor:
    return weight.view(torch.int16)


def pack_or_fail(weight: Tensor, most_bits: float = ANY) -> UW12Weight:
    made = reference_pack(weight, max_bits=most_bits)
    assert made is not None
    return made


def assert_exact(weight: Tensor, most_bits: float = ANY) -> UW12Weight:
    made = pack_or_fail(weight, most_bits)
    assert torch.equal(bits(reference_unpack(made)), bits(weight))
    assert made.nbytes == made.planes.nbytes + made.headers.nbytes
    return made


def every_pattern() -> Tensor:
    """Return all 65,536 bit patterns, a sixteenth in each 16 rows, among ordinary weights."""
    weight = normal(256, 1024)
    for block, some in enumerate(torch.randperm(1 << 16).view(16, -1)):
        rows = bits(weight[16 * block : 16 * block + 16]).view(-1)
        rows[torch.randperm(len(rows))[: len(some)]] = (some - (1 << 15)).to(torch.int16)
    return weight


def unusual_rows() -> Tensor:
    weight = normal(128, 256)
    weight[1] = 0.0
    weight[2] = -0.0
    weight[3] = torch.inf
    weight[4] = torch.nan
    bits(weight)[5] = torch.randint(1, 128, (256,), dtype=torch.int16)  # denormal
    bits(weight)[6] = torch.arange(0x7F80, 0x7F80 + 128, dtype=torch.int32).repeat(2).to(torch.int16)  # NaN payloads
    weight[7, ::2] *= 2.0**20  # two exponent windows with as many weights each
    weight[20, 7] = -torch.inf
    weight[40] = 3e38
    weight[41] = 1e-38
    weight[127, 255] = 5.0
    return weight


def test_every_bit_pattern_is_restored() -> None:
    weight = every_pattern()
    assert len(bits(weight).unique()) == 1 << 16
    assert_exact(weight)


def test_unusual_rows_are_restored() -> None:
    assert_exact(unusual_rows())


@pytest.mark.parametrize("n,k", [(64, 64), (64, 576), (192, 128), (128, 4160)])
def test_ordinary_weights_take_little_more_than_12_bits(n: int, k: int) -> None:
    made = assert_exact(normal(n, k), 13.5)
    assert made.planes.numel() == n * k * 3 // 2 and made.header_stride % 16 == 0


@pytest.mark.parametrize("low,high", [(-126, 127), (-100, -20), (-40, 10)])
def test_rows_of_different_scale(low: int, high: int) -> None:
    weight = torch.randn(128, 128).double() * torch.exp2(torch.randint(low, high, (128, 1)).double())
    made = assert_exact(weight.bfloat16())
    assert high > 10 or made.header_stride < escapes_offset(128) + 256


def test_random_bits_are_restored() -> None:
    for _ in range(3):
        assert_exact(torch.randint(-(1 << 15), 1 << 15, (64, 256), dtype=torch.int16).view(torch.bfloat16))


def test_base_codes_most_weights_and_is_the_smallest() -> None:
    weight = torch.cat((every_pattern()[:64], unusual_rows().repeat(1, 4)))
    exponents = bits(weight).int() >> 7 & 0xFF
    windows = torch.arange(128)[:, None] + torch.arange(1, 16)
    coded = torch.stack([(exponents[:, :, None] == window).any(2).sum(1) for window in windows], 1)
    best = coded.max(1).values
    smallest = [int((counts == most).nonzero()[0]) for counts, most in zip(coded, best, strict=True)]
    assert reference_bases(weight).tolist() == smallest


def test_bytes_have_the_specified_layout() -> None:
    """Decode weight by weight from bytes and words, instead of by permuted tensors."""
    n, k = 192, 320
    weight = normal(n, k)
    made = pack_or_fail(weight)
    planes, headers = made.planes.flatten().tolist(), made.headers.tolist()
    for row, column in zip(torch.randint(n, (300,)).tolist(), torch.randint(k, (300,)).tolist(), strict=True):
        word = int(bits(weight)[row, column]) & 0xFFFF
        scale = int.from_bytes(bytes(headers[row // 16][4 * (row % 16) : 4 * (row % 16) + 4]), "little")
        above = (word >> 7 & 0xFF) - ((scale >> 23) - 127)
        assert scale & 0xFFFF == scale >> 16 and scale & 0x7F == 0
        coded = word & 0x807F | above << 7 if 1 <= above <= 15 else 0
        block, unit, within = row // 16, column // 64, column % 64
        h, g, f, q, t, p = row % 16 // 8, row % 8, within // 16, within % 16 // 8, within % 8 // 2, within % 2
        slot, lane = 2 * (h + 2 * q) + p, 4 * g + t
        at = ((block // 4 * (k // 64) + unit) * 4 + block % 4) * 1536
        assert planes[at + f // 2 * 512 + 16 * lane + f % 2 * 8 + slot] == coded & 0xFF
        high = int.from_bytes(bytes(planes[at + 1024 + 16 * lane + 4 * f :][:4]), "little")
        turned = high if slot < 4 else (high << 4 | high >> 28) & 0xFFFFFFFF
        assert turned >> 8 * (slot % 4) & 0x87 == coded >> 8


def test_row_slices_are_packed_weights() -> None:
    weight = unusual_rows()
    made = pack_or_fail(weight)
    assert torch.equal(bits(reference_unpack(made.slice_rows(64, 128))), bits(weight[64:]))
    with pytest.raises(AssertionError):
        made.slice_rows(16, 128)


def test_escapes_are_listed_in_order() -> None:
    made = pack_or_fail(unusual_rows())
    units = made.k // 64
    for header in made.headers:
        starts = header[64 : 64 + 2 * (units + 1)].clone().view(torch.int16).tolist()
        entries = (header[escapes_offset(made.k) :].clone().view(torch.int32).long() & 0xFFFFFFFF).tolist()
        assert starts[0] == 0 and starts == sorted(starts)
        for begin, end in pairwise(starts):
            places = [entry & 0x3FF for entry in entries[begin:end]]
            assert places == sorted(set(places))
        assert not any(entries[starts[-1] :])


def test_every_changed_byte_changes_a_weight() -> None:
    weight = unusual_rows()
    made = pack_or_fail(weight)
    list_bytes = made.headers[0, escapes_offset(made.k) :].count_nonzero()
    assert list_bytes > 100
    for _ in range(40):
        planes = made.planes.clone()
        planes.view(-1)[torch.randint(planes.numel(), ())] ^= 0xFF
        assert not torch.equal(bits(reference_unpack(replace(made, planes=planes))), bits(weight))
    for index in (
        1,
        4 * 9 + 3,
        escapes_offset(made.k) + 2,
        escapes_offset(made.k) + 4 * 17 + 3,
    ):  # scales, values of escapes
        headers = made.headers.clone()
        headers[0, index] ^= 0x41
        assert not torch.equal(bits(reference_unpack(replace(made, headers=headers))), bits(weight)), index


def test_known_words_decode_to_known_weights() -> None:
    """Slot s holds the code 0x100 s + s, negative in odd slots, and rows are scaled by 1 and by 4."""
    low, high = [0x03020100, 0x07060504], 0
    for slot in range(8):
        four = (slot & 7 | (slot % 2) << 7) << 8 * (slot % 4)
        high |= four if slot < 4 else (four >> 4 | four << 28) & 0xFFFFFFFF
    one, four = 0x3F803F80, 0x40804080
    words = [torch.tensor([word]) for word in (*low, high, one, four)]
    registers = reference_decode(*words)[0].tolist()
    for register, pair in enumerate(registers):
        for half in (0, 1):
            slot = 2 * register + half
            code = slot << 8 | slot | (slot % 2) << 15
            assert pair >> 16 * half & 0xFFFF == code + (slot // 2 % 2 * 2 << 7), slot


@pytest.mark.parametrize("n,k", [(96, 64), (64, 96), (16, 64), (0, 64)])
def test_unsupported_shapes_stay_plain(n: int, k: int) -> None:
    assert reference_pack(normal(n, k), max_bits=ANY) is None


def test_incompressible_weights_stay_plain() -> None:
    assert reference_pack(torch.randint(-(1 << 15), 1 << 15, (64, 256), dtype=torch.int16).view(torch.bfloat16)) is None
    assert is_worth_packing(64, 4096, 200) and not is_worth_packing(64, 4096, 4000)
    most = (MAX_HEADER_BYTES - escapes_offset(16384)) // 4
    assert header_bytes(16384, most) == MAX_HEADER_BYTES
    assert is_worth_packing(64, 16384, most, ANY) and not is_worth_packing(64, 16384, most + 1, ANY)
