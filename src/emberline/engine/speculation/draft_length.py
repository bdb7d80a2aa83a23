"""choose_lengths: how many drafted tokens of each request a step verifies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

MIN_GAIN = 1.02  # a step must make at least this many times as many tokens per second as without drafts


def choose_lengths(
    probabilities: Mapping[str, Sequence[float]], rows: int, room: int, estimate_seconds: Callable[[int], float]
) -> dict[str, int]:
    """Return the lengths of the drafts that make the most tokens per second, by request id.

    `probabilities`: by request, for each drafted token, that it and those before it are right. `rows`: requests in the
    step, each of which gets one token in any case. `room`: drafted tokens that the step can take.
    `estimate_seconds`: seconds of a step with this number of tokens."""
    # A request's probabilities fall, so the most probable tokens of all requests are the beginnings of their drafts.
    ranked = sorted(((p, name) for name, values in probabilities.items() for p in values), key=lambda one: -one[0])
    expected, best, best_rate = float(rows), 0, rows / estimate_seconds(rows) * MIN_GAIN
    for count, (probability, _) in enumerate(ranked[: max(room, 0)], 1):
        expected += probability
        if (rate := expected / estimate_seconds(rows + count)) > best_rate:
            best, best_rate = count, rate
    lengths: dict[str, int] = {}
    for _, name in ranked[:best]:
        lengths[name] = lengths.get(name, 0) + 1
    return lengths
