"""What /metrics tells of blocks that move between engines, by the names vLLM has for its own where it has any."""

from __future__ import annotations

from collections.abc import Iterator

from emberline.core.events import TransferStats
from emberline.server.metrics import Family


def families(labels: str, stats: TransferStats) -> Iterator[Family]:
    for name, help_, total in (
        ("vllm:nixl_xfer_time_seconds", "Time that pulls from other engines took.", stats.pull_seconds),
        ("vllm:nixl_bytes_transferred", "Bytes that they brought.", float(stats.pulled_bytes)),
    ):
        lines = [f"{name}_sum{{{labels}}} {total}", f"{name}_count{{{labels}}} {stats.pulls}"]
        yield Family(name, help_, "summary", lines)
    for name, help_, counter in (
        ("vllm:nixl_num_failed_transfers", "Pulls that failed.", sum(stats.pull_failures.values())),
        ("vllm:nixl_num_kv_expired_reqs", "Leases that expired.", stats.ended.get("expired", 0)),
        ("vllm:external_prefix_cache_hits", "Prompt tokens that came from other engines.", stats.hit_tokens),
        ("emberline:kv_transfer_recomputed", "Requests that computed what they could not pull.", stats.recomputed),
        ("emberline:kv_transfer_published", "Prompts computed for other engines.", stats.published),
        ("emberline:kv_transfer_published_blocks", "KV blocks of these.", stats.published_blocks),
        ("emberline:kv_transfer_sent_bytes", "Bytes that other engines took.", stats.sent_bytes),
        ("emberline:kv_transfer_verified_blocks", "KV blocks whose checksum was compared.", stats.verified_blocks),
        ("emberline:kv_transfer_copy_seconds", "Time in which bytes of pulls moved.", stats.copy_seconds),
        ("emberline:kv_transfer_hidden_seconds", "Of it, while the peer still computed.", stats.hidden_seconds),
    ):
        yield Family.of(f"{name}_total", help_, "counter", [(labels, counter)])
    for name, help_, gauge in (
        ("leases", "Published prompts that nobody has let go of.", stats.leases),
        ("pinned_blocks", "KV blocks that these hold.", stats.pinned_blocks),
        ("oldest_lease_seconds", "Since when the oldest of these is held.", stats.oldest_lease),
        ("quarantined_blocks", "KV blocks that a pull which was given up may still write.", stats.quarantined_blocks),
    ):
        yield Family.of(f"emberline:kv_transfer_{name}", help_, "gauge", [(labels, gauge)])
    ages = [(f'{labels},seconds="{age}"', blocks) for age, blocks in sorted(stats.pinned_by_age.items())]
    yield Family.of("emberline:kv_transfer_pinned_blocks_by_age", "The same, by the age of the lease.", "gauge", ages)
    for name, help_, label, counts in (
        ("pull_failures", "Pulls that failed, by what happened.", "code", stats.pull_failures),
        ("reached", "Other engines that were connected to, by the way.", "transport", stats.reached),
        ("passed_over", "Better ways to them that failed; the log says why.", "transport", stats.passed_over),
        ("leases_ended", "Leases by how they ended.", "how", stats.ended),
    ):
        samples = [(f'{labels},{label}="{key}"', count) for key, count in sorted(counts.items())]
        yield Family.of(f"emberline:kv_transfer_{name}_total", help_, "counter", samples)
