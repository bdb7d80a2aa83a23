"""choose_victim: which running request loses its KV blocks when another one needs blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from emberline.core.request import Request
from emberline.kv.rank_managers import AnyKVManager, RankKVManagers


def choose_victim(
    request: Request,
    running: Sequence[Request],
    rank: Callable[[Request], tuple[Any, ...]],
    kv: AnyKVManager,
) -> Request:
    """Return the request to preempt, so that `request` gets more KV blocks.

    `running` is sorted by `rank`, and the request with the lowest rank runs first. Only requests with a higher rank
    than `request` can be chosen: those with the priority BATCH first, then the one that loses the fewest computed
    blocks. If there is none, `request` itself is returned, so the first request always makes progress."""
    if isinstance(kv, RankKVManagers):  # blocks of other ranks do not help
        running = [r for r in running if kv.dp_rank_of(r) == kv.dp_rank_of(request)]
    candidates = [
        (-r.priority, blocks, -rank(r)[0], i, r)
        for i, r in enumerate(running[bisect_right(running, rank(request), key=rank) :])
        if (blocks := kv.num_reclaimable_blocks(r)) > 0
        and not (r.num_pending and r.params.prompt_logprobs is not None)  # its prompt is being scored
    ]
    return min(candidates)[-1] if candidates else request
