"""Peer and Ticket: what a sender says of itself and of published blocks. Small, and the same in JSON.

The id of a ticket is its key: whoever has it may read the blocks and end the lease; nobody can guess it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from emberline.kv.transfer.errors import BadTransfer
from emberline.kv.transfer.layout import Layout
from emberline.tokens.blockhash import block_hash, root_hash


def subject_of(layout: Layout, salt: str, prompt: Sequence[int]) -> str:
    """Names a prompt of a tenant for a model, as a ticket does. The same for all block sizes."""
    return block_hash(root_hash(layout.model, salt), prompt).hex()


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    incarnation: str  # new with every start: what an earlier one said is void
    layout: Layout
    endpoints: Mapping[str, str]  # transport: address

    @staticmethod
    def parsed(told: Any) -> Peer:
        try:
            layout = Layout.parsed(told["layout"])
            return Peer(str(told["name"]), str(told["incarnation"]), layout, dict(told["endpoints"]))
        except (TypeError, KeyError, ValueError) as error:
            raise BadTransfer(f"a peer that cannot be read: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Ticket:
    peer: Peer
    id: str
    blocks: tuple[int, ...]  # of the sender
    generations: tuple[int, ...]
    complete: bool  # False: more blocks will follow
    lease: float  # seconds until it expires unless renewed
    checksums: tuple[int, ...] = ()  # CRC-32 of each block, if the sender seals them
    subject: str = ""  # what the blocks are of: whoever wants something else is not to take them
    note: str = ""  # what the sender has to say when it is complete

    def grown(self, more: Ticket) -> Ticket:
        """With the blocks that a later state of it adds."""
        count = len(self.blocks)
        if more.blocks[:count] != self.blocks or more.generations[:count] != self.generations:
            raise BadTransfer("a ticket changed blocks it had listed before")
        return replace(more, peer=self.peer)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def parsed(told: Any) -> Ticket:
        try:
            ticket = Ticket(
                Peer.parsed(told["peer"]),
                str(told["id"]),
                tuple(map(int, told["blocks"])),
                tuple(map(int, told["generations"])),
                bool(told["complete"]),
                float(told["lease"]),
                tuple(map(int, told["checksums"])),
                str(told["subject"]),
                str(told["note"]),
            )
        except (TypeError, KeyError, ValueError) as error:
            raise BadTransfer(f"a ticket that cannot be read: {error!r}") from error
        count = len(ticket.blocks)
        if len(ticket.generations) != count or len(ticket.checksums) not in (0, count) or not ticket.lease > 0:
            raise BadTransfer("a ticket that contradicts itself")
        return ticket
