"""PeerPairing: connects to other engines ahead of the first KV transfer, each in its own thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from emberline.core.clock import Clock, SystemClock
from emberline.kv.transfer.errors import (
    BadTransfer,
    Corrupted,
    PeerLost,
    PeerUnreachable,
    TransferError,
    TransferTimeout,
)
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.ticket import Peer

log = logging.getLogger("emberline.transfer")

ATTEMPT = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # between attempts
PASSING = (PeerUnreachable, PeerLost, TransferTimeout, Corrupted)  # the peer may be starting, the network may fail


class Pairs(NamedTuple):
    """Connected peers, and the reason for each failed one, by incarnation."""

    paired: list[str]
    refused: dict[str, str]


class Pairing:
    def __init__(self, receiver: Receiver, clock: Clock | None = None) -> None:
        self._receiver = receiver
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._wanted: dict[str, Peer] = {}  # by incarnation, like all below
        self._paired: set[str] = set()
        self._refused: dict[str, str] = {}
        self._news = False

    @property
    def unsettled(self) -> bool:
        """Whether the state has changed since it was last taken, or a connection attempt is open."""
        with self._changed:
            return self._news or len(self._paired) + len(self._refused) < len(self._wanted)

    def meet(self, peers: Sequence[dict[str, Any]]) -> None:
        """Connect to these peers and disconnect from all others."""
        wanted, unreadable = {}, {}
        for data in peers:
            try:
                peer = Peer.parsed(data)
                wanted[peer.incarnation] = peer
            except TransferError as error:  # for example a layout of a later release
                unreadable[str(data.get("incarnation"))] = error.message
        with self._changed:
            new = [peer for name, peer in wanted.items() if name not in self._wanted]
            gone = [peer for name, peer in self._wanted.items() if name not in wanted]
            self._wanted = wanted
            self._paired &= wanted.keys()
            self._refused = {name: why for name, why in self._refused.items() if name in wanted} | unreadable
            self._tell()
        for peer in gone:
            self._receiver.forget(peer)
        for peer in new:
            threading.Thread(target=self._pair, args=(peer,), name="kv-pair", daemon=True).start()

    def news(self) -> Pairs | None:
        """Return the state if it has changed since the last call; else None."""
        with self._changed:
            if not self._news:
                return None
            self._news = False
            return Pairs(sorted(self._paired), dict(self._refused))

    def close(self) -> None:
        self.meet(())

    def _pair(self, peer: Peer) -> None:
        """Try to connect until it succeeds, fails permanently, or the peer is no longer wanted."""
        pause = FIRST_PAUSE
        while True:
            failure: TransferError | None = None
            try:
                self._receiver.pair(peer, self._clock.now() + ATTEMPT)
            except TransferError as error:
                failure = error
            except Exception as error:  # for example an invalid address
                failure = BadTransfer(f"{type(error).__name__}: {error}")
            with self._changed:
                if peer.incarnation not in self._wanted:
                    break
                self._settle(peer, failure)
                if not isinstance(failure, PASSING):
                    return
                self._changed.wait_for(lambda: peer.incarnation not in self._wanted, pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        self._receiver.forget(peer)

    def _settle(self, peer: Peer, failure: TransferError | None) -> None:
        if failure is None:
            self._paired.add(peer.incarnation)
            self._refused.pop(peer.incarnation, None)
            log.info("peer engine connected: peer=%s", peer.name)
        elif self._refused.get(peer.incarnation) == failure.message:
            return
        else:
            self._refused[peer.incarnation] = failure.message
            log.warning("connecting to a peer engine failed: peer=%s reason=%s", peer.name, failure)
        self._tell()

    def _tell(self) -> None:
        self._news = True
        self._changed.notify_all()
