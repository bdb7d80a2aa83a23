"""Pairing retries failures that may be temporary."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict

import pytest

from emberline.engine.pairing import PairingState, PeerPairing
from emberline.kv.transfer import errors
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.ticket import Peer

PEER = Peer("p", "1", KVLayout("m", layers=1, parts=1, heads=1, tokens=16, width=8, dtype="int64"), {})


class FakeReceiver:
    """A receiver whose first attempt fails."""

    def __init__(self, failure: errors.TransferError) -> None:
        self.failure: errors.TransferError | None = failure
        self.tried = threading.Semaphore(0)

    def connect(self, peer: Peer, deadline: float) -> None:
        failure, self.failure = self.failure, None
        self.tried.release()
        if failure is not None:
            raise failure

    def disconnect(self, peer: Peer) -> None: ...


def wait_until(pairing: PeerPairing, what: Callable[[PairingState], bool]) -> PairingState:
    """Wait for the first event that satisfies the condition."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if (pairs := pairing.take_state_change()) is not None and what(pairs):
            return pairs
        time.sleep(0.01)
    raise AssertionError("the pairing state did not change as expected")


@pytest.mark.parametrize(
    "passing", [errors.PeerUnreachable, errors.PeerLost, errors.TransferTimeout, errors.TransferCorrupted]
)
def test_temporary_failure_is_retried(passing: type[errors.TransferError]) -> None:
    pairing = PeerPairing(FakeReceiver(passing("for now")))  # type: ignore[arg-type]
    pairing.set_peers([asdict(PEER)])
    assert wait_until(pairing, lambda pairs: bool(pairs.paired)) == (["1"], {})


def test_permanent_failure_is_reported() -> None:
    receiver = FakeReceiver(errors.BadTransfer("never"))
    pairing = PeerPairing(receiver)  # type: ignore[arg-type]
    pairing.set_peers([asdict(PEER)])
    assert wait_until(pairing, lambda pairs: bool(pairs.failures)) == ([], {"1": "never"})
    assert pairing.take_state_change() is None
    assert receiver.tried.acquire(timeout=1) and not receiver.tried.acquire(timeout=0.5)
