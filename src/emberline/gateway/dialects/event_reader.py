"""EventReader parses a provider's stream events into deltas; EventDecoder decodes the events' JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

import msgspec

from emberline.gateway.core.errors import UpstreamBroken
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.wire.deltas import ProviderDelta

T = TypeVar("T")


class EventReader(Protocol):
    """Parses the events of one stream into deltas.

    Raises UpstreamBroken for a malformed stream, and UpstreamFailed for an error event of the provider.
    """

    def read(self, event: bytes) -> Iterable[ProviderDelta]:
        """Return the deltas of one event. `event` is the event's data, without the `data:` prefix."""
        ...

    def end(self) -> Iterable[ProviderDelta]:
        """Return the last deltas, after the connection ended: StreamEnd for Gemini, which has no end event."""
        ...


class EventDecoder(Generic[T]):
    """Decodes event data in one wire format; raises UpstreamBroken for data in any other format."""

    def __init__(self, event_type: type[T], format_name: str) -> None:
        self._decoder = msgspec.json.Decoder(event_type)
        self._format_name = format_name

    def decode(self, event: bytes) -> T:
        try:
            return self._decoder.decode(event)
        except JSON_DECODE_ERRORS as error:
            raise UpstreamBroken(
                f"an event of the stream does not follow the format of {self._format_name}: {error}"
            ) from None
