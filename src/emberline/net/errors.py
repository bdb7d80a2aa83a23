"""Errors of requests that this process sends to a different server.

EmberlineError
└── UpstreamFailed              502  upstream_failed         any failure
    ├── UpstreamUnreachable     502  upstream_unreached      no connection (refused, DNS, TLS): the request was not sent
    ├── UpstreamTimeout         504  upstream_timeout        the reply, or its next data, did not arrive in time
    └── UpstreamBroken          502  upstream_broken         a reply that is cut off, malformed or empty
"""

from __future__ import annotations

from emberline.core.errors import EmberlineError


class UpstreamFailed(EmberlineError):
    status = 502
    code = "upstream_failed"
    retryable = True  # at the same server

    def __init__(self, message: str, *, provider: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.provider = provider


class UpstreamUnreachable(UpstreamFailed):
    code = "upstream_unreached"


class UpstreamTimeout(UpstreamFailed):
    status = 504
    code = "upstream_timeout"
    retryable = False  # after a timeout another server is tried, not the same one again


class UpstreamBroken(UpstreamFailed):
    code = "upstream_broken"
