"""The HTTP request that is sent to a provider, and how its reply is decoded."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from emberline.gateway.upstream.decoder import Decoded, Decoder
from emberline.net.reply import Reply as Incoming


class Outgoing(msgspec.Struct, frozen=True):
    method: str
    url: str
    headers: dict[str, str]
    body: bytes
    public: bool = False  # connect to public addresses only (custom providers)
    decoder: Callable[[], Decoder] | None = (
        None  # makes the decoder that converts the reply into the wire format of the request
    )


def decoded(request: Outgoing, incoming: Incoming) -> Incoming:
    if request.decoder is None or incoming.status >= 300:
        return incoming
    return Decoded(incoming, request.decoder())
