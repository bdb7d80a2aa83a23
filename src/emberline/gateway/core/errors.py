"""The gateway's errors, as part of the one exception tree.

EmberlineError
├── Forbidden               403  not_allowed             the key may not use this model, provider or endpoint
├── BlockedByGuardrail      400  prompt_blocked, reply_blocked
├── NotFound
│   ├── ProviderNotFound    404  provider_not_found
│   └── GatewayNotFound     404  gateway_not_found
├── Overloaded
│   └── LimitExceeded       429  rate_limit_exceeded, budget_exceeded
├── Conflict                409  conflict                the object exists already, or was changed concurrently
├── StoreFailed             503  store_failed            the gateway's store failed
│   └── StoreBusy                                        the store can do nothing now: locked, full, unreachable
└── UpstreamFailed          502  upstream_failed         a provider failed; net/errors.py has three more subclasses
    ├── CircuitBreakerOpen  503  upstream_resting        the provider failed too often and is in back-off
    ├── ProviderKeyMissing  401  provider_key_missing    there is no key for the provider
    ├── EngineKeyRefused    502  engine_key_refused      the local engine refused the gateway's key, not the caller's
    └── ProviderErrorReply  any  upstream_refused        the provider's error, with its status, headers and body
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from emberline.core.errors import EmberlineError, NotFound, Overloaded
from emberline.net.errors import UpstreamBroken as UpstreamBroken  # re-exported
from emberline.net.errors import UpstreamFailed as UpstreamFailed
from emberline.net.errors import UpstreamTimeout as UpstreamTimeout
from emberline.net.errors import UpstreamUnreachable as UpstreamUnreachable

# Why a provider answered with an error: the request is invalid, the prompt is too long for the model, a content filter,
# the key or the model is unknown there, too many requests, an internal error of the provider.
RefusalReason = Literal["request", "context", "filtered", "access", "busy", "server"]


_CODES: Mapping[RefusalReason, str] = {"context": "context_length_exceeded", "filtered": "content_filter"}


class Forbidden(EmberlineError):
    status = 403
    code = "not_allowed"


class BlockedByGuardrail(EmberlineError):
    status = 400
    code = "prompt_blocked"

    def __init__(
        self, message: str, *, is_reply: bool = False, cloudflare_code: int = 2016, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = "reply_blocked" if is_reply else self.code
        self.cloudflare_code = (
            cloudflare_code  # error codes of Cloudflare: 2016 and 2017 (guardrails), 2029 and 2030 (patterns)
        )


class ProviderNotFound(NotFound):
    code = "provider_not_found"


class GatewayNotFound(NotFound):
    code = "gateway_not_found"


class LimitExceeded(Overloaded):
    code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        rule: str = "",
        remaining: int = 0,
        retry_after: int = 1,
        is_budget: bool = False,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, retry_after=retry_after, hint=hint)
        self.code = "budget_exceeded" if is_budget else self.code
        self.rule = rule
        self.remaining = remaining


class Conflict(EmberlineError):
    status = 409
    code = "conflict"

    @staticmethod
    def for_document(kind: str, id: str, *, is_new: bool) -> Conflict:
        """Return the error for a document that exists already, or that a different request has changed.

        `is_new`: the request tried to create the document.
        """
        noun = kind.replace("_", " ")
        if is_new:
            return Conflict(f"{noun} {id!r} exists already", hint="change the existing one, or choose another name")
        return Conflict(
            f"{noun} {id!r} was changed or deleted by another request",
            hint="read it again and repeat the change with its new version",
        )


class StoreFailed(EmberlineError):
    status = 503
    code = "store_failed"


class StoreBusy(StoreFailed):
    pass


class CircuitBreakerOpen(UpstreamFailed):
    status = 503
    code = "upstream_resting"
    retryable = False


class ProviderKeyMissing(UpstreamFailed):
    status = 401
    code = "provider_key_missing"
    retryable = False


class EngineKeyRefused(UpstreamFailed):
    code = "engine_key_refused"
    retryable = False
    default_hint = (
        "set EMBERLINE_ENGINE_KEY of the gateway to an API key of the engine or router; a key that is stored for the"
        " provider emberline under /provider-keys takes precedence"
    )


class ProviderErrorReply(UpstreamFailed):
    code = "upstream_refused"

    def __init__(
        self,
        message: str,
        *,
        reason: RefusalReason = "server",
        status: int = 502,
        headers: Mapping[str, str] = MappingProxyType({}),
        body: bytes = b"",
        dialect: str = "",
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason
        self.code = _CODES.get(reason, self.code)
        self.status = status
        self.headers = headers
        self.body = body
        self.dialect = dialect  # of the body
        self.retryable = reason in ("busy", "server")
        self.retry_after: float | None = None  # seconds, if the provider named a time
