"""Settings of servers, routers and workers, and functions that read environment variables.

Configs are frozen, and validated when they are built. EngineConfig and GatewayConfig have their own modules."""

from __future__ import annotations

import math
import os
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from emberline.core.errors import InvalidRequest
from emberline.core.foreign_config import ROLES, ForeignWorkerConfig
from emberline.core.foreign_config import Role as Role
from emberline.core.header_texts import check_header_texts
from emberline.core.keys import check_key
from emberline.core.options import option
from emberline.core.router_urls import parse_router_urls
from emberline.core.tls_config import CLIENT_CERT_CHOICES, TLSConfig

DEFAULT_MODEL = "smollm2"
DEFAULT_EMBEDDER = "minilm"
MAX_QUEUE_SHARE = 1000  # largest queue of a worker, as a multiple of the requests it runs at once
MASTER_KEY_VARIABLE = "EMBERLINE_MASTER_KEY"  # keys of the gateway's vault in base64, the current one first


def cache_dir() -> Path:
    """Return the directory for models and compiled kernels: EMBERLINE_CACHE, or ~/.cache/emberline."""
    return Path(os.environ.get("EMBERLINE_CACHE") or "~/.cache/emberline").expanduser()


def kernel_dir() -> Path:
    """Return the directory of compiled kernels, for CPU and GPU."""
    return cache_dir() / "kernels"


def read_secret(variable_name: str) -> str | None:
    """Return a secret from the environment variable `variable_name`; None if the variable is not set."""
    return os.environ.get(variable_name)


def otlp_endpoint() -> str | None:
    """Return the collector's URL from OpenTelemetry's environment variables; None if they are not set."""
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or (f"{base.rstrip('/')}/v1/traces" if base else None)


def otlp_headers() -> dict[str, str]:
    """Return the headers in OTEL_EXPORTER_OTLP_HEADERS, which has the form NAME=VALUE,NAME=VALUE."""
    pairs = [pair.partition("=") for pair in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(",")]
    return {name.strip().lower(): unquote(value.strip()) for name, equals, value in pairs if equals}


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """The OpenTelemetry collector that receives trace spans over HTTP."""

    collector_url: str
    collector_headers: dict[str, str] = field(default_factory=dict)
    traced_share: float = 1.0  # fraction of requests to trace where the client made no choice

    def __post_init__(self) -> None:
        parts = urlsplit(self.collector_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidRequest(
                f"otlp is {self.collector_url[:200]!r}; it must be an http or https URL",
                param="otlp",
                hint="use http://HOST:4318",
            )
        if not 0 <= self.traced_share <= 1:
            raise InvalidRequest(f"trace_share is {self.traced_share}; it must be from 0 to 1", param="trace_share")

    @staticmethod
    def from_options(url: str | None, traced_share: float, headers: dict[str, str] | None = None) -> TraceConfig | None:
        """Return the settings for the options --otlp and --trace-share; None if tracing is off.

        `url`: the collector's URL, whose path may be missing. An empty `url` turns tracing off. If `url` is None,
        OpenTelemetry's environment variables decide."""
        endpoint = otlp_endpoint() if url is None else url
        if not endpoint:
            return None
        full_url = endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        return TraceConfig(full_url, {**otlp_headers(), **(headers or {})}, traced_share)


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Settings that every HTTP service has: server, router and gateway."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0: any free port.")
    api_keys: tuple[str, ...] = option(
        (),
        "Require this API key; may be repeated.",
        flag="--api-key",
        metavar="KEY",
        is_repeatable=True,
        default_text="EMBERLINE_API_KEY; without it, none required",
    )
    open: bool = option(False, "Allow other machines to connect without authentication.")
    cors_origins: tuple[str, ...] = option(
        (),
        "Sites whose web pages may call, such as https://chat.example.com, or *.",
        metavar="ORIGIN,...",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host names under which clients call, such as a proxy's.",
        metavar="NAME,...",
        default_text="localhost and IP addresses only",
    )
    tls_cert: str | None = option(
        None, "PEM file with the certificate to serve HTTPS with.", metavar="FILE", default_text="plain HTTP"
    )
    tls_key: str | None = option(None, "PEM file with the certificate's private key.", metavar="FILE")
    tls_ca: str | None = option(
        None,
        "PEM file with CAs; clients must present a certificate that one of them signed.",
        metavar="FILE",
        default_text="clients need no certificate",
    )
    max_body: int = 32 << 20  # bytes of a request body
    otlp: str | None = option(
        None,
        "URL of an OpenTelemetry collector for traces of requests.",
        metavar="URL",
        default_text="OTEL_EXPORTER_OTLP_ENDPOINT; without it, no traces",
    )
    otlp_headers: dict[str, str] = field(default_factory=dict)  # for example the collector's key
    trace_share: float = option(1.0, "Share, 0 to 1, of requests without a trace context that are traced.")

    def __post_init__(self) -> None:
        if self.max_body < 1:
            raise InvalidRequest(f"max_body is {self.max_body}; it must be at least 1", param="max_body")
        _ = self.tls  # raises InvalidRequest if an option is set without another that it needs
        for key in self.api_keys:
            check_key(key, "api_keys")
        check_header_texts(self.otlp_headers, "otlp_headers")

    @property
    def tls(self) -> TLSConfig | None:
        """The certificate and the CAs; None if the service uses plain HTTP."""
        return TLSConfig.for_listener(self.tls_cert, self.tls_key, self.tls_ca)

    @property
    def scheme(self) -> str:
        """The scheme of the service's URL."""
        return "http" if self.tls_cert is None else "https"

    @property
    def trace(self) -> TraceConfig | None:
        """The settings for exporting trace spans; None if tracing is off.

        Raises InvalidRequest if the collector's URL is invalid."""
        return TraceConfig.from_options(self.otlp, self.trace_share, self.otlp_headers)


