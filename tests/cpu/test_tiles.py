"""How a step's attention is shared out over a GPU's multiprocessors."""

from __future__ import annotations

import numpy as np
import torch

from emberline.kernels.tiles import Cutter, Widened, sms_for_chunks


def given(chunk: int, before: int, singles: int, context: int) -> int:
    """To a chunk of an 8B Llama beside single tokens of so many keys each."""
    cut = np.array([[singles, first] for first in range(0, chunk, 128)], np.int32)
    contexts = np.array([context] * singles + [before], np.int32)
    counts = np.array([1] * singles + [chunk], np.int32)
    return sms_for_chunks(cut, contexts, counts, (32, 8, 128), singles * context * 2 * 8 * 128 * 2, 132)


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


def test_widened_rows_lie_one_after_the_other() -> None:
    """Of float8 keys, those that chunks see: each row's blocks in order, none of single tokens'."""
    keys = torch.zeros(1, 1, 2, 16, 8)
    cutter = Cutter((4, 2, 8), keys, torch.bfloat16, 4)
    room = Widened(keys[0], keys[0], *(torch.zeros(0),) * 3, steps=torch.arange(9, dtype=torch.int32))
    made = cutter._widened(room, np.array([100, 16, 33, 1]), 1, torch.from_numpy)
    assert made.count.tolist() == [5] and made.bases.tolist() == [0, 0, 1, 4]
    assert made.pieces[:5].tolist() == [[1, 0], [2, 0], [2, 1], [2, 2], [3, 0]] and len(made.pieces) == 9
    tables = made.laid().tables
    assert tables is not None and tables[2, :3].tolist() == [1, 2, 3] and tables[3, 0] == 4


def test_what_does_not_fit_is_not_widened() -> None:
    cutter = Cutter((4, 2, 8), torch.zeros(1, 1, 2, 16, 8), torch.bfloat16, 4)
    assert cutter.fits([10**6]), "nothing has to be"
    cutter._room = Widened(*(torch.zeros(0),) * 5, steps=torch.arange(3))
    assert cutter.fits([16, 17]) and not cutter.fits([16, 33])
