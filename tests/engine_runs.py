"""Runs of engines and groups of engines until they are idle, with the checks that hold for every run."""

from __future__ import annotations

from collections.abc import Sequence

from emberline.core.events import Output
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.engine_group import EngineGroup


def run_engine(
    engine: Engine, pending: Sequence[Submission], *, steps_between: int = 0, max_steps: int = 5000
) -> dict[str, list[int]]:
    """Add the submissions, `steps_between` steps apart, run them to their ends, and return their tokens by id."""
    outputs: list[Output] = []
    for submission in pending:
        engine.add(submission)
        for _ in range(steps_between):
            outputs += engine.step()
    for _ in range(max_steps):
        if engine.idle:
            break
        outputs += engine.step()
    assert engine.idle
    engine.kv.check_invariants()
    assert all(output.error is None for output in outputs)
    tokens: dict[str, list[int]] = {}
    for output in outputs:
        tokens.setdefault(output.id, []).extend(output.tokens)
    return tokens


def run_group(group: EngineGroup, pending: Sequence[Submission], *, steps_per_add: int = 1) -> dict[str, list[int]]:
    """Add a submission every `steps_per_add` steps, run all to their ends, and return their tokens by id."""
    left = list(pending)
    tokens: dict[str, list[int]] = {}
    ended: list[str] = []
    steps = 0
    while left or not group.idle:
        if left and steps % steps_per_add == 0:
            group.add(left.pop(0))
        steps += 1
        report = group.step()
        assert not report.rejected
        for outputs in report.outputs.values():
            for output in outputs:
                assert output.error is None
                tokens.setdefault(output.id, []).extend(output.tokens)
                ended += [output.id] if output.finish is not None else []
    assert len(ended) == len(set(ended)) == len(pending)
    return tokens