@dataclass(frozen=True, slots=True)
class InferenceServiceConfig(ServiceConfig):
    """Settings that a server and a router share."""

    request_timeout: float = option(math.inf, "Time limit of a whole request in seconds; inf: none.", unit="s")
    token_timeout: float = option(600.0, "Seconds to the first token, and between two tokens of a stream.", unit="s")
    cluster_key: str | None = option(
        None,
        "Key that a router, its workers and emberline drain share.",
        default_text="EMBERLINE_CLUSTER_KEY; without it, the router accepts only processes of its machine",
    )
    other_cluster_keys: tuple[str, ...] = ()  # accepted too, while the cluster key is being changed; never sent
    tls_names: tuple[str, ...] = option(
        (),
        "Names, one of which the certificate of every router and worker must have; *.DOMAIN: all names one level below"
        " DOMAIN.",
        metavar="NAME,...",
        default_text="servers: the host of their URL; clients: any name",
    )
    tls_client_certs: str = option(
        "all",
        "Calls that need a client certificate if --tls-ca is set: all, or only those between router and workers.",
        choices=CLIENT_CERT_CHOICES,
    )

    def __post_init__(self) -> None:
        ServiceConfig.__post_init__(self)
        _check_positive(self, "request_timeout", "token_timeout")
        for key in self.cluster_keys:
            check_key(key, "cluster_key")

    @property
    def cluster_keys(self) -> tuple[str, ...]:
        """The accepted cluster keys; () if there is no cluster key."""
        return () if self.cluster_key is None else (self.cluster_key, *self.other_cluster_keys)

    @property
    def tls(self) -> TLSConfig | None:
        files = self.tls_cert, self.tls_key, self.tls_ca
        return TLSConfig.for_listener(*files, self.tls_names, self.tls_client_certs)


