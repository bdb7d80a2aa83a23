"""RouterMetrics: the router's counters, for Prometheus and for its status page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from emberline.cluster.membership import ClusterMember, WorkerHealth
from emberline.router.kvindex import KVIndex, KVIndexState
from emberline.router.policy import RoutingDecision, RoutingReason
from emberline.router.worker import Worker
from emberline.server.metrics import LATENCY_BUCKETS_S, Histogram, MetricFamily

WorkerView = tuple[Worker, ClusterMember, WorkerHealth]

# Each bound is about a quarter above the one before, so that a quantile between two bounds is known to about 10 %.
TOKEN_LATENCY_BUCKETS_S = tuple(float(f"{0.002 * 1.25**i:.3g}") for i in range(50))
FORGOTTEN_WORKER = "(gone)"  # label of all removed workers together


class RouterMetrics:
    def __init__(self) -> None:
        self.decisions: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.outcomes: Counter[tuple[str, str]] = Counter()  # attempts by worker and outcome
        self.migrations: Counter[tuple[str, str]] = Counter()  # streams by the reason to move them and the result
        self.prefills: Counter[str] = Counter()  # prefills for other workers by their end
        self.refused = 0  # requests for which every worker was full
        self.broken = 0  # replies that broke after their first byte
        self.cached_tokens = 0.0  # prompt tokens probably cached at the chosen worker
        self.prompt_tokens = 0.0  # estimated
        self._first_byte_seconds = Histogram(
            "emberline:router_first_byte_seconds", "From sending to a reply's first byte.", LATENCY_BUCKETS_S
        )
        self._request_seconds = Histogram(
            "emberline:router_request_seconds", "From sending to a reply's end.", LATENCY_BUCKETS_S
        )

        self.first_token_seconds = Histogram(
            "emberline:router_first_token_seconds",
            "From a streamed request's arrival to its first token, with waits for a worker.",
            TOKEN_LATENCY_BUCKETS_S,
        )
        self.inter_token_seconds = Histogram(
            "emberline:router_inter_token_seconds", "Between two tokens of a stream.", TOKEN_LATENCY_BUCKETS_S
        )

    def record_decision(self, decision: RoutingDecision) -> None:
        self.decisions[decision.reason.value] += 1
        if decision.reason in (RoutingReason.SPLIT, RoutingReason.RETRY):  # a prompt is counted once
            return
        self.cached_tokens += decision.cached_tokens
        self.prompt_tokens += decision.cached_tokens + decision.load.prefill_tokens

    def record_attempt(self, worker_name: str, outcome: str, duration_s: float, first_byte_s: float | None) -> None:
        self.outcomes[worker_name, outcome] += 1
        self._first_byte_seconds.observe(first_byte_s)
        if outcome == "answered":
            self._request_seconds.observe(duration_s)

    def merge_removed_worker(self, worker_name: str) -> None:
        """Move a removed worker's counts to FORGOTTEN_WORKER, the label that stands for all removed workers.

        The totals stay correct, and the number of labels does not grow with every restarted worker."""
        for name, outcome in [key for key in self.outcomes if key[0] == worker_name]:
            self.outcomes[FORGOTTEN_WORKER, outcome] += self.outcomes.pop((name, outcome))

    def metric_families(
        self, worker_views: Sequence[WorkerView], prefix_count: int, kv_index: KVIndex | None = None
    ) -> Iterator[MetricFamily]:
        yield from _build_worker_gauges(worker_views)
        if kv_index is not None:
            yield from _build_kv_index_gauges(worker_views, kv_index)
        for name, help_, labels, counts in (
            ("requests", "Attempts by worker and outcome.", ("worker", "outcome"), self.outcomes),
            ("decisions", "Why workers were chosen.", ("why",), _counts_by_label_tuple(self.decisions)),
            (
                "retries",
                "Requests retried at another worker, by reason.",
                ("reason",),
                _counts_by_label_tuple(self.retries),
            ),
            ("migrations", "Streams moved, by reason and outcome.", ("reason", "outcome"), self.migrations),
            (
                "prefills",
                "Prompts computed for other workers, by outcome.",
                ("outcome",),
                _counts_by_label_tuple(self.prefills),
            ),
        ):
            samples = [(_format_labels(labels, values), n) for values, n in sorted(counts.items())]
            yield MetricFamily.from_samples(f"emberline:router_{name}_total", help_, "counter", samples)
        for name, help_, counter in (
            ("refused", "Requests refused because all workers were full.", self.refused),
            ("broken", "Replies that broke after their first byte.", self.broken),
            ("prompt_tokens", "Prompt tokens routed, estimated.", self.prompt_tokens),
            ("known_prompt_tokens", "Prompt tokens probably in the chosen worker's cache.", self.cached_tokens),
        ):
            full = f"emberline:router_{name}_total"
            yield MetricFamily(full, help_, "counter", [f"{full} {counter}"])
        size = f"emberline:router_prefixes {prefix_count}"
        yield MetricFamily("emberline:router_prefixes", "Prompt prefixes remembered.", "gauge", [size])
        yield self._first_byte_seconds.family('at="router"')
        yield self._request_seconds.family('at="router"')
        yield self.first_token_seconds.family('at="router"')
        yield self.inter_token_seconds.family('at="router"')


def build_status(
    worker_views: Iterable[WorkerView], metrics: RouterMetrics, now: float, kv_index: KVIndex | None = None
) -> dict[str, Any]:
    """Return the body of /cluster/status."""
    worker_views = list(worker_views)
    worker_by_engine = {peer: worker.name for worker, _, _ in worker_views for peer in worker.engine_ids.values()}
    rows = [
        _build_status_row(worker, member, health, metrics, now, worker_by_engine)
        for worker, member, health in worker_views
    ]
    if kv_index is not None:
        rows = [
            row | kv_index.build_status_fields(worker.id)
            for row, (worker, _, _) in zip(rows, worker_views, strict=True)
        ]
    return {
        "workers": rows,
        "decisions": dict(metrics.decisions),
        "retries": dict(metrics.retries),
        "migrations": [{"reason": why, "outcome": how, "count": n} for (why, how), n in metrics.migrations.items()],
        "prefills": dict(metrics.prefills),
        "refused": metrics.refused,
        "broken": metrics.broken,
        "latency": {
            "bounds_s": TOKEN_LATENCY_BUCKETS_S,
            "first_token": metrics.first_token_seconds.counts,
            "inter_token": metrics.inter_token_seconds.counts,
        },
    }


def _build_status_row(
    worker: Worker,
    member: ClusterMember,
    health: WorkerHealth,
    metrics: RouterMetrics,
    now: float,
    worker_by_engine: Mapping[str, str],
) -> dict[str, Any]:
    """Return one worker's row of /cluster/status.

    `worker_by_engine` maps the incarnation (id of one run) of an engine to the name of its worker."""
    heartbeat = member.heartbeat
    return {
        "name": worker.name,
        "incarnation": member.registration.incarnation,
        "url": member.registration.url,
        "role": member.registration.role,
        "models": sorted(worker.models),
        "embedders": sorted(model.name for model in member.registration.models if not model.max_running),
        "numerics": worker.numerics,
        "ranks": {model.name: model.ranks for model in member.registration.models},
        "health": health.value,
        "breaker": worker.breaker.state,
        "open": worker.open_requests,
        "open_by_other_routers": worker.other_routers.open_requests,
        "max_running": worker.max_running,
        "limit": worker.max_requests,
        "prefill_tokens": round(worker.prefill_tokens),
        "decode_tokens": round(worker.decode_tokens),
        "kv_room_tokens": round(worker.kv_free_tokens) if worker.kv_capacity_tokens else None,
        "answered": metrics.outcomes[worker.name, "answered"],
        "failed": metrics.outcomes[worker.name, "failed"],
        "left": metrics.outcomes[worker.name, "left"],
        "moved": metrics.outcomes[worker.name, "moved"],
        "seconds_since_beat": round(now - member.last_heartbeat_at, 2),
        "uptime_seconds": round(now - member.joined_at, 1),
        **{
            name: getattr(heartbeat, name)
            for name in heartbeat.__struct_fields__
            if name not in ("name", "incarnation", "reports")
        },
        "paired": sorted({worker_by_engine[peer] for peer in heartbeat.paired if peer in worker_by_engine}),
        "refused": {worker_by_engine.get(peer, peer): why for peer, why in heartbeat.refused.items()},
    }


def _build_worker_gauges(worker_views: Sequence[WorkerView]) -> Iterator[MetricFamily]:
    for name, help_, values in (
        (
            "ready",
            "1 when the worker accepts requests.",
            [int(health is WorkerHealth.READY) for _, _, health in worker_views],
        ),
        ("open", "Requests open at the worker.", [worker.open_requests for worker, _, _ in worker_views]),
        (
            "prefill_tokens",
            "Prompt tokens in flight, estimated.",
            [worker.prefill_tokens for worker, _, _ in worker_views],
        ),
        (
            "decode_tokens",
            "Tokens still to be generated, estimated.",
            [worker.decode_tokens for worker, _, _ in worker_views],
        ),
        (
            "open_by_other_routers",
            "Requests that other routers have open at the worker, as of its last heartbeat.",
            [worker.other_routers.open_requests for worker, _, _ in worker_views],
        ),
        (
            "breaker_open",
            "1 while the worker's circuit breaker is not closed.",
            [int(w.breaker.state != "closed") for w, _, _ in worker_views],
        ),
        (
            "kv_usage",
            "Share of the worker's KV blocks in use.",
            [member.heartbeat.kv_usage for _, member, _ in worker_views],
        ),
        (
            "kv_room_tokens",
            "Free tokens of the worker's KV cache, estimated.",
            [worker.kv_free_tokens for worker, _, _ in worker_views],
        ),
        (
            "prefix_queries",
            "Prompt tokens the worker looked up in its prefix cache.",
            [member.heartbeat.prefix_queries for _, member, _ in worker_views],
        ),
        (
            "prefix_hits",
            "Prompt tokens the worker found in its prefix cache.",
            [member.heartbeat.prefix_hits for _, member, _ in worker_views],
        ),
    ):
        labels = [_format_labels(("worker",), (worker.name,)) for worker, _, _ in worker_views]
        yield MetricFamily.from_samples(f"emberline:worker_{name}", help_, "gauge", zip(labels, values, strict=True))


def _build_kv_index_gauges(worker_views: Sequence[WorkerView], kv_index: KVIndex) -> Iterator[MetricFamily]:
    for name, help_, values in (
        (
            "kv_exact",
            "1 while the router knows all KV blocks of the worker.",
            [kv_index.state(w.id) is KVIndexState.EXACT for w, _, _ in worker_views],
        ),
        (
            "kv_blocks",
            "KV blocks that the router knows the worker to hold.",
            [kv_index.count_blocks(w.id) for w, _, _ in worker_views],
        ),
    ):
        labels = [_format_labels(("worker",), (worker.name,)) for worker, _, _ in worker_views]
        yield MetricFamily.from_samples(
            f"emberline:worker_{name}", help_, "gauge", zip(labels, map(int, values), strict=True)
        )


def _counts_by_label_tuple(counts: Counter[str]) -> dict[tuple[str, ...], int]:
    return {(key,): count for key, count in counts.items()}


def _format_labels(names: Sequence[str], values: Sequence[str]) -> str:
    escaped = (value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for value in values)
    return ",".join(f'{name}="{value}"' for name, value in zip(names, escaped, strict=True))
