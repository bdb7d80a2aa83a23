"""Settings and their defaults: frozen, validated when built. The only place that reads the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from emberline.core.errors import InvalidRequest
from emberline.core.foreign_config import Foreign
from emberline.core.foreign_config import Role as Role

DEFAULT_MODEL = "smollm2"
DEFAULT_EMBEDDER = "minilm"
ITL_TAIL = 3.0  # inter-token targets that one token of ten may take
MOST_QUEUED = 1000  # as a share of those that a worker runs at once
SUPERVISED = "EMBERLINE_SUPERVISED"
MASTER_KEY = "EMBERLINE_MASTER_KEY"  # of the gateway's vault: keys in base64, the one in use first


def cache_dir() -> Path:
    """Where pulled models and built kernels are kept: EMBERLINE_CACHE, or ~/.cache/emberline."""
    return Path(os.environ.get("EMBERLINE_CACHE") or "~/.cache/emberline").expanduser()


def kernel_dir() -> Path:
    """Where built kernels are kept, of a CPU and of a GPU."""
    return cache_dir() / "kernels"


def secret(name: str) -> str | None:
    """Of an environment variable that a configuration names."""
    return os.environ.get(name)


def cluster_key() -> str | None:
    """Of a cluster whose key no option says: EMBERLINE_CLUSTER_KEY. Options are seen by everybody on the machine."""
    return os.environ.get("EMBERLINE_CLUSTER_KEY") or None


def supervised_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that ends when its stdin does, because that is held by its supervisor."""
    return {**environment, SUPERVISED: "1"}


def is_supervised() -> bool:
    """Whether this process was started by a supervisor. Asked once: children of this process are not."""
    return os.environ.pop(SUPERVISED, "") == "1"


def visible_gpus() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES names; None: all."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if given is None else [name.strip() for name in given.split(",") if name.strip()]


def environment(cluster_key: str) -> dict[str, str]:
    """For a process of a cluster: ours, with its key."""
    return {**os.environ, "EMBERLINE_CLUSTER_KEY": cluster_key}


def otlp_endpoint() -> str | None:
    """Of OpenTelemetry's own variables, for all that trace."""
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or (f"{base.rstrip('/')}/v1/traces" if base else None)


def otlp_headers() -> dict[str, str]:
    """Such as a collector's key: NAME=VALUE,NAME=VALUE."""
    pairs = [pair.partition("=") for pair in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(",")]
    return {name.strip().lower(): unquote(value.strip()) for name, equals, value in pairs if equals}


def core_count() -> int:
    """Cores this process may use, which a container may have cut down."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    block_size: int = 16
    max_batch_tokens: int = 512  # computed in one step, all requests together
    max_running: int = 64
    max_waiting: int = 1024
    max_context: int = 8192
    prefix_cache: bool = True
    ageing_seconds: float = 10.0  # a batch request that waited this long counts as interactive
    itl_target: float | None = None  # seconds between two tokens of a stream, which chunks of prompts must not delay
    itl_tail: float = ITL_TAIL  # targets that one token of ten may take while prompts wait
    load_timeout: float = 5.0  # seconds a request waits for blocks of a lower tier; the rest is computed

    def __post_init__(self) -> None:
        if self.block_size < 8 or self.block_size % 8:
            raise InvalidRequest(f"block_size is {self.block_size}; it must be a multiple of 8", param="block_size")
        for name in ("max_batch_tokens", "max_running", "max_waiting", "max_context"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be at least 1", param=name)


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Of an engine that hands blocks of its cache to others and takes theirs."""

    name: str  # that others know it by
    host: str = "127.0.0.1"  # where it listens
    port: int = 0  # 0: any that is free
    advertise: str | None = None  # the host that others reach it at; None: as `host`
    lease: float = 10.0  # seconds that published blocks are kept unless somebody wants them
    patience: float = 30.0  # seconds that a request waits for a peer that lives and sends nothing; the rest is computed
    required: bool = True  # whether an engine that cannot do it refuses to start, or goes without

    def __post_init__(self) -> None:
        for name in ("lease", "patience"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} must be above 0", param=name)


