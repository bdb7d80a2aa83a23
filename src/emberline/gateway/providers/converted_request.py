"""ConvertedRequest: a request at an endpoint that generates no text, in the form that its provider accepts."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from emberline.gateway.core.request import Dialect, GatewayRequest

JSON_CONTENT_TYPE = "application/json"
FORWARDED_HEADERS = ("content-type", "accept", "user-agent")  # kept when the request is translated


class ConvertedRequest(msgspec.Struct, frozen=True):
    call: GatewayRequest  # with the provider's own endpoint and body
    reply_dialect: Dialect
    convert: Callable[[bytes], bytes]  # of the provider's reply to the client's


def convert_request(
    call: GatewayRequest,
    endpoint: str,
    body: bytes,
    convert: Callable[[bytes], bytes],
    *,
    dialect: Dialect = "raw",
    reply_dialect: Dialect = "raw",
) -> ConvertedRequest:
    """Return the request with the provider's own endpoint and body, and without what only the client's format has."""
    headers = {name: value for name, value in call.headers.items() if name in FORWARDED_HEADERS}
    headers["content-type"] = JSON_CONTENT_TYPE
    converted = call.with_changes(dialect=dialect, endpoint=endpoint, body=body, headers=headers, query="")
    return ConvertedRequest(converted, reply_dialect, convert)
