"""SharedRouting: builds this router's reports for other routers, and records their reports.

Routers do not call each other. A router sends its report about a worker to this worker, which passes the report on to
its other routers (`cluster/registrar_group.py`). No report is built about a worker that has only one router."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence

from emberline.cluster.registration import Heartbeat, RouterReport
from emberline.router.prefixmap import PrefixMap, PromptPrefix
from emberline.router.worker import OtherRoutersLoad, Worker

MAX_UNREPORTED_PROMPTS = 512  # for each worker, between two heartbeats; the oldest are dropped


class SharedRouting:
    def __init__(self, prefixes: PrefixMap) -> None:
        self.router_id = secrets.token_hex(8)
        self._prefixes = prefixes
        # By worker id, for workers with several routers: prompts sent to the worker since the last report.
        self._unreported_prompts: dict[str, deque[PromptPrefix]] = {}

    def record_prompt(self, worker_id: str, prefixes: Sequence[PromptPrefix]) -> None:
        if prefixes and (unreported := self._unreported_prompts.get(worker_id)) is not None:
            unreported.append(prefixes[-1])

    def record_reports(self, worker: Worker, heartbeat: Heartbeat) -> None:
        """Record the load and the prompts that other routers report in a worker's heartbeat."""
        if heartbeat.routers > 1:
            self._unreported_prompts.setdefault(worker.id, deque(maxlen=MAX_UNREPORTED_PROMPTS))
        reports = [report for report in heartbeat.reports if report.router != self.router_id]
        worker.other_routers = OtherRoutersLoad(
            sum(max(report.open_requests, 0) for report in reports),
            sum(max(report.prefill_tokens, 0.0) for report in reports),
            sum(max(report.decode_tokens, 0.0) for report in reports),
            sum(max(report.uncached_tokens, 0.0) for report in reports),
        )
        for report in reports:
            for digest, length in report.prompts:
                self._prefixes.record_prompt((PromptPrefix(bytes.fromhex(digest), length),), worker.id)

    def build_report(self, worker: Worker) -> RouterReport | None:
        """Return this router's report about a worker, or None if the worker has no other router."""
        unreported = self._unreported_prompts.get(worker.id)
        if unreported is None:
            return None
        prompts = tuple((prefix.digest.hex(), prefix.length) for prefix in unreported)
        unreported.clear()
        return RouterReport(
            self.router_id,
            worker.open_requests,
            round(worker.prefill_tokens, 1),
            round(worker.decode_tokens, 1),
            round(worker.uncached_tokens, 1),
            prompts,
        )

    def remove_worker(self, worker_id: str) -> None:
        self._unreported_prompts.pop(worker_id, None)
