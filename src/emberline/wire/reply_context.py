"""ReplyContext: the facts about a request that affect how its reply is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from emberline.wire.deltas import Json


class _HasIdentity(Protocol):
    id: str
    model: str
    created: int


@dataclass(frozen=True, slots=True)
class ReplyContext:
    model: str = ""  # model name of the reply; "": the provider's
    include_usage: bool = True  # whether a chat stream ends with its usage
    echoed_fields: Json = field(default_factory=dict)  # request fields that a Responses reply repeats
    created: int = 0  # Unix time in seconds, for replies of providers that send none
    id: str = ""  # reply id, for providers that send none

    def set_identity(self, reply: _HasIdentity) -> None:
        """Set the fields of `reply` that identify it to the client: id, model and creation time."""
        reply.id = reply.id or self.id
        reply.model = self.model or reply.model
        reply.created = reply.created or self.created
