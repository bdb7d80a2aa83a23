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
│   └── StoreBusy                                        not now, whatever it is asked: locked, full, out of reach
└── UpstreamFailed          502  upstream_failed         what a provider did: those of net/errors.py, and
    ├── Resting             503  upstream_resting        it failed too often, and is left alone
    ├── KeyMissing          401  provider_key_missing    there is nothing to ask it with
    └── Refused             its  upstream_refused        it answered with an error: status, headers and body are its own
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from emberline.core.errors import EmberlineError, NotFound, Overloaded
from emberline.net.errors import Broken as Broken  # these are a gateway's, too
from emberline.net.errors import TimedOut as TimedOut
from emberline.net.errors import Unreached as Unreached
from emberline.net.errors import UpstreamFailed as UpstreamFailed

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


class StoreBusy(StoreFailed):
    pass


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
