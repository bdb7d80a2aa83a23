"""Settings and their defaults: frozen and validated when built.

Only this module reads environment variables."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from emberline.core.errors import InvalidRequest
from emberline.core.foreign_config import ForeignWorkerConfig
from emberline.core.foreign_config import Role as Role

DEFAULT_MODEL = "smollm2"
DEFAULT_EMBEDDER = "minilm"
ITL_TAIL = 3.0  # one token of ten may take this many times the inter-token target
MAX_QUEUE_SHARE = 1000  # largest queue of a worker, as a multiple of the requests it runs at once
MASTER_KEY_VARIABLE = "EMBERLINE_MASTER_KEY"  # keys of the gateway's vault in base64, the current one first


def cache_dir() -> Path:
    """Return the directory for models and compiled kernels: EMBERLINE_CACHE, or ~/.cache/emberline."""
    return Path(os.environ.get("EMBERLINE_CACHE") or "~/.cache/emberline").expanduser()


def kernel_dir() -> Path:
    """Return the directory of compiled kernels, for CPU and GPU."""
    return cache_dir() / "kernels"


def read_secret(name: str) -> str | None:
    """Return the value of an environment variable that a configuration refers to; None if it is not set."""
    return os.environ.get(name)


def cluster_key_from_environment() -> str | None:
    """Return EMBERLINE_CLUSTER_KEY. An option would show the key to every user of the machine."""
    return os.environ.get("EMBERLINE_CLUSTER_KEY") or None


def otlp_endpoint() -> str | None:
    """Return the URL for traces from OpenTelemetry's standard environment variables; None if none is set."""
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or (f"{base.rstrip('/')}/v1/traces" if base else None)


def otlp_headers() -> dict[str, str]:
    """Return the headers in OTEL_EXPORTER_OTLP_HEADERS, which has the form NAME=VALUE,NAME=VALUE."""
    pairs = [pair.partition("=") for pair in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(",")]
    return {name.strip().lower(): unquote(value.strip()) for name, equals, value in pairs if equals}


