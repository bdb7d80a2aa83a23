"""What goes wrong with somebody who is asked over the network.

EmberlineError
└── UpstreamFailed          502  upstream_failed         what they did, whatever it was
    ├── Unreached           502  upstream_unreached      refused, no such name, TLS: they got nothing
    ├── TimedOut            504  upstream_timeout        no beginning, or silence in the middle
    └── Broken              502  upstream_broken         cut off, malformed, empty, no ending
"""

from __future__ import annotations

from emberline.core.errors import EmberlineError


class UpstreamFailed(EmberlineError):
    status = 502
    code = "upstream_failed"
    retryable = True  # at the same place

    def __init__(self, message: str, *, provider: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.provider = provider


class Unreached(UpstreamFailed):
    code = "upstream_unreached"


class TimedOut(UpstreamFailed):
    status = 504
    code = "upstream_timeout"
    retryable = False  # who was silent once is not asked again: the next one is


class Broken(UpstreamFailed):
    code = "upstream_broken"
