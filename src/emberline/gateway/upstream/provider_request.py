"""The HTTP request that is sent to a provider, and how its reply is decoded."""

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
    decoder: Callable[[], ReplyDecoder] | None = None  # makes the decoder of a reply in the provider's own format


def decode_reply(request: ProviderRequest, incoming: HTTPClientResponse) -> HTTPClientResponse:
    """Return the reply as read through the request's decoder; errors and other replies stay as they are."""
    if request.decoder is None or incoming.status >= 300:
        return incoming
    return DecodedReply(incoming, request.decoder())
