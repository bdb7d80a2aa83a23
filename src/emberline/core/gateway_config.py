"""GatewayConfig: the settings of a gateway process and their defaults."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from emberline.core.config import DEFAULT_EMBEDDER, ServiceConfig, cache_dir
from emberline.core.errors import InvalidRequest
from emberline.core.keys import check_key
from emberline.core.options import option, redefine_option
from emberline.core.tls_config import TLSConfig


@dataclass(frozen=True, slots=True)
class GatewayConfig(ServiceConfig):
    """Settings of a gateway process.

    One process serves several gateways. The settings of each gateway are in the settings file and the store, not
    here."""

    port: int = redefine_option(ServiceConfig, "port", default=8080)
    # Admin keys that always work; none given: one is created in a file.
    api_keys: tuple[str, ...] = redefine_option(
        ServiceConfig,
        "api_keys",
        help="API key with all permissions; may be repeated.",
        default_text="EMBERLINE_ADMIN_KEY, keys of the store",
    )
    engine: str = option(
        "http://127.0.0.1:8000",
        "URL of the local engine or router. If it has API keys, set EMBERLINE_ENGINE_KEY to one.",
    )
    engine_key: str | None = None  # an API key of the engine; the command line reads it from EMBERLINE_ENGINE_KEY
    engine_tls_ca: str | None = option(
        None, "PEM file with the CAs of the engine's certificate.", metavar="FILE", default_text="the system's CAs"
    )
    engine_tls_cert: str | None = option(
        None, "PEM file with the gateway's client certificate for the engine.", metavar="FILE"
    )
    engine_tls_key: str | None = option(None, "PEM file with that certificate's private key.", metavar="FILE")
    store: str | None = option(
        None,
        "Database: sqlite:DIRECTORY or postgresql://...",
        default_text="SQLite in the cache directory",
    )
    redis: str | None = option(
        None,
        "redis://... URL with which several replicas share their limits.",
        default_text="one replica",
    )
    redis_gone: str = "local"  # while Redis is down: "local" counts limits per process, "closed" rejects calls
    flush: float = 1.0  # seconds between writes of log records: what a crash may lose
    cache: str | None = None  # reply cache: sqlite:FILE or redis://...; None: in memory
    embedder: str = DEFAULT_EMBEDDER  # embedding model of the engine, for semantic caching
    master_key: str | None = None  # key file, created if missing; None: in the cache directory
    catalogue: str | None = None  # file of models and prices that overrides the built-in catalogue
    private_providers: bool = False  # providers created by the management API may have private addresses
    otlp_payloads: bool = False  # spans include requests and replies

    def __post_init__(self) -> None:
        ServiceConfig.__post_init__(self)
        if not 0 < self.flush <= 60:
            raise InvalidRequest(f"flush is {self.flush}; it must be above 0 and at most 60 seconds", param="flush")
        if self.redis_gone not in ("local", "closed"):
            raise InvalidRequest(f"redis_gone is {self.redis_gone!r}; it must be local or closed", param="redis_gone")
        parts = urlsplit(self.engine)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            message = f"engine is {self.engine[:200]!r}; it must be an http or https URL"
            raise InvalidRequest(message, param="engine", hint="write --engine http://HOST:PORT")
        if self.engine_tls is not None and not self.engine.startswith("https://"):
            message = f"engine is {self.engine!r}; with engine_tls_ca or engine_tls_cert it must be an https URL"
            raise InvalidRequest(message, param="engine")
        if self.engine_key is not None:
            check_key(self.engine_key, "engine_key")

    @property
    def engine_tls(self) -> TLSConfig | None:
        """The CAs and the client certificate for calls to the engine; None: the system's CAs, no certificate."""
        files = self.engine_tls_cert, self.engine_tls_key, self.engine_tls_ca
        return TLSConfig.from_options(*files, prefix="engine_tls")

    @property
    def store_url(self) -> str:
        return self.store or f"sqlite:{cache_dir() / 'gateway'}"

    @property
    def journal_dir(self) -> Path:
        """The directory for rate limit counts that have not been written to the store yet."""
        kind, _, location = self.store_url.partition(":")
        if kind == "sqlite":
            return Path(location.removeprefix("//")).expanduser()
        return cache_dir() / "gateway" / f"limits-{hashlib.sha256(self.store_url.encode()).hexdigest()[:16]}"

    @property
    def admin_key_file(self) -> Path:
        """The file with the admin key. The gateway creates the key if no `api_keys` are configured."""
        return cache_dir() / "gateway" / "admin.key"

    @property
    def master_key_file(self) -> Path:
        return Path(self.master_key) if self.master_key else cache_dir() / "gateway" / "master.key"
