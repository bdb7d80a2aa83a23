"""GrammarChecker: checks the grammars of a server's requests, so that no tenant's grammars delay another tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from emberline.core.fair_threads import FairWorkers
from emberline.core.params import GrammarSpec
from emberline.engine.grammar_guard import GrammarTrialProcess, GrammarVerdict, GrammarVerdictCache

MAX_WAITING_PER_TENANT = 32  # new grammars, each of which may take more than a second
MAX_WAITING = 128


@dataclass(slots=True)
class _Trial:
    task: asyncio.Task[GrammarVerdict]
    num_requests: int = 0  # requests that wait for it


class GrammarChecker:
    """Tries new grammars in child processes. Verdicts of earlier trials are returned without waiting."""

    def __init__(self, processes: Sequence[GrammarTrialProcess]) -> None:
        self._processes = processes
        self._workers = FairWorkers(
            "grammar checks",
            processes,
            max_waiting_per_tenant=MAX_WAITING_PER_TENANT,
            max_waiting=MAX_WAITING,
        )
        self._verdicts = GrammarVerdictCache()
        self._trials: dict[tuple[str, GrammarSpec], _Trial] = {}

    async def check(self, grammar: GrammarSpec, param: str, tenant: str) -> None:
        """Raise InvalidRequest if the grammar cannot be used.

        Raises Overloaded if too many grammars wait for a trial, EngineUnavailable if no child process can run."""
        verdict = self._verdicts.find(grammar)
        if verdict is None:
            verdict = await self._join_trial(grammar, tenant)
        verdict.raise_error(param)

    def close(self) -> None:
        self._workers.close()
        for process in self._processes:
            process.close()

    async def _join_trial(self, grammar: GrammarSpec, tenant: str) -> GrammarVerdict:
        """Return the verdict of a trial that all waiting requests of the tenant with this grammar share.

        A trial that no request waits for any more is cancelled."""
        key = (tenant, grammar)
        if (trial := self._trials.get(key)) is None:
            task = asyncio.ensure_future(self._workers.run(tenant, lambda process: process.run(grammar)))
            trial = self._trials[key] = _Trial(task)
        trial.num_requests += 1
        try:
            verdict = await asyncio.shield(trial.task)
        finally:
            trial.num_requests -= 1
            if not trial.num_requests:
                trial.task.cancel()
                self._trials.pop(key, None)
        self._verdicts.add(grammar, verdict)
        return verdict
