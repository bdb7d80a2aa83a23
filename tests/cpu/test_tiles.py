"""How a step's attention is shared out over a GPU's multiprocessors."""

from __future__ import annotations

import numpy as np
import torch

from emberline.kernels.attention_plan import AttentionPlanner, WidenedBlocks, choose_prefill_sms


def given(chunk: int, before: int, singles: int, context: int) -> int:
    """To a chunk of an 8B Llama beside single tokens of so many keys each."""
    cut = np.array([[singles, first] for first in range(0, chunk, 128)], np.int32)
    contexts = np.array([context] * singles + [before], np.int32)
    counts = np.array([1] * singles + [chunk], np.int32)
    return choose_prefill_sms(cut, contexts, counts, (32, 8, 128), singles * context * 2 * 8 * 128 * 2, 132)


def test_chunks_leave_multiprocessors_to_single_tokens_with_much_to_read() -> None:
    assert given(960, 2048, singles=4, context=1000) == given(100, 0, singles=1, context=1) == 132
    assert given(960, 2048, singles=16, context=4096) == 110
    assert given(128, 0, singles=64, context=4096) == 16


def test_the_more_there_is_to_multiply_the_more_of_them_chunks_get() -> None:
    """So that reading and multiplying end at about the same time. Measured with 62 single tokens of 4,180 keys beside
    896 tokens at 3,100: with 48 to 72 multiprocessors 314-320 us, 345-350 with 40, 321-325 with 110."""
    assert 48 <= given(896, 3100, singles=62, context=4180) <= 72
    shares = [given(896, before, singles=64, context=4096) for before in (0, 500, 1000, 2000, 3000, 6000, 12000)]
    assert shares == sorted(shares) and len(set(shares)) > 4


def float8_cutter(room: int) -> AttentionPlanner:
    """As on a GPU, with room for so many blocks of 16 keys; nothing of it is launched."""
    cutter = AttentionPlanner((4, 2, 8), torch.zeros(1, 1, 2, 16, 8), torch.bfloat16, 4)
    none = torch.zeros(0)
    cutter._widened = WidenedBlocks(none, none, none, none, none, torch.arange(room, dtype=torch.int32))
    cutter._has_prefill_kernel = cutter._has_decode_kernel = True
    return cutter


def test_widened_rows_lie_one_after_the_other() -> None:
    """Of float8 keys, those that chunks see: each row's blocks in order, none of single tokens'."""
    cutter = float8_cutter(9)
    context, counts = np.array([99, 0, 30, 0]), np.array([1, 16, 3, 1])
    assert cutter._widened is not None
    fast = cutter._count_fast_tokens(context, counts, 1)
    made = cutter._place_widened(cutter._widened, context, fast, torch.from_numpy)
    assert made.count.tolist() == [5] and made.first_blocks.tolist() == [0, 0, 1, 4]
    assert made.sources[:5].tolist() == [[1, 0], [2, 0], [2, 1], [2, 2], [3, 0]] and len(made.sources) == 9
    tables = made.with_tables().tables
    assert tables is not None and tables[2, :3].tolist() == [1, 2, 3] and tables[3, 0] == 4


def test_what_has_no_room_goes_to_the_slower_kernel_and_nothing_else_does() -> None:
    cutter = float8_cutter(4)
    context, counts = np.array([500, 0, 30, 0]), np.array([1, 16, 3, 1])
    assert cutter._count_fast_tokens(context, counts, 1).tolist() == [0, 16, 3, 0]
    padded = counts * np.array([1, 0, 1, 1])
    assert cutter._count_fast_tokens(context, padded, 1).tolist() == [0, 0, 3, 1], "padding takes none"
    assert cutter.can_widen([16, 33]) and not cutter.can_widen([16, 33, 1])
    cutter._widened = None
    assert cutter._count_fast_tokens(context, counts, 1).tolist() == [0, 16, 3, 1] and cutter.can_widen([10**6])


def test_what_sleep_makes_zero_is_wanted_by_nobody() -> None:
    """A runner's buffers are zero when it wakes: the numbers of a row's blocks must not be among them."""
    cutter = float8_cutter(4)
    assert cutter._widened is not None and all(
        buffer is not cutter._widened.block_numbers for buffer in cutter.scratch_buffers()
    )
