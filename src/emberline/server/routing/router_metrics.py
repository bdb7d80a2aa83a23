"""RouterMetrics: the router's counters, for Prometheus and for its status page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from emberline.cluster.membership import Health, Member
from emberline.router.kvindex import KVIndex, State
from emberline.router.policy import Decision, Why
from emberline.router.worker import Worker
from emberline.server.metrics import SECONDS, Family, Histogram

Seen = tuple[Worker, Member, Health]

GONE = "(gone)"  # label of all removed workers together


class RouterMetrics:
    def __init__(self) -> None:
        self.decisions: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.outcomes: Counter[tuple[str, str]] = Counter()  # attempts by worker and outcome
        self.migrations: Counter[tuple[str, str]] = Counter()  # streams by the reason to move them and the result
        self.prefills: Counter[str] = Counter()  # prefills for other workers by their end
        self.refused = 0  # requests for which every worker was full
        self.broken = 0  # replies that broke after their first byte
        self.known_tokens = 0.0  # prompt tokens probably cached at the chosen worker
        self.prompt_tokens = 0.0  # estimated
        self._first = Histogram("emberline:router_first_byte_seconds", "From sending to a reply's first byte.", SECONDS)
        self._whole = Histogram("emberline:router_request_seconds", "From sending to a reply's end.", SECONDS)

    def decided(self, decision: Decision) -> None:
        self.decisions[decision.why.value] += 1
        if decision.why in (Why.SPLIT, Why.AGAIN):  # a prompt is counted once
            return
        self.known_tokens += decision.known
        self.prompt_tokens += decision.known + decision.load.prefill

    def closed(self, worker: str, outcome: str, seconds: float, first: float | None) -> None:
        self.outcomes[worker, outcome] += 1
        self._first.observe(first)
        if outcome == "answered":
            self._whole.observe(seconds)

    def forget(self, worker: str) -> None:
        """Move a removed worker's counts to a common label, so that sums stay and labels do not grow."""
        for name, outcome in [key for key in self.outcomes if key[0] == worker]:
            self.outcomes[GONE, outcome] += self.outcomes.pop((name, outcome))

    def families(self, seen: Sequence[Seen], prefixes: int, kv: KVIndex | None = None) -> Iterator[Family]:
        yield from _gauges(seen)
        if kv is not None:
            yield from _followed(seen, kv)
        for name, help_, labels, counts in (
            ("requests", "Attempts by worker and outcome.", ("worker", "outcome"), self.outcomes),
            ("decisions", "Why workers were chosen.", ("why",), _single(self.decisions)),
            ("retries", "Requests retried at another worker, by reason.", ("reason",), _single(self.retries)),
            ("migrations", "Streams moved, by reason and outcome.", ("reason", "outcome"), self.migrations),
            ("prefills", "Prompts computed for other workers, by outcome.", ("outcome",), _single(self.prefills)),
        ):
            samples = [(_labels(labels, values), n) for values, n in sorted(counts.items())]
            yield Family.of(f"emberline:router_{name}_total", help_, "counter", samples)
        for name, help_, counter in (
            ("refused", "Requests refused because all workers were full.", self.refused),
            ("broken", "Replies that broke after their first byte.", self.broken),
            ("prompt_tokens", "Prompt tokens routed, estimated.", self.prompt_tokens),
            ("known_prompt_tokens", "Prompt tokens probably in the chosen worker's cache.", self.known_tokens),
        ):
            full = f"emberline:router_{name}_total"
            yield Family(full, help_, "counter", [f"{full} {counter}"])
        size = f"emberline:router_prefixes {prefixes}"
        yield Family("emberline:router_prefixes", "Prompt prefixes remembered.", "gauge", [size])
        yield self._first.family('at="router"')
        yield self._whole.family('at="router"')


def status(seen: Iterable[Seen], metrics: RouterMetrics, now: float, kv: KVIndex | None = None) -> dict[str, Any]:
    """Return the body of /cluster/status."""
    seen = list(seen)
    worker_by_engine = {peer: worker.name for worker, _, _ in seen for peer in worker.peers.values()}
    rows = [_row(worker, member, health, metrics, now, worker_by_engine) for worker, member, health in seen]
    if kv is not None:
        rows = [row | kv.facts(worker.id) for row, (worker, _, _) in zip(rows, seen, strict=True)]
    return {
        "workers": rows,
        "decisions": dict(metrics.decisions),
        "retries": dict(metrics.retries),
        "migrations": [{"reason": why, "outcome": how, "count": n} for (why, how), n in metrics.migrations.items()],
        "prefills": dict(metrics.prefills),
        "refused": metrics.refused,
        "broken": metrics.broken,
    }