KV_PORTS = 8  # reserved for one engine from kv_port on: TCP, Mooncake's leases, its engine (2), its store (2), 2 spare
WEIGHTS = ("auto", "plain", "packed", "both")  # how a GPU keeps them


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine process is started with, on whatever device."""

    model: str  # a checkpoint directory, already resolved
    device: str = "auto"  # cpu, cuda, or auto: a GPU if there is one that our kernels are made for
    dtype: str = "auto"  # auto: as the checkpoint has it
    weights: str = "auto"  # on a GPU: plain, packed, both, or auto: packed if the files are
    kv_dtype: str = "auto"  # auto: as dtype
    kv_memory: int | None = None  # bytes; None: planned from what the machine has free
    threads: int = 0  # 0: all cores
    max_context: int | None = None  # None: the model's own
    max_batch_tokens: int | None = None  # None, here and below: what suits the device
    max_running: int | None = None
    max_waiting: int = 1024
    block_size: int | None = None
    prefix_cache: bool = True
    itl_target_ms: float | None = None
    itl_tail: float = ITL_TAIL
    kv_host_memory: int = 0  # bytes of main memory for blocks that the cache has no room for
    kv_disk: str | None = None  # a directory for them
    kv_disk_size: int | None = None  # bytes there
    kv_policy: str = "lru"  # or arc: who leaves these when they are full
    kv_store: str | None = None  # HOST:PORT of the master of a store that a cluster shares, for them too
    kv_store_memory: int = 1 << 30  # bytes of main memory that this engine gives to it
    kv_codec: str = "auto"  # of blocks on a disk and between hosts; auto: where it is faster; uw: always; none
    kv_checksums: bool | None = None  # of each block, from its publication to its arrival; None: with Mooncake
    kv_mooncake: bool = False  # blocks travel by Mooncake's Transfer Engine too, if it works here
    kv_mooncake_host: str | None = None  # address of this host for its engine and store; None: loopback
    kv_port: int = 0  # first of the ports that blocks are exchanged at; 0: any that are free
    transfer: TransferConfig | None = None  # None: it keeps its blocks to itself

    def __post_init__(self) -> None:
        sizes = ("kv_memory", "kv_disk_size", "max_context", "max_batch_tokens", "max_running", "block_size")
        for name, least in (("threads", 0), ("kv_host_memory", 0), *((name, 1) for name in sizes)):
            if (value := getattr(self, name)) is not None and value < least:
                raise InvalidRequest(f"{name} is {value}; it must be at least {least}", param=name)
        if (self.kv_disk is None) != (self.kv_disk_size is None):
            raise InvalidRequest("kv_disk and kv_disk_size need each other: give both", param="kv_disk")
        if not 0 <= self.kv_port <= 65536 - KV_PORTS:
            raise InvalidRequest(f"kv_port is {self.kv_port}; it must be 0 to {65536 - KV_PORTS}", param="kv_port")
        if self.kv_mooncake_host is not None and not self.kv_mooncake and self.kv_store is None:
            message = "kv_mooncake_host is given, and neither kv_mooncake nor kv_store is"
            raise InvalidRequest(message, param="kv_mooncake_host", hint="add --kv-mooncake or --kv-store")
        if self.itl_tail != ITL_TAIL and self.itl_target_ms is None:
            message = f"itl_tail is {self.itl_tail}, a multiple of itl_target_ms, which is not given"
            raise InvalidRequest(message, param="itl_tail", hint="add --itl-target-ms")
        if self.has_tiers and not self.prefix_cache:
            raise InvalidRequest("blocks are kept for the prefix cache, which is off", param="prefix_cache")
        if self.device not in ("auto", "cpu", "cuda"):
            raise InvalidRequest(f"device is {self.device!r}; it must be auto, cpu or cuda", param="device")
        if self.weights not in WEIGHTS:
            raise InvalidRequest(f"weights is {self.weights!r}; it is one of {', '.join(WEIGHTS)}", param="weights")
        if self.kv_codec not in ("auto", "none", "uw"):
            raise InvalidRequest(f"kv_codec is {self.kv_codec!r}; it is auto, none or uw", param="kv_codec")

    def with_kv_ports(self, index: int) -> EngineConfig:
        """Return the settings of the engine of this index among those that share `kv_port`."""
        port = self.kv_port + index * KV_PORTS if self.kv_port else 0
        transfer = self.transfer
        if transfer is not None and port:  # a stated port that cannot be had is an error
            transfer = replace(transfer, port=port, required=True)
        return replace(self, kv_port=port, transfer=transfer)

    @property
    def seals_blocks(self) -> bool:
        """Whether published blocks carry a checksum. Mooncake lets a stranger overwrite them, so there they do."""
        return self.kv_mooncake if self.kv_checksums is None else self.kv_checksums

    @property
    def has_tiers(self) -> bool:
        return self.kv_host_memory > 0 or self.kv_disk is not None or self.kv_store is not None


@dataclass(frozen=True, slots=True)
class GPUConfig:
    """What an engine on a GPU is started with besides its model."""

    max_running: int = 256
    max_waiting: int = 4096
    max_batch_tokens: int = 8192
    max_context: int | None = None  # None: the model's own
    block_size: int = 64
    prefix_cache: bool = True
    weights: str = "auto"  # plain; packed: 12 bits instead of 16, to the bit; both; auto: packed if the files are
    kv_dtype: str = "auto"  # auto: as the model; or float8
    kv_tokens: int | None = None  # None: what the memory holds
    kv_memory: int | None = None  # the same in bytes
    graphs: bool = True  # steps of single tokens run as captured graphs
    overlap: bool = True  # a step is planned while the one before it runs
    itl_target_ms: float | None = None  # chunks of prompts are cut so that other streams get their next token in time
    itl_tail: float = ITL_TAIL  # targets that one token of ten may take while prompts wait
    tiers: bool = False  # blocks move to main memory and back, and need scratch on the way
    transfer: bool = False  # blocks go to other engines and come from them, and need scratch too

    def __post_init__(self) -> None:
        if self.block_size not in (16, 32, 64):
            raise InvalidRequest(f"block_size is {self.block_size}; on a GPU it is 16, 32 or 64", param="block_size")
        if self.weights not in WEIGHTS:
            raise InvalidRequest(f"weights is {self.weights!r}; it is one of {', '.join(WEIGHTS)}", param="weights")
        if self.itl_target_ms is not None and self.itl_target_ms <= 0:
            raise InvalidRequest("itl_target_ms must be above 0", param="itl_target_ms")
        if not 1.0 <= self.itl_tail <= 100.0:
            raise InvalidRequest(f"itl_tail is {self.itl_tail}; it must be from 1 to 100", param="itl_tail")
        if self.kv_tokens is not None and self.kv_memory is not None:
            raise InvalidRequest("kv_tokens and kv_memory say the same thing: give one", param="kv_tokens")


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """How models that do not fit together take turns."""

    turn: float = 5.0  # seconds a model may keep taking requests while another waits for its memory
    wait: float = 60.0  # seconds until a request is refused whose model could not be woken
    max_waiting: int = 1024  # for one model

    def __post_init__(self) -> None:
        for name in ("turn", "wait", "max_waiting"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} must be above 0", param=name)


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Where spans of requests go: to an OpenTelemetry collector, over HTTP."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    share: float = 1.0  # of requests whose client does not say whether it wants them traced

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidRequest(f"otlp is {self.url[:200]!r}, not a URL", param="otlp", hint="http://HOST:4318")
        if not 0 <= self.share <= 1:
            raise InvalidRequest("trace_share must be in [0, 1]", param="trace_share")

    @staticmethod
    def given(url: str | None, share: float, headers: dict[str, str] | None = None) -> TraceConfig | None:
        """`url`: one without a path is enough; "": nothing is traced; None: as the environment says."""
        found = otlp_endpoint() if url is None else url
        if not found:
            return None
        whole = found if urlsplit(found).path.strip("/") else f"{found.rstrip('/')}/v1/traces"
        return TraceConfig(whole, {**otlp_headers(), **(headers or {})}, share)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    open: bool = False  # it may listen beyond this machine without authentication
    cors_origins: tuple[str, ...] = ()  # of web pages that may call it; "*": all
    allowed_hosts: tuple[str, ...] = ()  # names that calls to it may have in their Host header, besides localhost
    cluster_key: str | None = None  # of workers and of who drains them; None: whoever is on this machine
    max_body: int = 32 << 20
    request_timeout: float = math.inf  # seconds of a whole request; inf: as long as its tokens flow
    token_timeout: float = 600.0  # seconds to the first token, and between two tokens of a stream
    beat_seconds: float = 1.0  # between two signs of life of a worker
    lost_after: float = 4.0  # seconds without one
    stuck_after: float = 30.0  # seconds in which a worker that has requests makes no step
    attempts: int = 3  # workers a request is tried on, before its first byte
    migrations: int = 3  # times that a stream goes on at another worker
    migration_wait: float = 10.0  # seconds until there is one; or one to begin at, when those that it met were away
    split_tokens: float = 256.0  # of a prompt, to be computed, that are worth another worker; inf: never split
    split_patience: float = 3.0  # seconds by which it may be done later there, so that streams are not held up
    ticket_timeout: float = 10.0  # seconds a prompt may wait there beyond what was expected
    queue: float = 1.0  # requests that may wait at a worker, as a share of those it runs at once
    affinity_slack: float = 2048.0  # tokens of work, at most, by which a conversation's worker may be behind the others
    decode_weight: float = 4.0  # a token to be generated is work as for so many of a prompt
    prefixes: int = 1 << 16  # beginnings of prompts remembered
    kv_events: bool = False  # follows what workers' caches hold, instead of inferring it
    kv_blocks: int = 1 << 20  # followed, of all workers together
    breaker_failures: int = 3  # in a row
    breaker_pause: float = 1.0  # seconds
    foreign: tuple[Foreign, ...] = ()
    foreign_key: str | None = None  # API key of these servers; None: the client's is passed on
    listen_fd: int | None = None  # a socket that the process inherited and that is bound; None: host and port
    trace: TraceConfig | None = None  # None, here and below: nothing is traced

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
                raise InvalidRequest(f"{name} must be above 0", param=name)
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
                raise InvalidRequest(f"{name} must not be below 0", param=name)
        if self.queue > MOST_QUEUED:
            raise InvalidRequest(f"queue must not be above {MOST_QUEUED}", param="queue")
        if self.lost_after <= self.beat_seconds:
            raise InvalidRequest("lost_after must be longer than beat_seconds", param="lost_after")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Of a server that takes its requests from a router."""

    router: str  # URL
    name: str | None = None  # None: made from host and port
    url: str | None = None  # under which the router reaches it; None: host and port
    cluster_key: str | None = None  # None: whoever is on this machine
    role: Role = "both"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    models: dict[str, str] = field(default_factory=lambda: {DEFAULT_MODEL: DEFAULT_MODEL})  # name in the API: source
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    open: bool = False  # it may listen beyond this machine without authentication
    cors_origins: tuple[str, ...] = ()  # of web pages that may call it; "*": all
    allowed_hosts: tuple[str, ...] = ()  # names that calls to it may have in their Host header, besides localhost
    closed: bool = False  # without API keys it answers only its router, which has the cluster key
    max_body: int = 32 << 20
    request_timeout: float = math.inf  # seconds of a whole request; inf: as long as its tokens flow
    token_timeout: float = 600.0  # seconds to the first token, and between two tokens of a stream
    stall_timeout: float = 120.0  # an engine with open requests and no sign of life for so long is restarted
    embedder: str | None = DEFAULT_EMBEDDER
    chat_template: str | None = None
    tool_style: str = "auto"  # auto: as the chat template shows
    response_store: str = "auto"  # file of the Responses API; auto: until the server ends; none: nothing is kept
    response_store_size: int = 256 << 20  # bytes; the oldest responses leave first
    generation_config: str = "auto"  # where sampling defaults come from: the checkpoint (auto), none, or a directory
    worker: WorkerConfig | None = None  # None: it serves alone
    trace: TraceConfig | None = None

    def __post_init__(self) -> None:
        if not self.models:
            raise InvalidRequest("there is no model to serve", param="models")
        for name in ("request_timeout", "token_timeout", "stall_timeout"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} must be above 0", param=name)
        if self.embedder in self.models:
            raise InvalidRequest(
                f"{self.embedder!r} names a model and the embedder", param="models", hint="write ALIAS=MODEL"
            )
        if len(self.models) > 1:
            for name, given in (("chat_template", self.chat_template), ("tool_style", self.tool_style != "auto")):
                if given:
                    raise InvalidRequest(f"{name} is one model's: there are {len(self.models)}", param=name)
