"""Which layers of a served model share block tables of the KV cache, and how many tokens of a request they keep.

This module needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from emberline.kv.layer_groups import LayerGroups


def choose_groups(windows: Sequence[int], context: int, state_layers: Sequence[int] = ()) -> LayerGroups:
    """Return the groups of layers that share block tables. `windows`: window of each layer; 0: unlimited.

    Windows are in tokens; one of `context` or more counts as unlimited. `state_layers`: layers that have recurrent
    states instead of blocks."""
    if state_layers:
        return LayerGroups.with_states(len(windows), state_layers)
    return LayerGroups.for_windows([0 if window >= context else window for window in windows])


def max_planned_tokens(max_batch_tokens: int, *, plans: int) -> int:
    """Return how many tokens of a request may be in steps whose results are not known yet.

    `plans`: number of such steps: one, and with a pipelined runner also those that are already running."""
    return max_batch_tokens * plans
