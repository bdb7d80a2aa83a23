"""MinuteLog: the latencies of a simulated run by minute, and which minutes met an SLO."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from emberline.core.slo import LatencyTargets
from emberline.sim.cluster import SimCluster
from emberline.sim.result import Distribution, RequestRecord

MINUTE_S = 60.0
UNANSWERED_S = 1e6  # first token of a request without an answer: too late for every SLO


@dataclass(slots=True)
class MinuteLog:
    """Records a cluster's latencies. A request counts in the minute of its arrival, a token in that of its output."""

    slo: LatencyTargets
    ttft: defaultdict[int, Distribution] = field(default_factory=lambda: defaultdict(Distribution))
    itl: dict[int, Distribution] = field(default_factory=dict)
    unanswered: int = 0  # requests that were refused or failed

    def watch(self, cluster: SimCluster) -> None:
        """Record the latencies of a cluster that has not run yet."""
        cluster.observers.append(self._record_request)
        self._start_minute(cluster)
        cluster.call_every(MINUTE_S, lambda: self._start_minute(cluster))

    def find_missed(self, seconds: float) -> list[int]:
        """Return the minutes, within the first `seconds` of the run, in which latencies exceeded the SLO.

        These are the minutes in which the 90th percentile of the time to first token, or of the time between tokens, is
        above its target. Minutes are numbered from 0."""
        missed = []
        for minute in range(round(seconds / MINUTE_S)):
            ttft, itl = self.ttft.get(minute), self.itl.get(minute)
            is_late = ttft is not None and ttft.quantile(0.9) > self.slo.ttft_p90
            is_slow = itl is not None and itl.count > 0 and itl.quantile(0.9) > self.slo.itl_p90
            if is_late or is_slow:
                missed.append(minute)
        return missed

    def _record_request(self, record: RequestRecord) -> None:
        minute = int(record.arrived_at / MINUTE_S)
        if record.outcome == "answered" and record.first_token_at is not None:
            self.ttft[minute].add(record.first_token_at - record.arrived_at)
        else:
            self.ttft[minute].add(UNANSWERED_S)
            self.unanswered += 1

    def _start_minute(self, cluster: SimCluster) -> None:
        """Let the cluster record the inter-token times of the next minute in a new distribution."""
        cluster.result.inter_token_seconds = self.itl[round(cluster.now / MINUTE_S)] = Distribution()
