"""choose_lengths: how many drafted tokens of each request a step verifies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

MIN_GAIN = 1.02  # a step must make at least this many times as many tokens per second as without drafts


def choose_lengths(
    probabilities: Mapping[str, Sequence[float]], rows: int, room: int, seconds: np.ndarray, *, grain: int = 1
) -> dict[str, int]:
    """Return the draft length of each request, by request id, that gives the most expected tokens per second.

    `probabilities`: by request id, for each drafted token, the probability that it and all before it are accepted.
    `rows`: number of requests in the step; each gets one token without a draft too. `room`: maximum number of drafted
    tokens in the step. `seconds`: estimated duration of the step with 0, 1, ..., `room` drafted tokens. `grain`: the
    total number of drafted tokens is a multiple of this, or the largest possible number."""
    if not probabilities or room <= 0:
        return {}
    values = np.concatenate([np.asarray(each) for each in probabilities.values()])
    owners = np.repeat(np.arange(len(probabilities)), [len(each) for each in probabilities.values()])
    # A request's probabilities fall, so the most probable tokens of all requests are the beginnings of their drafts.
    ranked = np.argsort(-values, kind="stable")[:room]
    rates = (rows + np.cumsum(values[ranked])) / seconds[1 : len(ranked) + 1]
    considered = np.unique([*range(grain - 1, len(ranked), grain), len(ranked) - 1])
    best = int(considered[np.argmax(rates[considered])])
    if rates[best] <= rows / seconds[0] * MIN_GAIN:
        return {}
    lengths = np.bincount(owners[ranked[: best + 1]], minlength=len(probabilities)).tolist()
    return {name: length for name, length in zip(probabilities, lengths, strict=True) if length}
