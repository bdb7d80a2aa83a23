"""PeerPairing: connects to other engines before the first KV transfer, in one thread per engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from emberline.core.clock import Clock, SystemClock
from emberline.kv.transfer import errors
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.ticket import Peer

log = logging.getLogger("emberline.transfer")

PAIR_TIMEOUT_S = 5.0
MIN_RETRY_PAUSE_S, MAX_RETRY_PAUSE_S = 0.2, 10.0  # between attempts
# The peer may be starting, the network may fail.
TRANSIENT_ERRORS = (
    errors.PeerUnreachable,
    errors.PeerLost,
    errors.TransferTimeout,
    errors.TransferCorrupted,
)


class PairingState(NamedTuple):
    """The peers that are connected, and the errors of peers that are not.

    A peer is identified by its incarnation, the id of one run of its process."""

    paired: list[str]
    failures: dict[str, str]


class PeerPairing:
    def __init__(self, receiver: Receiver, clock: Clock | None = None) -> None:
        self._receiver = receiver
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._wanted_peers: dict[str, Peer] = {}  # by incarnation, like all below
        self._paired: set[str] = set()
        self._failures: dict[str, str] = {}
        self._has_unreported = False

    @property
    def has_pending_changes(self) -> bool:
        """Whether the state has changed since `take_state_change`, or an attempt to connect is still running."""
        with self._changed:
            return self._has_unreported or len(self._paired) + len(self._failures) < len(self._wanted_peers)

    def set_peers(self, peers: Sequence[dict[str, Any]]) -> None:
        """Connect to these peers and disconnect from all others."""
        wanted, unreadable = {}, {}
        for data in peers:
            try:
                peer = Peer.parse(data)
                wanted[peer.incarnation] = peer
            except errors.TransferError as error:  # for example a layout of a later release
                unreadable[str(data.get("incarnation"))] = error.message
        with self._changed:
            new = [peer for name, peer in wanted.items() if name not in self._wanted_peers]
            gone = [peer for name, peer in self._wanted_peers.items() if name not in wanted]
            self._wanted_peers = wanted
            self._paired &= wanted.keys()
            self._failures = {name: why for name, why in self._failures.items() if name in wanted} | unreadable
            self._notify()
        for peer in gone:
            self._receiver.disconnect(peer)
        for peer in new:
            threading.Thread(target=self._connect_with_retries, args=(peer,), name="kv-pair", daemon=True).start()

    def take_state_change(self) -> PairingState | None:
        """Return the state if it has changed since the last call; else None."""
        with self._changed:
            if not self._has_unreported:
                return None
            self._has_unreported = False
            return PairingState(sorted(self._paired), dict(self._failures))

    def close(self) -> None:
        self.set_peers(())

    def _connect_with_retries(self, peer: Peer) -> None:
        """Try to connect to a peer until that succeeds or fails for good, or until `set_peers` drops the peer."""
        pause = MIN_RETRY_PAUSE_S
        while True:
            failure: errors.TransferError | None = None
            try:
                self._receiver.connect(peer, self._clock.now() + PAIR_TIMEOUT_S)
            except errors.TransferError as error:
                failure = error
            except Exception as error:  # for example an invalid address
                failure = errors.BadTransfer(f"{type(error).__name__}: {error}")
            with self._changed:
                if peer.incarnation not in self._wanted_peers:
                    break
                self._record_attempt(peer, failure)
                if not isinstance(failure, TRANSIENT_ERRORS):
                    return
                self._changed.wait_for(lambda: peer.incarnation not in self._wanted_peers, pause)
            pause = min(2 * pause, MAX_RETRY_PAUSE_S)
        self._receiver.disconnect(peer)

    def _record_attempt(self, peer: Peer, failure: errors.TransferError | None) -> None:
        if failure is None:
            self._paired.add(peer.incarnation)
            self._failures.pop(peer.incarnation, None)
            log.info("Peer engine connected: peer=%s", peer.name)
        elif self._failures.get(peer.incarnation) == failure.message:
            return
        else:
            self._failures[peer.incarnation] = failure.message
            log.warning("Connecting to a peer engine failed: peer=%s reason=%s", peer.name, failure)
        self._notify()

    def _notify(self) -> None:
        self._has_unreported = True
        self._changed.notify_all()
