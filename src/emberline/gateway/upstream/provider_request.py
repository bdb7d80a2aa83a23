"""ProviderRequest: the HTTP request that is sent to a provider, and the decoder for its response."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from emberline.gateway.upstream.reply_decoder import DecodedReply, ReplyDecoder
from emberline.net.client_response import HTTPClientResponse


class ProviderRequest(msgspec.Struct, frozen=True):
    method: str
    url: str
    headers: dict[str, str]
    body: bytes
    public_only: bool = False  # connect to public addresses only (custom providers)
    connect_timeout_s: float = 5.0  # for opening a connection, if none is idle
    decoder: Callable[[], ReplyDecoder] | None = None  # makes the decoder of a reply in the provider's own format


def decode_reply(request: ProviderRequest, response: HTTPClientResponse) -> HTTPClientResponse:
    """Return the response, converted by the request's decoder while it is read.

    The response is returned unchanged if it is an error or a redirect, or if the request has no decoder.
    """
    if request.decoder is None or response.status >= 300:
        return response
    return DecodedReply(response, request.decoder())
