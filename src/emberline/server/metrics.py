"""The metrics that /metrics shows to Prometheus, under the same names as in vLLM."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from emberline.core.events import SleepStats, SpeculationStats, Stats, TierStats, Timing
from emberline.core.tls import TLSIdentity
from emberline.net.body_budget import body_budget
from emberline.net.descriptors import descriptor_watch

LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                     40.0, 80.0, 160.0, 640.0)  # fmt: skip
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


@dataclass(frozen=True, slots=True)
class MetricFamily:
    name: str
    help: str
    kind: str
    lines: list[str]

    @staticmethod
    def from_samples(name: str, help_text: str, kind: str, samples: Iterable[tuple[str, float]]) -> MetricFamily:
        return MetricFamily(name, help_text, kind, [f"{name}{{{labels}}} {value}" for labels, value in samples])


def render_exposition(families: Iterable[MetricFamily]) -> str:
    """Return the metrics in Prometheus' text format. Families of the same name are merged into one."""
    text: dict[str, list[str]] = {}
    for family in families:
        described = [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
        text.setdefault(family.name, described).extend(family.lines)
    return "\n".join(line for lines in text.values() for line in lines) + "\n"


def tls_families(identity: TLSIdentity | None) -> Iterator[MetricFamily]:
    """Yield the metrics of a server's TLS files; none if it uses plain HTTP."""
    if identity is None:
        return
    for name, help_, kind, value in (
        (
            "certificate_expiration_timestamp_seconds",
            "Unix time at which the TLS certificate expires.",
            "gauge",
            identity.expires_at,
        ),
        ("reloads_total", "Times that changed TLS files were put to use.", "counter", identity.reloads),
        ("failed_reloads_total", "Changes of TLS files that were not usable.", "counter", identity.failed_reloads),
        ("failed_handshakes_total", "TLS handshakes of clients that failed.", "counter", identity.failed_handshakes),
    ):
        yield MetricFamily(f"emberline:tls_{name}", help_, kind, [f"emberline:tls_{name} {value}"])


def listener_families() -> Iterator[MetricFamily]:
    """Yield the metrics of the memory for request bodies, and of connections for which there was no descriptor."""
    for name, help_, kind, value in (
        ("request_body_bytes", "Memory reserved for request bodies.", "gauge", body_budget.used_bytes),
        (
            "rejected_request_bodies_total",
            "Request bodies for which there was no memory (429 or 503).",
            "counter",
            body_budget.rejected_bodies,
        ),
        (
            "rejected_connections_total",
            "Connections answered 503 because file descriptors were scarce.",
            "counter",
            descriptor_watch.rejected_connections,
        ),
        (
            "closed_idle_connections_total",
            "Idle connections closed because file descriptors were scarce.",
            "counter",
            descriptor_watch.closed_connections,
        ),
        (
            "descriptor_exhaustion_total",
            "Checks, one each second, that found no free file descriptor.",
            "counter",
            descriptor_watch.exhausted_checks,
        ),
    ):
        yield MetricFamily(f"emberline:http_{name}", help_, kind, [f"emberline:http_{name} {value}"])


class ReplyCounter:
    """Counts the HTTP replies of the server by path and status."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()

    def count(self, path: str, status: int) -> None:
        self._counts[path, status] += 1

    def family(self) -> MetricFamily:
        samples = [(f'path="{path}",status="{status}"', n) for (path, status), n in sorted(self._counts.items())]
        return MetricFamily.from_samples("emberline:http_replies_total", "HTTP replies.", "counter", samples)


class Histogram:
    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self.name, self.help, self.bounds = name, help_text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float | None, count: int = 1) -> None:
        if value is not None:
            self._counts[bisect_left(self.bounds, value)] += count
            self._sum += count * value

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of values in each bucket. A bucket ends at its bound; the last one has no upper bound."""
        return tuple(self._counts)

    def family(self, labels: str) -> MetricFamily:
        lines, total = [], 0
        for bound, count in zip((*self.bounds, "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{self.name}_bucket{{{labels},le="{bound}"}} {total}')
        lines += [f"{self.name}_sum{{{labels}}} {self._sum}", f"{self.name}_count{{{labels}}} {total}"]
        return MetricFamily(self.name, self.help, "histogram", lines)


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The properties of an engine's KV cache that metrics show."""

    device: str = "cpu"  # or cuda
    dtype: str = ""
    prefix_cache: bool = True
    groups: int = 1  # groups of layers, each with a block table of its own


CPU_CACHE = CacheInfo()


class ModelMetrics:
    """The metrics of one model."""

    def __init__(self, model: str) -> None:
        escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self.labels = f'model_name="{escaped}"'
        self._finished: Counter[str] = Counter()
        self.ttft = Histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", LATENCY_BUCKETS_S)
        self.itl = Histogram("vllm:inter_token_latency_seconds", "Between tokens of one completion.", LATENCY_BUCKETS_S)
        self.tpot = Histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", LATENCY_BUCKETS_S
        )
        self.e2e = Histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", LATENCY_BUCKETS_S)
        self.queue = Histogram("vllm:request_queue_time_seconds", "Waiting for admission.", LATENCY_BUCKETS_S)
        self.prefill = Histogram(
            "vllm:request_prefill_time_seconds", "From admission to the first token.", LATENCY_BUCKETS_S
        )
        self.decode = Histogram(
            "vllm:request_decode_time_seconds", "From the first token to the end.", LATENCY_BUCKETS_S
        )
        self.inference = Histogram(
            "vllm:request_inference_time_seconds", "From admission to the end.", LATENCY_BUCKETS_S
        )
        self.prompt = Histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self.generation = Histogram(
            "vllm:request_generation_tokens", "Generated tokens of a completion.", TOKEN_BUCKETS
        )
        self.computed_tokens = Histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens not found in the cache.", TOKEN_BUCKETS
        )
        self.max_tokens = Histogram("vllm:request_params_max_tokens", "The max_tokens of requests.", TOKEN_BUCKETS)
        self.n = Histogram("vllm:request_params_n", "The n of requests.", (1, 2, 5, 10, 20, 50, 100))
        self.iteration = Histogram("vllm:iteration_tokens_total", "Tokens computed in one step.", TOKEN_BUCKETS)
        self.block_residency = {
            kind: Histogram(f"vllm:kv_block_{kind}_seconds", help_text, LATENCY_BUCKETS_S)
            for kind, help_text in (
                ("lifetime", "From the time a KV block is filled to its eviction or release."),
                ("idle_before_evict", "How long an evicted KV block had not been used."),
                ("reuse_gap", "How long a KV block was idle before its content was reused."),
            )
        }
        self._step = 0
        self._cached_tokens = 0
        self._startup: dict[str, float] = {}
        self._memory = (0, 0)

    def record_engine_start(self, seconds_by_phase: Mapping[str, float], weight_bytes: int, kv_bytes: int) -> None:
        """Record how long each phase of the engine's start took, and the memory of its weights and KV cache."""
        self._startup, self._memory = dict(seconds_by_phase), (weight_bytes, kv_bytes)

    def record_step(self, stats: Stats) -> None:
        for kind, seconds in stats.residency:
            self.block_residency[kind].observe(seconds)
        if stats.step != self._step:  # idle reports repeat the last step
            self._step = stats.step
            self.iteration.observe(stats.step_tokens)

    def record_request(self, prompt_tokens: int, num_choices: int, max_tokens: int | None) -> None:
        self.prompt.observe(prompt_tokens)
        self.n.observe(num_choices)
        self.max_tokens.observe(max_tokens)

    def record_admission(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._cached_tokens += cached_tokens
        self.computed_tokens.observe(prompt_tokens - cached_tokens)

    def record_completion(self, finish_reason: str, timing: Timing | None, output_tokens: int) -> None:
        self._finished[finish_reason] += 1
        self.generation.observe(output_tokens)
        if timing is None:
            return
        self.ttft.observe(timing.ttft)
        self.e2e.observe(timing.e2e)
        self.queue.observe(timing.queue)
        self.prefill.observe(timing.prefill)
        self.decode.observe(timing.decode)
        if timing.finished is not None and timing.admitted is not None:
            self.inference.observe(timing.finished - timing.admitted)
        if timing.decode is not None and output_tokens > 1:
            self.tpot.observe(timing.decode / (output_tokens - 1))

    def families(
        self, stats: Stats, *, restart_count: int, is_ready: bool, block_size: int, cache: CacheInfo = CPU_CACHE
    ) -> Iterator[MetricFamily]:
        one = self.labels
        for name, help_text, gauge in (
            ("vllm:num_requests_running", "Requests in the batch.", stats.running),
            ("vllm:num_requests_waiting", "Requests waiting for admission.", stats.waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 1 is all.", stats.kv_usage),
            ("emberline:kv_blocks_free", "KV blocks that are empty.", stats.blocks_free),
            ("emberline:kv_blocks_cached", "KV blocks that hold only reusable prefixes.", stats.blocks_cached),
            ("emberline:kv_blocks", "KV blocks in total.", stats.blocks_total),
            ("emberline:kv_groups", "Groups of layers, each with a block table of its own.", cache.groups),
            ("emberline:weight_bytes", "Memory of the weights.", self._memory[0]),
            ("emberline:kv_bytes", "Memory of the KV cache.", self._memory[1]),
            ("emberline:engine_ready", "1 when the engine takes requests.", int(is_ready)),
        ):
            yield MetricFamily.from_samples(name, help_text, "gauge", [(one, gauge)])
        for name, help_text, counter in (
            ("vllm:num_preemptions_total", "Requests that lost their blocks and were recomputed.", stats.preemptions),
            ("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
            ("vllm:prompt_tokens_total", "Prompt tokens computed.", stats.prompt_tokens),
            ("vllm:prompt_tokens_cached_total", "Prompt tokens taken from the cache.", self._cached_tokens),
            ("vllm:generation_tokens_total", "Tokens generated.", stats.generated_tokens),
            ("emberline:engine_steps_total", "Steps of the engine.", stats.step),
            ("emberline:engine_busy_seconds_total", "Time in the runner.", stats.busy_seconds),
            ("emberline:engine_host_seconds_total", "Time of the engine loop outside the runner.", stats.host_seconds),
            (
                "emberline:engine_cpu_seconds_total",
                "CPU time of the engine process, which all models share.",
                stats.cpu_seconds,
            ),
            ("emberline:engine_restarts_total", "Times the engine process was started again.", restart_count),
        ):
            yield MetricFamily.from_samples(name, help_text, "counter", [(one, counter)])
        labels = self._cache_labels(stats, block_size, cache)
        yield MetricFamily.from_samples("vllm:cache_config_info", "KV cache settings.", "gauge", [(labels, 1)])
        yield from self._build_labelled_metrics(stats)
        for histogram in (
            self.ttft,
            self.itl,
            self.tpot,
            self.e2e,
            self.queue,
            self.prefill,
            self.decode,
            self.inference,
            self.prompt,
            self.generation,
            self.computed_tokens,
            self.max_tokens,
            self.n,
            self.iteration,
            *self.block_residency.values(),
        ):
            yield histogram.family(one)

    def build_sleep_metrics(self, stats: SleepStats, is_awake: bool) -> Iterator[MetricFamily]:
        one = self.labels
        yield MetricFamily.from_samples(
            "emberline:model_awake",
            "1 when the model's weights are in the memory of its device.",
            "gauge",
            [(one, int(is_awake))],
        )
        for name, help_text, counter in (
            ("wakes", "Times the model was loaded or woken.", stats.wakes),
            ("wake_seconds", "Time spent loading or waking the model.", stats.wake_seconds),
            ("wake_bytes", "Bytes copied to wake the model.", stats.wake_bytes),
            ("sleeps", "Times the model was put to sleep.", stats.sleeps),
            ("sleep_seconds", "Time spent putting the model to sleep.", stats.sleep_seconds),
            ("sleep_bytes", "Bytes copied to put the model to sleep.", stats.sleep_bytes),
        ):
            yield MetricFamily.from_samples(f"emberline:model_{name}_total", help_text, "counter", [(one, counter)])

    def _build_tier_metrics(self, tiers: Mapping[str, TierStats]) -> Iterator[MetricFamily]:
        for name, help_text, kind in (
            ("on", "1 when the tier is in use, 0 after an I/O error.", "gauge"),
            ("blocks", "KV blocks in the tier.", "gauge"),
            ("capacity", "KV blocks that fit in the tier.", "gauge"),
            ("hit_tokens", "Prompt tokens loaded from the tier instead of computed.", "counter"),
            ("loaded_blocks", "KV blocks read.", "counter"),
            ("loaded_bytes", "Bytes read.", "counter"),
            ("load_seconds", "Time spent reading, in parallel to the engine's loop.", "counter"),
            ("stored_blocks", "KV blocks written.", "counter"),
            ("stored_bytes", "Bytes written.", "counter"),
            ("store_seconds", "Time spent writing, in parallel to the engine's loop.", "counter"),
            ("evicted_blocks", "KV blocks evicted to make room.", "counter"),
            ("dropped_blocks", "KV blocks not stored because the engine would have had to wait.", "counter"),
            (
                "damaged_blocks",
                "KV blocks removed because they were incomplete, corrupted or of another model.",
                "counter",
            ),
            ("errors", "I/O errors.", "counter"),
        ):
            samples = [(f'{self.labels},tier="{tier}"', float(getattr(s, name))) for tier, s in tiers.items()]
            full = f"emberline:kv_tier_{name}" + ("_total" if kind == "counter" else "")
            yield MetricFamily.from_samples(full, help_text, kind, samples)

    def _build_speculation_metrics(self, stats: SpeculationStats) -> Iterator[MetricFamily]:
        one = self.labels
        for name, help_text, counter in (
            ("drafts", "Drafts that were verified.", stats.drafts),
            ("draft_tokens", "Tokens that were drafted and verified.", stats.drafted_tokens),
            ("accepted_tokens", "Drafted tokens that became output.", stats.accepted_tokens),
        ):
            yield MetricFamily.from_samples(
                f"vllm:spec_decode_num_{name}_total", help_text, "counter", [(one, counter)]
            )
        positions = [(f'{one},position="{i}"', count) for i, count in enumerate(stats.accepted_per_position)]
        yield MetricFamily.from_samples(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "Drafted tokens that became output, by position in the draft.",
            "counter",
            positions,
        )

    def _cache_labels(self, stats: Stats, block_size: int, cache: CacheInfo) -> str:
        """Return the labels of the metric `cache_config_info`, such as block size and number of blocks."""
        on_gpu = cache.device != "cpu"
        kept = stats.tiers["host"].capacity if stats.tiers and "host" in stats.tiers else 0
        labels = {
            "block_size": block_size,
            "cache_dtype": cache.dtype,
            "enable_prefix_caching": cache.prefix_cache,
            "num_gpu_blocks": stats.blocks_total if on_gpu else 0,
            "num_cpu_blocks": kept if on_gpu else stats.blocks_total + kept,
        }
        return ",".join([self.labels, *(f'{name}="{value}"' for name, value in labels.items())])

    def _build_labelled_metrics(self, stats: Stats) -> Iterator[MetricFamily]:
        """Yield the metrics that have more labels than the model's name."""
        one = self.labels
        if stats.tiers:
            yield from self._build_tier_metrics(stats.tiers)
        if stats.speculation is not None:
            yield from self._build_speculation_metrics(stats.speculation)
        waiting = [
            (f'{one},reason="capacity"', stats.waiting - stats.deferred - stats.asleep),
            (f'{one},reason="deferred"', stats.deferred),
            (f'{one},reason="asleep"', stats.asleep),
        ]
        yield MetricFamily.from_samples("vllm:num_requests_waiting_by_reason", "Why requests wait.", "gauge", waiting)
        sources = [
            (f'{one},source="local_compute"', stats.prompt_tokens),
            (f'{one},source="local_cache_hit"', self._cached_tokens),
        ]
        if stats.transfer is not None:
            sources.append((f'{one},source="external_kv_transfer"', stats.transfer.hit_tokens))
        yield MetricFamily.from_samples(
            "vllm:prompt_tokens_by_source_total", "Where prompt tokens came from.", "counter", sources
        )
        phases = [(f'{one},phase="{phase}"', seconds) for phase, seconds in self._startup.items()]
        yield MetricFamily.from_samples(
            "emberline:startup_seconds", "Duration of each phase of the engine's start.", "gauge", phases
        )
        reasons = [(f'{one},finished_reason="{reason}"', count) for reason, count in sorted(self._finished.items())]
        yield MetricFamily.from_samples(
            "vllm:request_success_total", "Completions by how they ended.", "counter", reasons
        )
