"""PoolObservation: what the policy knows about one pool of workers at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolObservation:
    ready: int  # workers that accept requests
    starting: int = 0  # workers that were started and are not ready yet
    asleep: int = 0  # workers that sleep; they are not among the ready ones
    open_requests: int = 0  # requests at workers, also those that wait there
    waiting_requests: int = 0  # requests without a slot at a worker; also those that wait at the router for any worker
    unassigned_requests: int = 0  # waiting requests that are at the router
    answered_requests: int = 0  # requests, also for embeddings, that were answered since the last observation
    # Share of the requests since the last observation that were refused because all workers were full.
    refused_share: float = 0.0
    slots: int = 0  # requests that all ready workers together run at the same time; 0: unknown
    prompt_backlog: float = 0.0  # prompt tokens that arrived and are not computed
    kv_usage: float = 0.0  # share of the pool's KV cache that requests use, from 0 to 1
    has_rates: bool = True  # False: there was no earlier observation, so the rates below are unknown
    prompt_rate: float = 0.0  # prompt tokens to compute that arrived, per second
    output_rate: float = 0.0  # tokens to generate that arrived, per second
    ttft_s: float | None = None  # 90th percentile in the last seconds; None: no request
    itl_s: float | None = None

    @property
    def is_idle(self) -> bool:
        """Whether there has been no request since the last observation, not even one that has already ended."""
        has_had_work = self.answered_requests or self.prompt_rate or self.output_rate
        return not (self.open_requests or self.waiting_requests or self.refused_share or has_had_work)
