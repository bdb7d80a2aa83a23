"""GatewayConfig: the settings of a gateway process and their defaults."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from emberline.core.config import DEFAULT_EMBEDDER, TraceConfig, cache_dir
from emberline.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Of a gateway process; what each gateway in it does is its Settings."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()  # tokens that always work, and manage; none: one is made, in a file
    open: bool = False  # it may listen beyond this machine without authentication
    cors_origins: tuple[str, ...] = ()  # of web pages that may call it; "*": all
    allowed_hosts: tuple[str, ...] = ()  # names that calls to it may have in their Host header, besides localhost
    engine: str = "http://127.0.0.1:8000"  # URL of our own engine or router
    store: str | None = None  # sqlite:DIRECTORY or postgresql://...; None: in the cache directory
    redis: str | None = None  # redis://..., where several replicas count together
    redis_gone: str = "local"  # limits while Redis does not answer: counted by each process, or "closed": refused
    flush: float = 1.0  # seconds of log records that a crash of this process may lose
    cache: str | None = None  # of replies: sqlite:FILE or redis://...; None: in memory
    embedder: str = DEFAULT_EMBEDDER  # at the engine, for gateways that want similar questions answered alike
    master_key: str | None = None  # a file, made when it is missing; None: in the cache directory
    max_body: int = 32 << 20
    catalogue: str | None = None  # a file of models and prices that lies over ours
    private_providers: bool = False  # those that the management API made may be on private addresses
    otlp: str | None = None  # URL of an OpenTelemetry collector, for a span of every call; None: the environment's
    otlp_headers: dict[str, str] = field(default_factory=dict)  # such as its key
    otlp_payloads: bool = False  # with what was asked and answered
    trace_share: float = 1.0  # of calls whose client does not say whether it wants them traced

    def __post_init__(self) -> None:
        if self.max_body < 1:
            raise InvalidRequest("max_body must be at least 1", param="max_body")
        if not 0 < self.flush <= 60:
            raise InvalidRequest("flush must be above 0 and at most 60 seconds", param="flush")
        if self.redis_gone not in ("local", "closed"):
            raise InvalidRequest("redis_gone must be local or closed", param="redis_gone")

    @property
    def store_url(self) -> str:
        return self.store or f"sqlite:{cache_dir() / 'gateway'}"

    @property
    def journal_dir(self) -> Path:
        """Of files with what limits counted and the store does not have yet."""
        kind, _, where = self.store_url.partition(":")
        if kind == "sqlite":
            return Path(where.removeprefix("//")).expanduser()
        return cache_dir() / "gateway" / f"limits-{hashlib.sha256(self.store_url.encode()).hexdigest()[:16]}"

    @property
    def trace(self) -> TraceConfig | None:
        return TraceConfig.given(self.otlp, self.trace_share, self.otlp_headers)

    @property
    def admin_file(self) -> Path:
        """Of the token that manages where no other was given, made when it is missing."""
        return cache_dir() / "gateway" / "admin.key"

    @property
    def master_file(self) -> Path:
        return Path(self.master_key) if self.master_key else cache_dir() / "gateway" / "master.key"