def _row(
    worker: Worker, member: Member, health: Health, metrics: RouterMetrics, now: float, engines: Mapping[str, str]
) -> dict[str, Any]:
    """`worker_by_engine`: worker names by the incarnation of their engines."""
    heartbeat = member.beat
    return {
        "name": worker.name,
        "incarnation": member.card.incarnation,
        "role": member.card.role,
        "models": sorted(worker.models),
        "numerics": worker.numerics,
        "health": health.value,
        "breaker": worker.breaker.state,
        "open": worker.open,
        "max_running": worker.max_running,
        "limit": worker.limit,
        "prefill_tokens": round(worker.prefill),
        "decode_tokens": round(worker.decode),
        "kv_room_tokens": round(worker.room) if worker.kv_tokens else None,
        "answered": metrics.outcomes[worker.name, "answered"],
        "failed": metrics.outcomes[worker.name, "failed"],
        "left": metrics.outcomes[worker.name, "left"],
        "moved": metrics.outcomes[worker.name, "moved"],
        "seconds_since_beat": round(now - member.heard, 2),
        "uptime_seconds": round(now - member.joined, 1),
        **{
            name: getattr(heartbeat, name)
            for name in heartbeat.__struct_fields__
            if name not in ("name", "incarnation")
        },
        "paired": sorted({engines[peer] for peer in heartbeat.paired if peer in engines}),
        "refused": {engines.get(peer, peer): why for peer, why in heartbeat.refused.items()},
    }


def _gauges(seen: Sequence[Seen]) -> Iterator[Family]:
    for name, help_, values in (
        ("ready", "1 when the worker accepts requests.", [int(health is Health.READY) for _, _, health in seen]),
        ("open", "Requests open at the worker.", [worker.open for worker, _, _ in seen]),
        ("prefill_tokens", "Prompt tokens in flight, estimated.", [worker.prefill for worker, _, _ in seen]),
        ("decode_tokens", "Tokens still to be generated, estimated.", [worker.decode for worker, _, _ in seen]),
        (
            "breaker_open",
            "1 while the worker's circuit breaker is not closed.",
            [int(w.breaker.state != "closed") for w, _, _ in seen],
        ),
        ("kv_usage", "Share of the worker's KV blocks in use.", [member.beat.kv_usage for _, member, _ in seen]),
        ("kv_room_tokens", "Free tokens of the worker's KV cache, estimated.", [worker.room for worker, _, _ in seen]),
        (
            "prefix_queries",
            "Prompt tokens the worker looked up in its prefix cache.",
            [member.beat.prefix_queries for _, member, _ in seen],
        ),
        (
            "prefix_hits",
            "Prompt tokens the worker found in its prefix cache.",
            [member.beat.prefix_hits for _, member, _ in seen],
        ),
    ):
        labels = [_labels(("worker",), (worker.name,)) for worker, _, _ in seen]
        yield Family.of(f"emberline:worker_{name}", help_, "gauge", zip(labels, values, strict=True))


def _followed(seen: Sequence[Seen], kv: KVIndex) -> Iterator[Family]:
    for name, help_, values in (
        (
            "kv_exact",
            "1 while the router knows all KV blocks of the worker.",
            [kv.state(w.id) is State.EXACT for w, _, _ in seen],
        ),
        ("kv_blocks", "KV blocks that the router knows the worker to hold.", [kv.held(w.id) for w, _, _ in seen]),
    ):
        labels = [_labels(("worker",), (worker.name,)) for worker, _, _ in seen]
        yield Family.of(f"emberline:worker_{name}", help_, "gauge", zip(labels, map(int, values), strict=True))


def _single(counts: Counter[str]) -> dict[tuple[str, ...], int]:
    return {(key,): count for key, count in counts.items()}


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    escaped = (value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for value in values)
    return ",".join(f'{name}="{value}"' for name, value in zip(names, escaped, strict=True))
