"""What goes wrong at a gateway, in the one exception tree.

EmberlineError
├── Forbidden               403  not_allowed             a key may not use this model or provider
├── Blocked                 400  prompt_blocked, reply_blocked    by a guardrail
├── NotFound
│   ├── ProviderNotFound    404  provider_not_found
│   └── GatewayNotFound     404  gateway_not_found
├── Overloaded
│   └── LimitExceeded       429  rate_limit_exceeded, budget_exceeded
├── Conflict                409  conflict                it is there already, or was changed by someone else meanwhile
├── StoreFailed             503  store_failed            the gateway's own memory does not answer
└── UpstreamFailed          502  upstream_failed         what a provider did, whatever it was
    ├── Unreached           502  upstream_unreached      refused, no such name, TLS
    ├── TimedOut            504  upstream_timeout        no beginning, or silence in the middle
    ├── Broken              502  upstream_broken         cut off, malformed, empty, no ending
    └── Refused             its  upstream_refused        it answered with an error: status, headers and body are its own
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from emberline.core.errors import EmberlineError, NotFound, Overloaded

# Of a refusal: the request itself, too long for this model, refused for what it says, the key or the model is not known
# there, too many requests, the provider's own trouble.
Why = Literal["request", "context", "filtered", "access", "busy", "server"]


_CODES: Mapping[Why, str] = {"context": "context_length_exceeded", "filtered": "content_filter"}


class Forbidden(EmberlineError):
    status = 403
    code = "not_allowed"


class Blocked(EmberlineError):
    status = 400
    code = "prompt_blocked"

    def __init__(self, message: str, *, reply: bool = False, number: int = 2016, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = "reply_blocked" if reply else self.code
        self.number = number  # Cloudflare's: 2016 and 2017 (guardrails), 2029 and 2030 (patterns)


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
        money: bool = False,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, retry_after=retry_after, hint=hint)
        self.code = "budget_exceeded" if money else self.code
        self.rule = rule
        self.remaining = remaining


class Conflict(EmberlineError):
    status = 409
    code = "conflict"

    @staticmethod
    def of(kind: str, id: str, *, is_new: bool) -> Conflict:
        if is_new:
            return Conflict(f"there is a {kind} {id!r} already", hint="change that one, or choose another name")
        return Conflict(f"{kind} {id!r} was changed or deleted by someone else meanwhile", hint="read it again")


class StoreFailed(EmberlineError):
    status = 503
    code = "store_failed"


class UpstreamFailed(EmberlineError):
    status = 502
    code = "upstream_failed"
    retryable = True  # at the same provider

    def __init__(self, message: str, *, provider: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.provider = provider


class Unreached(UpstreamFailed):
    code = "upstream_unreached"


class TimedOut(UpstreamFailed):
    status = 504
    code = "upstream_timeout"
    retryable = False  # who was silent once is not asked again: the next step is


class Broken(UpstreamFailed):
    code = "upstream_broken"


class Resting(UpstreamFailed):
    status = 503
    code = "upstream_resting"
    retryable = False


class KeyMissing(UpstreamFailed):
    status = 401
    code = "provider_key_missing"
    retryable = False


class Refused(UpstreamFailed):
    code = "upstream_refused"

    def __init__(
        self,
        message: str,
        *,
        kind: Why = "server",
        status: int = 502,
        headers: Mapping[str, str] = MappingProxyType({}),
        body: bytes = b"",
        dialect: str = "",
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind
        self.code = _CODES.get(kind, self.code)
        self.status = status
        self.headers = headers
        self.body = body
        self.dialect = dialect  # of the body
        self.retryable = kind in ("busy", "server")
        self.retry_after: float | None = None  # seconds
