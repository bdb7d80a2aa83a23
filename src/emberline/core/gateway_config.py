"""GatewayConfig: the settings of a gateway process and their defaults."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from emberline.core.config import DEFAULT_EMBEDDER, TraceConfig, cache_dir
from emberline.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Settings of a gateway process.

    What each gateway in it does is stored in its own settings, not here."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()  # admin keys that always work; none given: one is created in a file
    open: bool = False  # may listen at addresses other than loopback without authentication
    cors_origins: tuple[str, ...] = ()  # origins of web pages that may call the API; "*": all
    allowed_hosts: tuple[str, ...] = ()  # accepted Host headers, besides localhost
    engine: str = "http://127.0.0.1:8000"  # URL of an Emberline server or router
    store: str | None = None  # sqlite:DIRECTORY or postgresql://...; None: SQLite in the cache directory
    redis: str | None = None  # redis://... for limits that several replicas share
    redis_gone: str = "local"  # while Redis is down: "local" counts limits per process, "closed" rejects calls
    flush: float = 1.0  # seconds between writes of log records: what a crash may lose
    cache: str | None = None  # reply cache: sqlite:FILE or redis://...; None: in memory
    embedder: str = DEFAULT_EMBEDDER  # embedding model of the engine, for semantic caching
    master_key: str | None = None  # key file, created if missing; None: in the cache directory
    max_body: int = 32 << 20  # bytes of a request body
    catalogue: str | None = None  # file of models and prices that overrides the built-in catalogue
    private_providers: bool = False  # providers created by the management API may have private addresses
    otlp: str | None = None  # URL of an OpenTelemetry collector; None: from the environment
    otlp_headers: dict[str, str] = field(default_factory=dict)  # for example the collector's key
    otlp_payloads: bool = False  # spans include requests and replies
    trace_share: float = 1.0  # fraction of calls to trace where the client made no choice

    def __post_init__(self) -> None:
        if self.max_body < 1:
            raise InvalidRequest(f"max_body is {self.max_body}; it must be at least 1", param="max_body")
        if not 0 < self.flush <= 60:
            raise InvalidRequest(f"flush is {self.flush}; it must be above 0 and at most 60 seconds", param="flush")
        if self.redis_gone not in ("local", "closed"):
            raise InvalidRequest(f"redis_gone is {self.redis_gone!r}; it must be local or closed", param="redis_gone")

    @property
    def store_url(self) -> str:
        return self.store or f"sqlite:{cache_dir() / 'gateway'}"

    @property
    def journal_dir(self) -> Path:
        """Return the directory of journals: counts of limits that are not in the store yet."""
        kind, _, location = self.store_url.partition(":")
        if kind == "sqlite":
            return Path(location.removeprefix("//")).expanduser()
        return cache_dir() / "gateway" / f"limits-{hashlib.sha256(self.store_url.encode()).hexdigest()[:16]}"

    @property
    def trace(self) -> TraceConfig | None:
        return TraceConfig.from_options(self.otlp, self.trace_share, self.otlp_headers)

    @property
    def admin_file(self) -> Path:
        """Return the file of the admin key that is created if `api_keys` is empty."""
        return cache_dir() / "gateway" / "admin.key"

    @property
    def master_file(self) -> Path:
        return Path(self.master_key) if self.master_key else cache_dir() / "gateway" / "master.key"
