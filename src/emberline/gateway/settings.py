"""Settings: of one gateway. Plain data, so that they come alike from gateway.toml and from the store, travel as JSON
and describe themselves in the management API. Frozen: a change is a new Settings with a higher version."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.costs.cost import Price
from emberline.gateway.dialects.prefill import Prefill
from emberline.gateway.guardrails.policy import Guardrails
from emberline.gateway.routes.pool import Pool

Backoff = Literal["constant", "linear", "exponential"]
CacheScope = Literal["gateway", "key", "user"]


class Retries(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    attempts: int = 2  # tries at one provider, the first among them
    delay: float = 0.2  # seconds before the second
    backoff: Backoff = "exponential"

    def __post_init__(self) -> None:
        if not 1 <= self.attempts <= 5:
            raise InvalidRequest("retries.attempts must be from 1 to 5", param="retries.attempts")
        if not 0 <= self.delay <= 5:
            raise InvalidRequest("retries.delay must be from 0 to 5 seconds", param="retries.delay")


class Timeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds."""

    connect: float = 5.0
    first_byte: float = 60.0  # of a stream: to its first content; a plain reply has until `total`, unless asked
    between_events: float = 60.0  # of silence: what is not a whole event, or a whole reply, does not count
    total: float = 600.0
    session: float = 3600.0  # in place of it, of a realtime socket
    idle: float = 600.0  # of one on which nobody says anything

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 < getattr(self, name) <= 86_400:
                raise InvalidRequest(f"timeouts.{name} must be above 0 and at most a day", param=f"timeouts.{name}")


class Logging(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    collect: bool = True
    payloads: bool = True
    days: int = 30  # kept


class ProviderSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What this gateway knows of one provider: a slug of ours, or one of its own (`custom-...`, any compatible URL)."""

    base_url: str | None = None  # None: the provider's own
    key: str | None = None  # a secret in the file itself; better are `key_env` and the vault
    key_env: str | None = None  # name of an environment variable
    key_file: str | None = None  # such as a service account's JSON, or what `gcloud auth application-default` wrote
    speaks: tuple[str, ...] | None = None  # dialects; None: as the provider does
    headers: dict[str, str] = {}  # sent with every request
    prefill: Prefill | None = None  # how its chat goes on with an assistant's turn; None: as the provider does
    enabled: bool = True
    public: bool = False  # its address must be a public one, unless the operator allows private ones


class Fallback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to go on when `model` (with `*` at its end, or alone) cannot answer."""

    model: str
    to: tuple[str, ...]  # "provider/model"

    def __post_init__(self) -> None:
        if bad := [target for target in self.to if not all(target.partition("/"))]:
            raise InvalidRequest(f"a fallback to {bad[0]!r}: it must be PROVIDER/MODEL", param="fallbacks.to")


class BreakerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    failures: int = 5  # in a row
    pause: float = 1.0  # seconds, doubled each time up to 30


class Semantic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replies to questions that only mean the same. `shadow` answers none, and counts how often it would be wrong."""

    mode: Literal["off", "shadow", "on"] = "off"
    threshold: float = 0.95  # cosine of the two questions

    def __post_init__(self) -> None:
        if not 0.5 <= self.threshold <= 1:
            raise InvalidRequest("semantic.threshold must be from 0.5 to 1", param="semantic.threshold")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    account: str = "default"
    gateway: str = "default"
    version: int = 0
    authentication: bool = False  # a gateway token or virtual key is needed
    default_provider: str = "emberline"  # of plain paths, for a model that names none
    models: dict[str, str] = {}  # other names: "fast" -> "groq/llama-3.3-70b"
    providers: dict[str, ProviderSettings] = {}
    allowed_providers: tuple[str, ...] = ("*",)
    allowed_models: tuple[str, ...] = ("*",)
    retries: Retries = Retries()
    timeouts: Timeouts = Timeouts()
    breaker: BreakerSettings = BreakerSettings()
    fallbacks: tuple[Fallback, ...] = ()
    continuation: bool = False  # a stream that breaks off is gone on with by the next step
    cache_ttl: int = 0  # seconds; 0: off
    cache_invalidate_on_update: bool = False  # a change of these settings makes what was cached before unreachable
    cache_scope: CacheScope = "gateway"  # who shares what is cached: all, those of one key, or of one user
    semantic: Semantic = Semantic()
    limits: tuple[dict[str, Any], ...] = ()  # rules over requests and tokens, as gateway/limits reads them
    budgets: tuple[dict[str, Any], ...] = ()  # rules over money
    guardrails: Guardrails = Guardrails()
    pools: dict[str, Pool] = {}  # a model's name -> the places that have it, among which the load is balanced
    routes: dict[str, Any] = {}  # name -> the graph that is deployed
    prices: dict[str, Price] = {}  # "provider/model" -> what it costs here, whatever the catalogue says
    logs: Logging = Logging()
    zdr: bool = False  # nothing of prompts and replies is kept
    metadata: dict[str, str] = {}

    @staticmethod
    def read(found: object) -> Settings:
        """From decoded TOML or JSON."""
        try:
            return msgspec.convert(found, Settings)
        except msgspec.ValidationError as e:
            raise InvalidRequest(f"settings of a gateway: {e}") from e
