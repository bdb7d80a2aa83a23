"""The rules for headers that a request has more than once, and for the framing of its body.

Lines of one header are joined with commas, as RFC 9110 says (section 5.3). Headers with one value, such as
Authorization, must not be repeated: a proxy and this server could read different ones.
"""

from __future__ import annotations

# Also headers with keys of gateways and providers. All headers of this project (x-emberline-...) have one value too.
SINGLE_VALUE_HEADERS = frozenset(
    {
        b"authorization",
        b"cf-aig-authorization",
        b"content-length",
        b"content-type",
        b"host",
        b"last-event-id",
        b"origin",
        b"sec-fetch-site",
        b"sec-websocket-key",
        b"x-api-key",
        b"x-auth-token",
        b"x-goog-api-key",
    }
)
OWN_HEADER_PREFIX = b"x-emberline-"


class InvalidRequestHead(Exception):
    """The head of a request is rejected with `status` before the application sees it."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def combine_headers(pairs: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return the headers by name. The lines of a repeated header are joined; names must be in lower case.

    Raises InvalidRequestHead if a header with one value is repeated."""
    headers = dict(pairs)
    if len(headers) == len(pairs):
        return headers
    combined: dict[bytes, bytes] = {}
    for name, value in pairs:
        if name not in combined:
            combined[name] = value
        elif name in SINGLE_VALUE_HEADERS or name.startswith(OWN_HEADER_PREFIX):
            raise InvalidRequestHead(400, f"the header {name.decode('latin-1')} is given more than once")
        else:
            combined[name] += (b"; " if name == b"cookie" else b", ") + value
    return combined


def check_framing(headers: dict[bytes, bytes], http_version: str) -> None:
    """Raise InvalidRequestHead if the request has no Host header, or a transfer coding other than chunked."""
    if b"host" not in headers and http_version == "1.1":
        raise InvalidRequestHead(400, "the header host is missing")
    coding = headers.get(b"transfer-encoding", b"chunked")
    if coding.lower() != b"chunked":
        name = coding[:80].decode("latin-1")
        raise InvalidRequestHead(501, f"transfer-encoding is {name!r}; only chunked is supported")
