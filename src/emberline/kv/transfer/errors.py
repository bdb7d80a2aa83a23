"""The errors of KV transfers. After any of them, the engine can compute the blocks instead.

TransferError           status  code                 meaning
├── PeerUnreachable     503     peer_unreachable     none of the peer's endpoints accepts a connection
│   └── PeerOnOtherHost                              the endpoint can only be reached from the peer's own host
├── PeerLost            502     peer_lost            the connection ended or stalled during a call
├── PeerChanged         409     peer_changed         the peer was restarted: its incarnation differs
├── IncompatibleCaches  409     incompatible         the layouts of the two caches differ
├── TicketEnded         410     ticket_over          acknowledged, released, expired, closed, or never issued
├── BlockReused         410     block_reused         a published block has new content
├── TransferCorrupted   502     corrupted            a checksum or a message is wrong
├── BadTransfer         400     bad_transfer         an invalid request
├── TransferCancelled   499     transfer_cancelled   the receiver cancelled the pull
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


class PeerOnOtherHost(PeerUnreachable):
    """The endpoint can only be reached from the peer's own host, and this process runs on a different host."""


class PeerLost(TransferError):
    code = "peer_lost"


class PeerChanged(TransferError):
    status = 409
    code = "peer_changed"


class IncompatibleCaches(TransferError):
    status = 409
    code = "incompatible"


class TicketEnded(TransferError):
    status = 410
    code = "ticket_over"


class BlockReused(TransferError):
    status = 410
    code = "block_reused"


class TransferCorrupted(TransferError):
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


def error_from_code(code: str, message: str, hint: str | None) -> TransferError:
    """Return the exception for an error that the peer reported."""
    kinds = {kind.code: kind for kind in TransferError.__subclasses__()}
    return kinds.get(code, TransferError)(message, hint=hint)
