"""What a cache is reached by: all that works here, and no more than that."""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path

import pytest
from transfers import content, fill, small, soon

from emberline.core.config import TransferConfig
from emberline.kernels.cpu.library import find_library
from emberline.kv.checksum import crc_of
from emberline.kv.codec import codec_of
from emberline.kv.transfer import dock
from emberline.kv.transfer.dock import Dock, Near, Ways
from emberline.kv.transfer.shm import Segment

LIBRARY = find_library()


def opened(name: str, *, mooncake: bool, host: str = "127.0.0.1") -> Dock:
    ways = Ways(crc_of(LIBRARY), codec_of("auto", LIBRARY, "bfloat16"), always=True, mooncake=mooncake)
    segment = Segment(small(), 12)
    return Dock.opened(TransferConfig(name, host), segment.region, Near.by_memory(segment), ways)


@pytest.mark.parametrize("kind", ["shm", "mooncake", "tcp"])
def test_blocks_arrive_by_every_way(kind: str) -> None:
    here, there = opened("here", mooncake=True), opened("there", mooncake=True)
    assert set(there.sender.endpoints) == {"shm", "tcp", "mooncake"}
    for other in {"shm", "tcp", "mooncake"} - {kind}:
        del there.sender.endpoints[other]
    sent = fill(there.sender.region, [4, 5, 1], 1)
    here.receiver.pull(there.sender.publish([4, 5, 1], 30.0), [2, 3, 9], soon())
    assert content(here.receiver.region, [2, 3, 9]) == sent
    here.close()
    there.close()


def test_a_broken_mooncake_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(dock, "probe", lambda *_: "it died of signal 11")
    with caplog.at_level(logging.WARNING):
        made = opened("here", mooncake=True)
    assert set(made.sender.endpoints) == {"shm", "tcp"} and "signal 11" in caplog.text
    made.close()


def test_half_a_dock_leaves_nothing_behind() -> None:
    before = threading.active_count()
    with pytest.raises(OSError):
        opened("x", mooncake=False, host="192.0.2.1")
    gc.collect()
    assert "emberline-kv" not in Path("/proc/self/maps").read_text() and threading.active_count() == before
