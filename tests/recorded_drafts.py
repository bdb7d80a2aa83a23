"""record_drafts: the drafts that the draft model of an engine makes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from emberline.core.plan import StepPlan, StepResult
from emberline.engine.engine import Engine
from emberline.engine.gpu.rows import HostDrafts
from emberline.engine.gpu.runner import GPURunner


def record_drafts(e: Engine, proposed: dict[str, dict[int, list[int]]]) -> None:
    """Record all drafts of an engine's runner. Those that only the device has are read from it.

    `proposed`: the drafts by submission and number of known tokens, to which they are added."""
    scheduler, update, runner = e.scheduler, e.scheduler.update, e.runner
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    on_device: dict[tuple[int, str], tuple[HostDrafts, int]] = {}
    if isinstance(runner, GPURunner):
        launch, rows = runner.launch, runner._rows

        def wrapped_launch(plan: StepPlan) -> Callable[[], StepResult]:
            finish = launch(plan)
            for w in plan.work:
                if w.num_propose and (drafts := rows[w.id].drafts) is not None:
                    on_device[plan.step, w.id] = drafts
            return finish

        runner.launch = wrapped_launch  # type: ignore[method-assign]

    def wrapped_update(plan: StepPlan, result: StepResult) -> None:
        update(plan, result)
        for request_id, draft in result.drafted.items():
            if (request := scheduler.requests.get(request_id)) is not None:
                values = list(draft)
                if values[0] < 0:
                    synchronize()
                    drafts, at = on_device[plan.step, request_id]
                    values = drafts.values[at][: len(values)]
                proposed[request.submission_id][len(request.tokens)] = values

    scheduler.update = wrapped_update  # type: ignore[method-assign]
