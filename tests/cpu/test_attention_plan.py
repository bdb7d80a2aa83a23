"""How the plan of a step's attention divides a GPU's SMs and memory between prefill and decode."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emberline.kernels.attention_plan import AttentionPlanner, WidenedBlocks, choose_prefill_sms, count_decode_keys


def chosen_sms(chunk: int, before: int, singles: int, context: int) -> int:
    """Return the SMs that a prefill chunk of Llama 8B gets beside decode rows of so many keys each."""
    cut = np.array([[singles, first] for first in range(0, chunk, 128)], np.int32)
    contexts = np.array([context] * singles + [before], np.int32)
    counts = np.array([1] * singles + [chunk], np.int32)
    return choose_prefill_sms(cut, contexts, counts, (32, 8, 128), singles * context * 2 * 8 * 128 * 2, 132)


def test_prefill_leaves_sms_to_decode_with_many_keys() -> None:
    assert chosen_sms(960, 2048, singles=4, context=1000) == chosen_sms(100, 0, singles=1, context=1) == 132
    assert chosen_sms(960, 2048, singles=16, context=4096) == 110
    assert chosen_sms(128, 0, singles=64, context=4096) == 16


def test_prefill_with_more_work_gets_more_sms() -> None:
    """Prefill and decode should end at about the same time.

    Measured with 62 decode rows of 4,180 keys beside 896 tokens at 3,100: 314-320 us with 48 to 72 SMs, 345-350 us with
    40, 321-325 us with 110.
    """
    assert 48 <= chosen_sms(896, 3100, singles=62, context=4180) <= 72
    shares = [chosen_sms(896, before, singles=64, context=4096) for before in (0, 500, 1000, 2000, 3000, 6000, 12000)]
    assert shares == sorted(shares) and len(set(shares)) > 4


def float8_planner(blocks: int) -> AttentionPlanner:
    """Return a planner as on a GPU, with memory for so many blocks of 16 keys; no kernel is launched."""
    planner = AttentionPlanner((4, 2, 8), torch.zeros(1, 1, 2, 16, 8), torch.bfloat16, 4)
    empty = torch.zeros(0)
    planner._widened = WidenedBlocks(empty, empty, empty, empty, empty, torch.arange(blocks, dtype=torch.int32))
    planner._has_prefill_kernel = planner._has_decode_kernel = True
    return planner


def test_widened_blocks_are_contiguous_by_row() -> None:
    """Float8 blocks of prefill rows are copied row by row, in order; those of decode rows are not."""
    planner = float8_planner(9)
    context, counts = np.array([99, 0, 30, 0]), np.array([1, 16, 3, 1])
    assert planner._widened is not None
    fast = planner._count_widened_tokens(context, counts, 1)
    widened = planner._assign_widened_blocks(planner._widened, context, fast, torch.from_numpy)
    assert widened.count.tolist() == [5] and widened.first_blocks.tolist() == [0, 0, 1, 4]
    assert widened.sources[:5].tolist() == [[1, 0], [2, 0], [2, 1], [2, 2], [3, 0]] and len(widened.sources) == 9
    tables = widened.with_block_tables().tables
    assert tables is not None and tables[2, :3].tolist() == [1, 2, 3] and tables[3, 0] == 4


def test_only_rows_that_do_not_fit_use_the_slower_kernel() -> None:
    planner = float8_planner(4)
    context, counts = np.array([500, 0, 30, 0]), np.array([1, 16, 3, 1])
    assert planner._count_widened_tokens(context, counts, 1).tolist() == [0, 16, 3, 0]
    padded = counts * np.array([1, 0, 1, 1])
    assert planner._count_widened_tokens(context, padded, 1).tolist() == [0, 0, 3, 1], "padding takes none"
    assert planner.can_widen_blocks([16, 33]) and not planner.can_widen_blocks([16, 33, 1])
    planner._widened = None
    assert planner._count_widened_tokens(context, counts, 1).tolist() == [
        0,
        16,
        3,
        1,
    ] and planner.can_widen_blocks([10**6])


def test_decode_rows_may_have_several_new_tokens() -> None:
    """The plan carries the limit, which selects the kernel, and rejects rows with more tokens."""
    context, counts = np.array([100, 63, 7, 0], np.int32), np.array([5, 1, 0, 40], np.int32)
    assert count_decode_keys(context, counts).tolist() == [105, 64, 0, 40], "padding reads nothing"
    planner = AttentionPlanner((4, 2, 8), torch.zeros(1, 1, 2, 16, 8), torch.bfloat16, 4)
    plan = planner.plan(context, counts, 3, torch.from_numpy, max_queries=5)
    assert (plan.decode_rows, plan.max_queries) == (3, 5)
    assert planner.plan(context, np.minimum(counts, 1), 3, torch.from_numpy).max_queries == 1
    with pytest.raises(AssertionError, match="too many new tokens"):
        planner.plan(context, counts, 3, torch.from_numpy, max_queries=4)


def test_scratch_buffers_may_be_zeroed_by_sleep() -> None:
    """Waking from sleep zeroes the scratch buffers, so block_numbers must not be among them."""
    planner = float8_planner(4)
    assert planner._widened is not None and all(
        buffer is not planner._widened.block_numbers for buffer in planner.scratch_buffers()
    )
