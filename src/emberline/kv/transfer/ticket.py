"""Peer and Ticket: describe a sender, and the blocks that it published, to receivers. Sent as JSON.

The id of a ticket is random and secret, because a process that has the id may read the blocks and end the lease.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from emberline.kv.transfer.errors import BadTransfer
from emberline.kv.transfer.layout import KVLayout
from emberline.tokens.blockhash import block_hash, root_hash


def compute_ticket_subject(layout: KVLayout, salt: str, prompt: Sequence[int]) -> str:
    """Return the hash of model, tenant salt and prompt that a ticket contains. It does not depend on the block size."""
    return block_hash(root_hash(layout.model, salt), prompt).hex()


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    incarnation: str  # random, new with every start: tickets of an earlier incarnation are invalid
    layout: KVLayout
    endpoints: Mapping[str, str]  # address by transport

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"layout": self.layout.as_dict()}

    @staticmethod
    def parse(data: Any) -> Peer:
        try:
            layout = KVLayout.parse(data["layout"])
            return Peer(str(data["name"]), str(data["incarnation"]), layout, dict(data["endpoints"]))
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

    def merge_update(self, newer: Ticket) -> Ticket:
        """Return `newer`, a later state of this ticket. Raises BadTransfer unless it only adds blocks."""
        count = len(self.blocks)
        if newer.blocks[:count] != self.blocks or newer.generations[:count] != self.generations:
            raise BadTransfer("an update of a KV ticket changes blocks that the ticket listed before")
        return replace(newer, peer=self.peer)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"peer": self.peer.as_dict()}

    @staticmethod
    def parse(data: Any) -> Ticket:
        try:
            ticket = Ticket(
                Peer.parse(data["peer"]),
                str(data["id"]),
                tuple(map(int, data["blocks"])),
                tuple(map(int, data["generations"])),
                bool(data["complete"]),
                float(data["lease"]),
                tuple(map(int, data["checksums"])),
                str(data["subject"]),
                str(data["note"]),
            )
        except (TypeError, KeyError, ValueError) as error:
            raise BadTransfer(f"a KV ticket is malformed: {error!r}") from error
        count = len(ticket.blocks)
        if len(ticket.generations) != count or len(ticket.checksums) not in (0, count) or not ticket.lease > 0:
            raise BadTransfer(
                "a KV ticket is inconsistent: its lists of blocks, generations and checksums differ in length, "
                "or its lease is not positive"
            )
        return ticket
