"""Outgoing: a request as a provider is to get it, and how its reply is to be read."""

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
    public: bool = False  # the address must be a public one: of custom providers
    decoder: Callable[[], Decoder] | None = None  # makes the reply one of the dialect that was spoken


def decoded(request: Outgoing, incoming: Incoming) -> Incoming:
    if request.decoder is None or incoming.status >= 300:
        return incoming
    return Decoded(incoming, request.decoder())