@dataclass(frozen=True, slots=True)
class RouterConfig(InferenceServiceConfig):
    stuck_after: float = option(
        30.0, "Seconds without an engine step after which a worker with requests counts as stuck.", unit="s"
    )
    lost_after: float = option(4.0, "Seconds without a heartbeat after which a worker counts as lost.", unit="s")
    queue: float = option(1.0, "Requests that may wait at a worker, as a share of those it runs at the same time.")
    affinity_slack: float = option(
        2048.0,
        "Extra backlog in tokens at which the worker with a conversation's cache is still preferred.",
        unit="tokens",
    )
    decode_weight: float = option(4.0, "Cost of a generated token, in prompt tokens.", unit="tokens")
    split_tokens: float = option(
        256.0,
        "Uncached prompt tokens from which a prefill worker computes the prompt; inf: never.",
        unit="tokens",
    )
    split_patience: float = option(
        3.0,
        "Seconds by which a prefill worker may finish the prompt later than the answering worker would.",
        unit="s",
    )
    ticket_timeout: float = option(10.0, "Seconds to wait for a prefill worker beyond the expected time.", unit="s")
    migrations: int = option(3, "Times that another worker may continue a stream.")
    migration_wait: float = option(
        10.0, "Seconds that a request waits for a worker to start or continue on when none is available.", unit="s"
    )
    kv_events: bool = option(False, "Route by the KV blocks that workers report, instead of inferring them.")
    event_ids: bool = option(
        False, "Write an id in each event of a stream; clients can continue a broken stream with Last-Event-ID."
    )
    foreign: tuple[ForeignWorkerConfig, ...] = option(
        (),
        "A vLLM or SGLang server to use, such as vllm:decode=http://host:8000; may be repeated.",
        metavar="KIND[:ROLE[:PORT]]=URL",
        is_repeatable=True,
    )
    beat_seconds: float = 1.0  # seconds between two heartbeats of a worker
    attempts: int = 3  # workers that a request is sent to, one after the other, before the first byte of its reply
    prefixes: int = 1 << 16  # prompt prefixes that the router remembers
    kv_blocks: int = 1 << 20  # blocks to track with kv_events, of all workers together
    breaker_failures: int = 3  # failures in a row that open a worker's circuit breaker
    breaker_pause: float = 1.0  # seconds of the circuit breaker's first pause
    foreign_key: str | None = None  # API key for foreign workers; None: the client's key is passed on
    listen_fd: int | None = None  # descriptor of an inherited, bound socket; None: listen at host and port

    def __post_init__(self) -> None:
        InferenceServiceConfig.__post_init__(self)
        _check_positive(
            self,
            *("beat_seconds", "stuck_after", "attempts", "ticket_timeout", "prefixes", "kv_blocks", "breaker_failures"),
        )
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
            if not getattr(self, name) >= 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be at least 0", param=name)
        if self.queue > MAX_QUEUE_SHARE:
            raise InvalidRequest(f"queue is {self.queue}; it must be at most {MAX_QUEUE_SHARE}", param="queue")
        if not self.lost_after > self.beat_seconds:
            message = f"lost_after is {self.lost_after} s; it must be longer than beat_seconds, {self.beat_seconds} s"
            raise InvalidRequest(message, param="lost_after")
        plain = next((each.url for each in self.foreign if not each.url.startswith("https://")), None)
        if self.tls_ca is not None and plain is not None:  # the client's API key and prompt would be in clear text
            raise InvalidRequest(
                f"foreign worker {plain} has an http URL; with tls_ca it must be an https URL",
                param="foreign",
                hint="serve it with TLS (vLLM: --ssl-certfile, --ssl-keyfile), or put a proxy with TLS in front",
            )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of a server that gets its requests from a router."""

    routers: tuple[str, ...] = option(
        MISSING,
        "URL of a router to register with; may be repeated, once for each router.",
        flag="--router",
        metavar="URL",
        is_repeatable=True,
        default_text="none",
    )
    worker_name: str | None = option(
        None, "Name at the router, the same after every restart.", default_text="HOST:PORT"
    )
    worker_url: str | None = option(
        None, "URL under which the router reaches this server.", default_text="host and port"
    )
    role: Role = option(
        "both",
        "prefill: compute prompts for other workers; decode: generate from their prompts; both: do both.",
        choices=ROLES,
    )
    can_sleep: bool = option(
        False,
        "Let an autoscaler put the worker to sleep: weights stay in host memory, GPU memory is freed, the next request"
        " wakes it. No KV blocks are exchanged with other workers.",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "routers", parse_router_urls(self.routers))
        if self.can_sleep and self.role != "both":
            message = (
                f"can_sleep is set, but role is {self.role}: a sleeping worker cannot exchange KV blocks with others"
            )
            raise InvalidRequest(message, param="can_sleep", hint="use --role both, or drop --can-sleep")


@dataclass(frozen=True, slots=True)
class ServerConfig(InferenceServiceConfig):
    models: dict[str, str] = field(default_factory=lambda: {DEFAULT_MODEL: DEFAULT_MODEL})  # name in the API: source
    stall_timeout: float = option(120.0, "Seconds without progress after which the engine is restarted.", unit="s")
    embedder: str | None = option(DEFAULT_EMBEDDER, "Model of /v1/embeddings, or none.")
    admin_keys: tuple[str, ...] = option(
        (),
        "Key with which clients may pull, load, unload and remove models; may be repeated.",
        flag="--admin-key",
        metavar="KEY",
        is_repeatable=True,
        default_text="EMBERLINE_ADMIN_KEY; without it, these are off",
    )
    chat_template: str | None = option(
        None, "Jinja file with the chat template.", metavar="FILE", default_text="the model's own"
    )
    tool_style: str = option(
        "auto", "Format of tool calls, such as hermes or kimi; auto: what the chat template shows.", metavar="NAME"
    )
    dashboard: str | None = option(None, "URL of a gateway's dashboard, for a link in the playground.", metavar="URL")
    reasoning_style: str = option(
        "auto", "Format of reasoning, such as think, or none; auto: what the chat template shows.", metavar="NAME"
    )
    generation_config: str = option(
        "auto",
        "Sampling defaults: auto (the checkpoint's generation_config.json), none, or a directory with such a file.",
    )
    default_max_tokens: int | None = option(
        None,
        "Maximum tokens of an answer whose request sets no limit; 0: as many as the context holds.",
        metavar="N",
        default_text="the checkpoint's max_new_tokens, else 4096, or 32768 if the model reasons",
    )
    response_store: str = option(
        "auto",
        "SQLite file for stored responses (previous_response_id); auto: kept until the server ends; none: off.",
        metavar="FILE",
    )
    response_store_size: int = option(
        256 << 20,
        "Maximum size of stored responses in bytes; the oldest of the API key with the most are deleted first.",
        unit="bytes",
    )
    strict: bool = option(
        False, "Refuse requests with unknown fields or hosted tools, to test clients. Otherwise they are ignored."
    )
    closed: bool = False  # without API keys, answer only the router, which has the cluster key
    worker: WorkerConfig | None = None  # None: not part of a cluster

    def __post_init__(self) -> None:
        InferenceServiceConfig.__post_init__(self)
        _check_positive(self, "stall_timeout")
        _check_worker_tls(self)
        for key in self.admin_keys:
            check_key(key, "admin_keys")
        if self.default_max_tokens is not None and self.default_max_tokens < 0:
            message = f"default_max_tokens is {self.default_max_tokens}; it must be at least 0"
            raise InvalidRequest(message, param="default_max_tokens")
        if not self.models:
            raise InvalidRequest(
                "models is empty: there is no model to serve", param="models", hint="name one: emberline serve MODEL"
            )
        if self.embedder in self.models:
            raise InvalidRequest(
                f"the name {self.embedder!r} is used for a model and for the embedder",
                param="models",
                hint="give the model another name: ALIAS=MODEL",
            )
        if self.dashboard is not None and not self.dashboard.startswith(("http://", "https://")):
            message = f"dashboard is {self.dashboard[:200]!r}; it must be an http or https URL"
            raise InvalidRequest(message, param="dashboard", hint="write --dashboard http://HOST:PORT")
        if len(self.models) > 1:
            styles = ((name, getattr(self, name) != "auto") for name in ("tool_style", "reasoning_style"))
            for name, is_set in (("chat_template", self.chat_template), *styles):
                if is_set:
                    message = f"{name} applies to one model, and {len(self.models)} models are served"
                    raise InvalidRequest(message, param=name, hint="serve this model by a server of its own")


def _check_worker_tls(config: ServerConfig) -> None:
    """Raise InvalidRequest if a worker would use TLS for only a part of its cluster's traffic.

    The same error is raised for a server that is no worker and has settings for TLS between cluster processes."""
    if config.worker is None:
        if config.tls_names or config.tls_client_certs != "all":
            name = "tls_names" if config.tls_names else "tls_client_certs"
            message = f"{name} is set, but the setting is only for a router and its workers"
            raise InvalidRequest(message, param=name, hint="add --router URL, or drop it")
    elif config.tls_cert is not None:
        if config.tls_ca is None:
            message = "tls_cert is set without tls_ca: a worker must check the certificates of its router and peers"
            raise InvalidRequest(message, param="tls_ca", hint="add --tls-ca FILE")
        routers = (("router", url) for url in config.worker.routers)
        for name, url in (*routers, ("worker_url", config.worker.worker_url)):
            if url is not None and not url.startswith("https://"):
                message = f"{name} is {url!r}; with tls_cert it must be an https URL"
                raise InvalidRequest(message, param=name)


def _check_positive(config: Any, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            raise InvalidRequest(f"{name} is {getattr(config, name)}; it must be above 0", param=name)
