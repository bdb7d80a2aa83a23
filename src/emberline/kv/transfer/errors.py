"""What can go wrong with a transfer. Whichever it is, computing the blocks anew is always right.

TransferError           status  code                 what happened
├── PeerUnreachable     503     peer_unreachable     nobody answers at any of its endpoints
│   └── Elsewhere                                    nobody on this host
├── PeerLost            502     peer_lost            the connection ended while an answer was due
├── PeerChanged         409     peer_changed         another incarnation answers there
├── Incompatible        409     incompatible         the two caches do not pair
├── TicketOver          410     ticket_over          acknowledged, released, expired, closed, or never issued
├── BlockReused         410     block_reused         a block has other content by now
├── Corrupted           502     corrupted            a checksum or a frame is wrong
├── BadTransfer         400     bad_transfer         what was asked for makes no sense
├── TransferCancelled   499     transfer_cancelled
└── TransferTimeout     504     transfer_timeout     the deadline passed
"""

from __future__ import annotations

from emberline.core.errors import EmberlineError


class TransferError(EmberlineError):
    status = 502
    code = "transfer_failed"


class PeerUnreachable(TransferError):
    status = 503
    code = "peer_unreachable"


class Elsewhere(PeerUnreachable):
    """It can only be reached from its own host, and that is another."""


class PeerLost(TransferError):
    code = "peer_lost"


class PeerChanged(TransferError):
    status = 409
    code = "peer_changed"


class Incompatible(TransferError):
    status = 409
    code = "incompatible"


class TicketOver(TransferError):
    status = 410
    code = "ticket_over"


class BlockReused(TransferError):
    status = 410
    code = "block_reused"


class Corrupted(TransferError):
    code = "corrupted"


class BadTransfer(TransferError):
    status = 400
    code = "bad_transfer"


class TransferCancelled(TransferError):
    status = 499
    code = "transfer_cancelled"


class TransferTimeout(TransferError):
    status = 504
    code = "transfer_timeout"


def rebuilt(code: str, message: str, hint: str | None) -> TransferError:
    """An error as the peer told it."""
    kinds = {kind.code: kind for kind in TransferError.__subclasses__()}
    return kinds.get(code, TransferError)(message, hint=hint)
