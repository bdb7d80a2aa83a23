"""How a step's attention is shared out over a GPU's multiprocessors."""

from __future__ import annotations

import numpy as np

from emberline.kernels.tiles import sms_for_chunks


def given(chunk: int, before: int, singles: int, context: int) -> int:
    """To a chunk of an 8B Llama beside single tokens of so many keys each."""
    cut = np.array([[singles, first] for first in range(0, chunk, 128)], np.int32)
    contexts = np.array([context] * singles + [before], np.int32)
    counts = np.array([1] * singles + [chunk], np.int32)
    return sms_for_chunks(cut, contexts, counts, 128, singles * context * 2 * 8 * 128 * 2, 132)


def test_chunks_leave_some_multiprocessors_to_single_tokens_with_much_to_read() -> None:
    assert given(960, 2048, singles=64, context=4096) == given(960, 2048, singles=16, context=4096) == 110
    assert given(960, 2048, singles=4, context=1000) == given(100, 0, singles=1, context=1) == 132
