"""Pairing keeps on trying where that can help."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict

import pytest

from emberline.engine.pairing import Pairing, Pairs
from emberline.kv.transfer.errors import (
    BadTransfer,
    Corrupted,
    PeerLost,
    PeerUnreachable,
    TransferError,
    TransferTimeout,
)
from emberline.kv.transfer.layout import Layout
from emberline.kv.transfer.ticket import Peer

PEER = Peer("p", "1", Layout("m", layers=1, parts=1, heads=1, tokens=16, width=8, dtype="int64"), {})


class Line:
    """A receiver whose first attempt fails."""

    def __init__(self, failure: TransferError) -> None:
        self.failure: TransferError | None = failure
        self.tried = threading.Semaphore(0)

    def pair(self, peer: Peer, deadline: float) -> None:
        failure, self.failure = self.failure, None
        self.tried.release()
        if failure is not None:
            raise failure

    def forget(self, peer: Peer) -> None: ...


def until(pairing: Pairing, what: Callable[[Pairs], bool]) -> Pairs:
    """The first news of which this is true."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if (pairs := pairing.news()) is not None and what(pairs):
            return pairs
        time.sleep(0.01)
    raise AssertionError("it did not come to pass")


@pytest.mark.parametrize("passing", [PeerUnreachable, PeerLost, TransferTimeout, Corrupted])
def test_what_may_pass_is_tried_again(passing: type[TransferError]) -> None:
    pairing = Pairing(Line(passing("for now")))  # type: ignore[arg-type]
    pairing.meet([asdict(PEER)])
    assert until(pairing, lambda pairs: bool(pairs.paired)) == (["1"], {})


def test_what_does_not_pass_is_told() -> None:
    line = Line(BadTransfer("never"))
    pairing = Pairing(line)  # type: ignore[arg-type]
    pairing.meet([asdict(PEER)])
    assert until(pairing, lambda pairs: bool(pairs.refused)) == ([], {"1": "never"})
    assert pairing.news() is None
    assert line.tried.acquire(timeout=1) and not line.tried.acquire(timeout=0.5)
