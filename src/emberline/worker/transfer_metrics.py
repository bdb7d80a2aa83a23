"""Metrics of KV transfers between engines, under the names that vLLM uses if vLLM has the metric."""

from __future__ import annotations

from collections.abc import Iterator

from emberline.core.events import TransferStats
from emberline.server.metrics import MetricFamily


def build_transfer_metrics(labels: str, stats: TransferStats) -> Iterator[MetricFamily]:
    for name, help_, total in (
        ("vllm:nixl_xfer_time_seconds", "Total time of pulls from other engines in seconds.", stats.pull_seconds),
        ("vllm:nixl_bytes_transferred", "Bytes pulled from other engines.", float(stats.pulled_bytes)),
    ):
        lines = [f"{name}_sum{{{labels}}} {total}", f"{name}_count{{{labels}}} {stats.pulls}"]
        yield MetricFamily(name, help_, "summary", lines)
    for name, help_, counter in (
        ("vllm:nixl_num_failed_transfers", "Failed pulls.", sum(stats.pull_failures.values())),
        ("vllm:nixl_num_kv_expired_reqs", "Expired leases.", stats.ended.get("expired", 0)),
        ("vllm:external_prefix_cache_hits", "Prompt tokens pulled from other engines.", stats.hit_tokens),
        ("emberline:kv_transfer_recomputed", "Requests that recomputed blocks after a failed pull.", stats.recomputed),
        ("emberline:kv_transfer_published", "Prompts computed for other engines.", stats.published),
        (
            "emberline:kv_transfer_published_blocks",
            "KV blocks of prompts computed for other engines.",
            stats.published_blocks,
        ),
        ("emberline:kv_transfer_sent_bytes", "Bytes pulled by other engines.", stats.sent_bytes),
        ("emberline:kv_transfer_verified_blocks", "KV blocks whose checksum was verified.", stats.verified_blocks),
        ("emberline:kv_transfer_copy_seconds", "Time in which pulls moved data, in seconds.", stats.copy_seconds),
        (
            "emberline:kv_transfer_hidden_seconds",
            "The part of it during which the peer was still computing, in seconds.",
            stats.hidden_seconds,
        ),
    ):
        yield MetricFamily.from_samples(f"{name}_total", help_, "counter", [(labels, counter)])
    for name, help_, gauge in (
        ("leases", "Published prompts with an open lease.", stats.leases),
        ("pinned_blocks", "KV blocks held by open leases.", stats.pinned_blocks),
        ("oldest_lease_seconds", "Age of the oldest open lease in seconds.", stats.oldest_lease),
        ("quarantined_blocks", "KV blocks that an abandoned pull may still write.", stats.quarantined_blocks),
    ):
        yield MetricFamily.from_samples(f"emberline:kv_transfer_{name}", help_, "gauge", [(labels, gauge)])
    ages = [(f'{labels},seconds="{age}"', blocks) for age, blocks in sorted(stats.pinned_by_age.items())]
    yield MetricFamily.from_samples(
        "emberline:kv_transfer_pinned_blocks_by_age",
        "KV blocks held by open leases, by the age of the lease.",
        "gauge",
        ages,
    )
    for name, help_, label, counts in (
        ("pull_failures", "Failed pulls by error code.", "code", stats.pull_failures),
        ("reached", "Connections to other engines by transport.", "transport", stats.reached),
        (
            "passed_over",
            "Faster transports that failed before another one connected; the log has the reason.",
            "transport",
            stats.passed_over,
        ),
        ("leases_ended", "Ended leases by cause.", "how", stats.ended),
    ):
        samples = [(f'{labels},{label}="{key}"', count) for key, count in sorted(counts.items())]
        yield MetricFamily.from_samples(f"emberline:kv_transfer_{name}_total", help_, "counter", samples)