def core_count() -> int:
    """Return how many cores this process may use; a container may limit them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    block_size: int = 16
    max_batch_tokens: int = 512  # tokens that one step computes for all requests together
    max_running: int = 64
    max_waiting: int = 1024
    max_context: int = 8192
    prefix_cache: bool = True
    ageing_seconds: float = 10.0  # seconds after which a waiting batch request counts as interactive
    itl_target: float | None = None  # target inter-token latency in seconds; prompt chunks are sized to meet it
    itl_tail: float = ITL_TAIL  # one token of ten may take this many targets while prompts wait
    load_timeout: float = 5.0  # seconds a request waits for KV blocks of a lower tier; the rest is recomputed

    def __post_init__(self) -> None:
        if self.block_size < 8 or self.block_size % 8:
            raise InvalidRequest(f"block_size is {self.block_size}; it must be a multiple of 8", param="block_size")
        for name in ("max_batch_tokens", "max_running", "max_waiting", "max_context"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be at least 1", param=name)


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Settings of an engine that exchanges KV blocks with other engines."""

    name: str  # this engine's name for its peers
    host: str = "127.0.0.1"  # address to listen at
    port: int = 0  # 0: any free port
    advertise: str | None = None  # address at which peers reach it; None: same as `host`
    lease: float = 10.0  # seconds that published blocks are kept without a renewal from a reader
    patience: float = 30.0  # seconds a request waits for a live peer that sends nothing; the rest is then recomputed
    required: bool = True  # True: without transfers the engine refuses to start; False: it starts without them

    def __post_init__(self) -> None:
        for name in ("lease", "patience"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be above 0", param=name)


# Ports reserved for one engine from kv_port on: TCP, Mooncake's leases, its engine (2), its store (2), 2 spare.
KV_PORT_COUNT = 8
WEIGHT_FORMATS = ("auto", "plain", "packed", "both")  # formats of weights in GPU memory


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine process on any device."""

    model: str  # a checkpoint directory, already resolved
    device: str = "auto"  # cpu, cuda, or auto: a supported GPU if there is one, else the CPU
    dtype: str = "auto"  # auto: the checkpoint's
    weights: str = "auto"  # format in GPU memory: plain, packed, both, or auto: packed if the files are
    kv_dtype: str = "auto"  # auto: same as dtype
    kv_memory: int | None = None  # bytes; None: planned from free memory
    threads: int = 0  # 0: all cores
    max_context: int | None = None  # None: the model's own
    max_batch_tokens: int | None = None  # None, here and below: the device's default
    max_running: int | None = None
    max_waiting: int = 1024
    block_size: int | None = None
    prefix_cache: bool = True
    itl_target_ms: float | None = None
    itl_tail: float = ITL_TAIL
    kv_host_memory: int = 0  # bytes of main memory for KV blocks evicted from the main cache
    kv_disk: str | None = None  # directory for evicted KV blocks
    kv_disk_size: int | None = None  # bytes of kv_disk that may be used
    kv_policy: str = "lru"  # eviction policy of main memory and disk: lru or arc
    kv_store: str | None = None  # HOST:PORT of the master of the KV block store that a cluster shares
    kv_store_memory: int = 1 << 30  # bytes of main memory that this engine contributes to the store
    kv_codec: str = "auto"  # compression of blocks on disk and between hosts; auto: where faster; uw: always; none
    kv_checksums: bool | None = None  # a checksum of each block on its way to a peer; None: only with Mooncake
    kv_mooncake: bool = False  # also transfer blocks by Mooncake's Transfer Engine, if it works on this machine
    kv_mooncake_host: str | None = None  # this host's address for Mooncake's engine and store; None: loopback
    kv_port: int = 0  # first port for exchanging blocks; 0: any free ports
    transfer: TransferConfig | None = None  # None: no blocks are exchanged with other engines

    def __post_init__(self) -> None:
        sizes = ("kv_memory", "kv_disk_size", "max_context", "max_batch_tokens", "max_running", "block_size")
        for name, least in (("threads", 0), ("kv_host_memory", 0), *((name, 1) for name in sizes)):
            if (value := getattr(self, name)) is not None and value < least:
                raise InvalidRequest(f"{name} is {value}; it must be at least {least}", param=name)
        if (self.kv_disk is None) != (self.kv_disk_size is None):
            message = "only one of kv_disk and kv_disk_size is set"
            raise InvalidRequest(message, param="kv_disk", hint="set both --kv-disk and --kv-disk-size, or neither")
        if not 0 <= self.kv_port <= 65536 - KV_PORT_COUNT:
            raise InvalidRequest(f"kv_port is {self.kv_port}; it must be 0 to {65536 - KV_PORT_COUNT}", param="kv_port")
        if self.kv_mooncake_host is not None and not self.kv_mooncake and self.kv_store is None:
            message = "kv_mooncake_host is set, but neither kv_mooncake nor kv_store is"
            raise InvalidRequest(message, param="kv_mooncake_host", hint="add --kv-mooncake or --kv-store")
        if self.itl_tail != ITL_TAIL and self.itl_target_ms is None:
            message = f"itl_tail is {self.itl_tail}, a multiple of itl_target_ms, but itl_target_ms is not set"
            raise InvalidRequest(message, param="itl_tail", hint="add --itl-target-ms")
        if self.has_tiers and not self.prefix_cache:
            message = "KV tiers (kv_host_memory, kv_disk or kv_store) need the prefix cache, and prefix_cache is off"
            raise InvalidRequest(message, param="prefix_cache", hint="drop --no-prefix-cache or the KV tiers")
        if self.device not in ("auto", "cpu", "cuda"):
            raise InvalidRequest(f"device is {self.device!r}; it must be auto, cpu or cuda", param="device")
        if self.weights not in WEIGHT_FORMATS:
            raise InvalidRequest(
                f"weights is {self.weights!r}; it is one of {', '.join(WEIGHT_FORMATS)}", param="weights"
            )
        if self.kv_codec not in ("auto", "none", "uw"):
            raise InvalidRequest(f"kv_codec is {self.kv_codec!r}; it must be auto, none or uw", param="kv_codec")

    def with_kv_ports(self, index: int) -> EngineConfig:
        """Return these settings for engine number `index`: each engine gets its own ports from `kv_port` on."""
        port = self.kv_port + index * KV_PORT_COUNT if self.kv_port else 0
        transfer = self.transfer
        if transfer is not None and port:  # a configured port that is in use is an error
            transfer = replace(transfer, port=port, required=True)
        return replace(self, kv_port=port, transfer=transfer)

    @property
    def checksums_blocks(self) -> bool:
        """Return whether published blocks carry a checksum.

        With Mooncake they do, since another process could overwrite them."""
        return self.kv_mooncake if self.kv_checksums is None else self.kv_checksums

    @property
    def has_tiers(self) -> bool:
        return self.kv_host_memory > 0 or self.kv_disk is not None or self.kv_store is not None


@dataclass(frozen=True, slots=True)
class GPUConfig:
    """Settings of an engine on a GPU, apart from the model."""

    max_running: int = 256
    max_waiting: int = 4096
    max_batch_tokens: int = 8192
    max_context: int | None = None  # None: the model's own
    block_size: int = 64
    prefix_cache: bool = True
    weights: str = "auto"  # plain; packed: 12 bits instead of 16, lossless; both; auto: packed if the files are
    kv_dtype: str = "auto"  # auto: the model's; or float8
    kv_tokens: int | None = None  # size of the KV cache; None: as many as fit in memory
    kv_memory: int | None = None  # size of the KV cache in bytes
    graphs: bool = True  # run steps as captured CUDA graphs where possible
    overlap: bool = True  # plan and launch a step while the one before it runs
    itl_target_ms: float | None = None  # target inter-token latency; prompt chunks are sized to meet it
    itl_tail: float = ITL_TAIL  # one token of ten may take this many targets while prompts wait
    tiers: bool = False  # KV blocks move to main memory and back; reserves scratch memory for that
    transfer: bool = False  # KV blocks move to and from other engines; reserves scratch memory for that

    def __post_init__(self) -> None:
        if self.block_size not in (16, 32, 64):
            raise InvalidRequest(
                f"block_size is {self.block_size}; on a GPU it must be 16, 32 or 64", param="block_size"
            )
        if self.weights not in WEIGHT_FORMATS:
            raise InvalidRequest(
                f"weights is {self.weights!r}; it is one of {', '.join(WEIGHT_FORMATS)}", param="weights"
            )
        if self.itl_target_ms is not None and self.itl_target_ms <= 0:
            raise InvalidRequest(f"itl_target_ms is {self.itl_target_ms}; it must be above 0", param="itl_target_ms")
        if not 1.0 <= self.itl_tail <= 100.0:
            raise InvalidRequest(f"itl_tail is {self.itl_tail}; it must be from 1 to 100", param="itl_tail")
        if self.kv_tokens is not None and self.kv_memory is not None:
            raise InvalidRequest("kv_tokens and kv_memory are both set; set only one of them", param="kv_tokens")


@dataclass(frozen=True, slots=True)
class TimeSharingConfig:
    """How models that do not fit into GPU memory together share it over time."""

    turn: float = 5.0  # seconds a model may accept new requests while another waits for its memory
    wait: float = 60.0  # seconds after which a request is rejected if its model has not been woken
    max_waiting: int = 1024  # requests that may wait for one sleeping model

    def __post_init__(self) -> None:
        for name in ("turn", "wait", "max_waiting"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be above 0", param=name)


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Where trace spans are sent: an OpenTelemetry collector, over HTTP."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    share: float = 1.0  # fraction of requests to trace where the client made no choice

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidRequest(
                f"otlp is {self.url[:200]!r}, not an HTTP URL", param="otlp", hint="use http://HOST:4318"
            )
        if not 0 <= self.share <= 1:
            raise InvalidRequest(f"trace_share is {self.share}; it must be in [0, 1]", param="trace_share")

    @staticmethod
    def from_options(url: str | None, share: float, headers: dict[str, str] | None = None) -> TraceConfig | None:
        """Return the settings for these options; None if nothing is to be traced.

        `url` may lack the path. "" turns tracing off; None means the URL from the environment.
        """
        endpoint = otlp_endpoint() if url is None else url
        if not endpoint:
            return None
        full_url = endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        return TraceConfig(full_url, {**otlp_headers(), **(headers or {})}, share)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    open: bool = False  # may listen at addresses other than loopback without authentication
    cors_origins: tuple[str, ...] = ()  # origins of web pages that may call the API; "*": all
    allowed_hosts: tuple[str, ...] = ()  # accepted Host headers, besides localhost
    cluster_key: str | None = None  # key for workers and for drain calls; None: any process on this machine is accepted
    max_body: int = 32 << 20
    request_timeout: float = math.inf  # seconds for a whole request; inf: no limit while tokens arrive
    token_timeout: float = 600.0  # seconds to the first token, and between two tokens of a stream
    beat_seconds: float = 1.0  # seconds between two heartbeats of a worker
    lost_after: float = 4.0  # seconds without a heartbeat after which a worker is lost
    stuck_after: float = 30.0  # seconds without an engine step after which a worker with open requests is stuck
    attempts: int = 3  # workers that a request is sent to, one after the other, before the first byte of its reply
    migrations: int = 3  # times that a stream may move to another worker
    migration_wait: float = 10.0  # seconds to wait for a worker to move to, or to start at if all tried ones were gone
    split_tokens: float = 256.0  # uncached prompt tokens from which a prefill worker is used; inf: never
    split_patience: float = 3.0  # seconds by which a prefill worker may finish later and still be preferred
    ticket_timeout: float = 10.0  # seconds a prompt may take at a prefill worker beyond the expected time
    queue: float = 1.0  # requests that may wait at a worker, as a multiple of those it runs at once
    affinity_slack: float = 2048.0  # tokens of extra load up to which a conversation stays at its worker
    decode_weight: float = 4.0  # prompt tokens that one output token counts as in a worker's load
    prefixes: int = 1 << 16  # prompt prefixes that the router remembers
    kv_events: bool = False  # subscribe to workers' KV cache events instead of inferring what they cache
    kv_blocks: int = 1 << 20  # blocks to track with kv_events, of all workers together
    breaker_failures: int = 3  # failures in a row that open a worker's circuit breaker
    breaker_pause: float = 1.0  # seconds of the circuit breaker's first pause
    foreign: tuple[ForeignWorkerConfig, ...] = ()
    foreign_key: str | None = None  # API key for foreign workers; None: the client's key is passed on
    listen_fd: int | None = None  # descriptor of an inherited, bound socket; None: listen at host and port
    trace: TraceConfig | None = None  # None: tracing is off

    def __post_init__(self) -> None:
        for name in (
            "request_timeout",
            "token_timeout",
            "beat_seconds",
            "stuck_after",
            "attempts",
            "ticket_timeout",
            "prefixes",
            "kv_blocks",
            "breaker_failures",
        ):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be above 0", param=name)
        for name in (
            "queue",
            "affinity_slack",
            "decode_weight",
            "breaker_pause",
            "migrations",
            "migration_wait",
            "split_tokens",
            "split_patience",
        ):
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be at least 0", param=name)
        if self.queue > MAX_QUEUE_SHARE:
            raise InvalidRequest(f"queue is {self.queue}; it must be at most {MAX_QUEUE_SHARE}", param="queue")
        if self.lost_after <= self.beat_seconds:
            message = f"lost_after is {self.lost_after} s; it must be longer than beat_seconds, {self.beat_seconds} s"
            raise InvalidRequest(message, param="lost_after")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of a server that gets its requests from a router."""

    router: str  # the router's URL
    name: str | None = None  # None: made from host and port
    url: str | None = None  # URL at which the router reaches this worker; None: made from host and port
    cluster_key: str | None = None  # None: the router accepts any process on its machine
    role: Role = "both"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    models: dict[str, str] = field(default_factory=lambda: {DEFAULT_MODEL: DEFAULT_MODEL})  # name in the API: source
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    open: bool = False  # may listen at addresses other than loopback without authentication
    cors_origins: tuple[str, ...] = ()  # origins of web pages that may call the API; "*": all
    allowed_hosts: tuple[str, ...] = ()  # accepted Host headers, besides localhost
    closed: bool = False  # without API keys, answer only the router, which has the cluster key
    max_body: int = 32 << 20
    request_timeout: float = math.inf  # seconds for a whole request; inf: no limit while tokens arrive
    token_timeout: float = 600.0  # seconds to the first token, and between two tokens of a stream
    stall_timeout: float = 120.0  # seconds without a message after which the engine process is restarted
    embedder: str | None = DEFAULT_EMBEDDER
    chat_template: str | None = None
    tool_style: str = "auto"  # format of tool calls; auto: detected from the chat template
    response_store: str = "auto"  # file of stored responses; auto: a temporary one; none: nothing is stored
    response_store_size: int = 256 << 20  # bytes; the oldest responses are deleted first
    generation_config: str = "auto"  # where sampling defaults come from: the checkpoint (auto), none, or a directory
    worker: WorkerConfig | None = None  # None: not part of a cluster
    trace: TraceConfig | None = None  # None: tracing is off

    def __post_init__(self) -> None:
        if not self.models:
            raise InvalidRequest("no model to serve was given", param="models", hint="name one: emberline serve MODEL")
        for name in ("request_timeout", "token_timeout", "stall_timeout"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be above 0", param=name)
        if self.embedder in self.models:
            raise InvalidRequest(
                f"{self.embedder!r} is the name of both a model and the embedder",
                param="models",
                hint="give the model another name: ALIAS=MODEL",
            )
        if len(self.models) > 1:
            for name, is_set in (("chat_template", self.chat_template), ("tool_style", self.tool_style != "auto")):
                if is_set:
                    message = f"{name} applies to one model, and {len(self.models)} models are served"
                    raise InvalidRequest(message, param=name, hint="serve this model by a server of its own")
