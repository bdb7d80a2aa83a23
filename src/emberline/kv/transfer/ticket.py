"""Peer and Ticket: describe a sender and its published blocks to receivers, as JSON.

The id of a ticket is random and secret: a process that has it may read the blocks and end the lease.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from emberline.kv.transfer.errors import BadTransfer
from emberline.kv.transfer.layout import Layout
from emberline.tokens.blockhash import block_hash, root_hash


def subject_of(layout: Layout, salt: str, prompt: Sequence[int]) -> str:
    """Return the hash of model, tenant salt and prompt that a ticket carries.

    It does not depend on block size.
    """
    return block_hash(root_hash(layout.model, salt), prompt).hex()


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    incarnation: str  # random, new with every start: tickets of an earlier incarnation are invalid
    layout: Layout
    endpoints: Mapping[str, str]  # address by transport

    @staticmethod
    def parsed(told: Any) -> Peer:
        try:
            layout = Layout.parsed(told["layout"])
            return Peer(str(told["name"]), str(told["incarnation"]), layout, dict(told["endpoints"]))
        except (TypeError, KeyError, ValueError) as error:
            raise BadTransfer(f"the description of the KV peer is malformed: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Ticket:
    peer: Peer
    id: str
    blocks: tuple[int, ...]  # of the sender's cache
    generations: tuple[int, ...]  # of the blocks, when they were published
    complete: bool  # False: more blocks will follow
    lease: float  # seconds until the lease expires unless renewed
    checksums: tuple[int, ...] = ()  # CRC-32 of each block, if the sender publishes them
    subject: str = ""  # hash of the prompt that the blocks belong to; receivers compare it with their request
    note: str = ""  # JSON note about the finished prefill, on a complete ticket

    def grown(self, more: Ticket) -> Ticket:
        """Return the newer state of this ticket, after checking that it only adds blocks."""
        count = len(self.blocks)
        if more.blocks[:count] != self.blocks or more.generations[:count] != self.generations:
            raise BadTransfer("an update of a KV ticket changes blocks that it had listed before")
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
            raise BadTransfer(f"a KV ticket is malformed: {error!r}") from error
        count = len(ticket.blocks)
        if len(ticket.generations) != count or len(ticket.checksums) not in (0, count) or not ticket.lease > 0:
            raise BadTransfer("a KV ticket is inconsistent: its lists differ in length, or its lease is not positive")
        return ticket
