"""GatewaySettings: the settings of one gateway.

Settings are plain data. They are read from gateway.toml and from the store, sent as JSON, and described in the OpenAPI
document of the management API. They are immutable: a change creates new settings with a higher version.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from emberline.core.errors import InvalidRequest, Unauthorized
from emberline.gateway.core.assistant_prefill import AssistantPrefill
from emberline.gateway.core.cost import Price
from emberline.gateway.core.guardrail_policy import Guardrails
from emberline.gateway.core.identity import Identity
from emberline.gateway.core.pool import ModelPool

Backoff = Literal["constant", "linear", "exponential"]
CacheScope = Literal["gateway", "key", "user"]


class RetrySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    attempts: int = 2  # at one provider, including the first
    delay: float = 0.2  # seconds before the second attempt
    backoff: Backoff = "exponential"  # of the delays: constant, linear or exponential

    def __post_init__(self) -> None:
        if not 1 <= self.attempts <= 5:
            raise InvalidRequest(f"retries.attempts must be from 1 to 5, not {self.attempts}", param="retries.attempts")
        if not 0 <= self.delay <= 5:
            raise InvalidRequest(f"retries.delay must be from 0 to 5 seconds, not {self.delay}", param="retries.delay")


class TimeoutSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Timeouts of a request, in seconds."""

    connect: float = 5.0  # until the connection is open, with TLS; for realtime sessions, first_byte includes it
    first_byte: float = 60.0  # until a stream's first content; a client can set its own timeout, also for other replies
    between_events: float = 60.0  # between two events of a stream; for other replies, until the whole body has arrived
    total: float = 600.0  # for a whole request
    session: float = 3600.0  # for a realtime session, in place of `total`
    idle: float = 600.0  # time without any message after which a realtime session ends

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 < (seconds := getattr(self, name)) <= 86_400:
                raise InvalidRequest(
                    f"timeouts.{name} must be above 0 and at most 86400 seconds (a day), not {seconds}",
                    param=f"timeouts.{name}",
                )


class LogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    collect: bool = True  # write a log record for each request
    payloads: bool = True  # store the bodies of requests and replies with the records
    days: int = 30  # for which records are kept


class ProviderSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one provider: a known one, named by its slug, or a custom one (`custom-...`) at any URL."""

    base_url: str | None = None  # URL of the provider's API; not set: the provider's default
    key: str | None = None  # the provider's key; `key_env` or a stored key keep it out of the file
    key_env: str | None = None  # environment variable with the key
    key_file: str | None = None  # for example a service account's JSON, or `gcloud auth application-default`'s file
    speaks: tuple[str, ...] | None = None  # wire formats: openai-chat, anthropic, ...; not set: the provider's default
    headers: dict[str, str] = {}  # sent with every request
    prefill: AssistantPrefill | None = None  # how a chat continues an assistant message; not set: the default
    enabled: bool = True  # false: requests to this provider are rejected
    public: bool = False  # its address must be public, unless the operator allows private addresses


class FallbackRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Models to try in order when a request for `model` fails.

    `model` is a name, a prefix that ends with `*`, or `*` for every model.
    """

    model: str  # a name, a prefix that ends with *, or *
    to: tuple[str, ...]  # names "provider/model", tried in this order

    def __post_init__(self) -> None:
        if invalid := [target for target in self.to if not all(target.partition("/"))]:
            raise InvalidRequest(
                f"fallbacks.to must contain names PROVIDER/MODEL, not {invalid[0]!r}", param="fallbacks.to"
            )


class BreakerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    failures: int = 5  # consecutive failures that open the circuit breaker
    pause: float = 1.0  # seconds it stays open, doubled each time up to 30


class SemanticCacheSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the semantic cache, which returns cached replies to prompts with a similar meaning.

    In mode `shadow` no cached reply is returned. The gateway only counts how often the cached reply would have differed
    from the real reply.
    """

    mode: Literal["off", "shadow", "on"] = "off"  # shadow: only compare the cached reply with the real one
    threshold: float = 0.95  # cosine similarity of the two prompts

    def __post_init__(self) -> None:
        if not 0.5 <= self.threshold <= 1:
            raise InvalidRequest(
                f"semantic.threshold must be from 0.5 to 1, not {self.threshold}", param="semantic.threshold"
            )


class GatewaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    account: str = "default"  # set by the gateway
    gateway: str = "default"  # set by the gateway
    version: int = 0  # set by the gateway: grows with each change
    authentication: bool = False  # a gateway token or virtual key is required
    default_provider: str = "emberline"  # on plain paths, for a model without a provider in its name
    models: dict[str, str] = {}  # aliases: "fast" -> "groq/llama-3.3-70b"
    providers: dict[str, ProviderSettings] = {}  # by name
    allowed_providers: tuple[str, ...] = ("*",)  # patterns of providers that requests may use
    allowed_models: tuple[str, ...] = ("*",)  # patterns of models, as MODEL or PROVIDER/MODEL
    retries: RetrySettings = RetrySettings()  # see retries
    timeouts: TimeoutSettings = TimeoutSettings()  # see timeouts
    breaker: BreakerSettings = BreakerSettings()  # see breaker
    fallbacks: tuple[FallbackRule, ...] = ()  # see fallbacks
    continuation: bool = False  # the next step continues a stream that breaks off
    cache_ttl: int = 0  # seconds; 0: off
    cache_invalidate_on_update: bool = False  # a change of these settings invalidates the cache
    cache_scope: CacheScope = "gateway"  # cached replies are shared by the whole gateway, per key, or per user
    semantic: SemanticCacheSettings = SemanticCacheSettings()  # see semantic
    limits: tuple[dict[str, Any], ...] = ()  # rules over requests and tokens, see limits
    budgets: tuple[dict[str, Any], ...] = ()  # rules over cost, see limits
    guardrails: Guardrails = Guardrails()  # see guardrails
    pools: dict[str, ModelPool] = {}  # model name -> providers among which its load is balanced
    routes: dict[str, Any] = {}  # name -> deployed graph
    prices: dict[str, Price] = {}  # "provider/model" -> price that overrides the catalogue's
    logs: LogSettings = LogSettings()  # see logs
    zdr: bool = False  # zero data retention: prompts and replies are not stored
    metadata: dict[str, str] = {}  # added to every request

    def check_caller(self, identity: Identity) -> None:
        """Raise Unauthorized if this gateway requires a key and the caller has none."""
        if self.authentication and identity.kind == "anonymous":
            raise Unauthorized(
                f"gateway {self.gateway[:80]!r} requires a key, and the request has none that is valid",
                hint="send cf-aig-authorization: Bearer KEY, or the key as the API key",
            )

    @staticmethod
    def parse(data: object) -> GatewaySettings:
        """Parse settings from decoded TOML or JSON. Raise InvalidRequest if they are invalid."""
        try:
            return msgspec.convert(data, GatewaySettings)
        except msgspec.ValidationError as e:
            raise InvalidRequest(
                f"the gateway's settings are invalid: {e}", hint="docs/gateway-settings.md lists all settings"
            ) from e
