"""RemoteTier: workers share blocks, wrong values are detected, and requests do not wait for a store that is down."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sample_blocks import BLOCK_BYTES, block, buffer, content, digest
from tcp_listeners import listening_ports

from emberline.bench.mooncake_master import MooncakeMaster, freeze_process
from emberline.core.clock import ManualClock
from emberline.core.config import kernel_dir
from emberline.core.errors import InvalidRequest
from emberline.core.freeport import free_port
from emberline.kernels.cpu.build import build_library
from emberline.kernels.cpu.library import load_library as load_library
from emberline.kv.codec import UnweightKVCodec
from emberline.kv.tiers import storeclient
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.remote import RETRY_MISSING_AFTER_S, RemoteTier
from emberline.kv.tiers.stack import TierStack
from emberline.kv.tiers.storeclient import NO_MEMORY, NOT_FOUND, StoreClient, StoreListenAddress, StoreUnavailable

NAMES = [digest(i) for i in range(8)]
MEMORY = 64 << 20
PROVIDER_GONE = -800


@dataclass
class FakeClient:
    """A fake client with a dict, which fails if `down` is set."""

    values: dict[str, bytes] = field(default_factory=dict)
    answer: int = 0  # result of all calls, if not 0
    down: bool = False
    calls: int = 0

    def _result(self, answer: int) -> int:
        self.calls += 1
        if self.down:
            raise StoreUnavailable("the test store is down")
        return self.answer or answer

    def get(self, key: str) -> memoryview | int:
        answer = self._result(0 if key in self.values else NOT_FOUND)
        return answer or memoryview(bytearray(self.values[key]))

    def put(self, key: str, fill: Callable[[memoryview], int]) -> tuple[int, int]:
        room = memoryview(bytearray(1 << 16))
        size = fill(room)
        if (answer := self._result(0)) == 0:
            self.values.setdefault(key, bytes(room[:size]))
        return answer, size

    def remove(self, key: str) -> None:
        self._result(0)
        self.values.pop(key, None)

    def ensure_running(self) -> None:
        self._result(0)

    def close(self) -> None:
        self._result(0)


Fake = tuple[RemoteTier, FakeClient, ManualClock]


@pytest.fixture
def fake() -> Fake:
    client, clock = FakeClient(), ManualClock()
    tier = RemoteTier("127.0.0.1:1", "m", BLOCK_BYTES, MEMORY, client=client, clock=clock)  # type: ignore[arg-type]
    return tier, client, clock


def fill(tier: RemoteTier, names: list[bytes]) -> int:
    return tier.store(names, [block(name) for name in names])


def load(tier: RemoteTier, names: list[bytes]) -> int:
    into = [buffer() for _ in names]
    count = tier.load(names, into)
    assert [bytes(b) for b in into[:count]] == [content(n) for n in names[:count]]
    return count


def test_stored_blocks_load(fake: Fake) -> None:
    tier, store, clock = fake
    assert fill(tier, NAMES[:3]) == 3 and len(store.values) == 3
    assert tier.lookup(NAMES) == 3 and tier.lookup_optimistic(NAMES) == 8, "only a query shows what the store holds"
    assert load(tier, NAMES) == 3 and tier.lookup_optimistic(NAMES) == 3
    clock.advance(RETRY_MISSING_AFTER_S)
    assert tier.lookup_optimistic(NAMES) == 8, "another worker may have stored it meanwhile"
    tier.discard(NAMES[:1])
    assert not tier.lookup(NAMES) and len(store.values) == 2
    stats = tier.stats()
    assert (stats.on, stats.stored_blocks, stats.loaded_blocks, stats.blocks, stats.errors) == (True, 3, 3, 2, 0)


def test_wrong_value_is_removed(fake: Fake) -> None:
    tier, store, clock = fake
    fill(tier, NAMES[:2])
    one, two = store.values
    whole = store.values[one]
    wrong = [whole[:100], whole[:-1], whole + b"x", store.values[two], whole[:5000] + b"?" + whole[5001:], b"?" * 20000]
    for i, value in enumerate(wrong):
        store.values[one] = value
        clock.advance(RETRY_MISSING_AFTER_S)
        assert load(tier, NAMES[:1]) == 0 and one not in store.values
        assert tier.stats().damaged_blocks == i + 1
    assert load(tier, NAMES[1:2]) == 1 and tier.stats().on


def test_failed_store_is_not_queried(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    tier, store, _ = fake
    fill(tier, NAMES[:2])
    store.down = True
    with caplog.at_level(logging.WARNING):
        assert load(tier, NAMES[:1]) == 0
        calls = store.calls
        assert tier.lookup_optimistic(NAMES) == 0 == tier.lookup(NAMES) and not tier.stats().on
        assert load(tier, NAMES[:1]) == 0 and fill(tier, NAMES[2:4]) == 0 and store.calls == calls
        tier.refresh()
        assert not tier.stats().on and store.calls == calls + 1
        store.down = False
        tier.refresh()
    assert tier.stats().on and load(tier, NAMES[:2]) == 2
    assert [r.message.split(":")[0] for r in caplog.records] == [
        "KV store tier turned off, retrying periodically",
        "KV store tier turned on again",
    ]


def test_full_store_and_missing_provider(fake: Fake) -> None:
    tier, store, _ = fake
    store.answer = NO_MEMORY
    assert fill(tier, NAMES[:2]) == 0 and tier.stats().dropped_blocks == 2 and tier.stats().on
    store.answer = PROVIDER_GONE  # a miss, but the tier stays on
    assert load(tier, NAMES[:1]) == 0 and tier.stats().on and tier.stats().errors == 1
    store.answer = 0
    assert fill(tier, NAMES[:1]) == 1


def test_malformed_master_address_is_refused() -> None:
    for wrong in ("store", "store:x", ":5"):
        with pytest.raises(InvalidRequest, match="HOST:PORT"):
            StoreClient(wrong, MEMORY, 1 << 16)


def test_remote_master_needs_a_listen_address(caplog: pytest.LogCaptureFixture) -> None:
    """Listening at a network address needs a setting, because Mooncake authenticates no peer."""
    with pytest.raises(InvalidRequest, match="authenticates no peer") as raised:
        StoreClient("192.0.2.7:50051", MEMORY, 1 << 16)
    assert raised.value.hint is not None and "--kv-mooncake-host" in raised.value.hint
    assert not caplog.text
    StoreClient("192.0.2.7:50051", MEMORY, 1 << 16, StoreListenAddress("192.0.2.8"))
    assert "open to the network: host=192.0.2.8" in caplog.text


def test_starts_without_a_master() -> None:
    tier = RemoteTier(f"127.0.0.1:{free_port()}", "m", BLOCK_BYTES, MEMORY)
    assert not tier.stats().on and fill(tier, NAMES[:1]) == 0 and tier.lookup_optimistic(NAMES) == 0
    tier.close()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_unstartable_process_means_store_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with socket.create_server(("127.0.0.1", 0)) as knocked:
        client = StoreClient(f"127.0.0.1:{knocked.getsockname()[1]}", MEMORY, 1 << 16)
        monkeypatch.setattr(subprocess, "Popen", refuse)
        before = descriptors()
        with pytest.raises(StoreUnavailable, match="Cannot allocate memory") as raised:
            client.ensure_running()
        del raised
        assert descriptors() == before and client.pid is None


# -- with a real Mooncake master ---------------------------------------------------------------------------------------


def test_workers_share_stored_blocks(master: MooncakeMaster) -> None:
    codec = UnweightKVCodec(load_library(build_library(kernel_dir())), 2)
    one = RemoteTier(master.address, "m", BLOCK_BYTES, MEMORY)
    two = RemoteTier(master.address, "m", BLOCK_BYTES, MEMORY, codec=codec, codec_choice="uw")
    assert fill(one, NAMES[:3]) == 3 and fill(two, NAMES[3:5]) == 2
    assert load(two, NAMES[:3]) == 3 and load(one, NAMES[3:6]) == 2
    other = RemoteTier(master.address, "another layout", BLOCK_BYTES, MEMORY)
    assert load(other, NAMES[:1]) == 0
    stack = TierStack(HostTier(BLOCK_BYTES, 1 << 20), [other], threads=False)
    assert stack.lookup(NAMES[1:]) == 7, "hope"
    fetch = stack.start_fetch(NAMES[1:])
    while stack.load_next_block():
        pass
    assert stack.take_fetched(fetch) == ([], True)
    for tier in (one, two, other):
        tier.close()


def test_store_listens_at_configured_address(master: MooncakeMaster) -> None:
    base = free_port()
    client = StoreClient(master.address, MEMORY, 1 << 16, StoreListenAddress(port=base))
    client.ensure_running()
    assert client.pid is not None
    ports = listening_ports(client.pid)
    assert ports == {base, base + 1}
    for port in ports:
        socket.create_connection(("127.0.0.1", port), 5).close()
        for other in ("127.0.0.2", "::1"):
            with pytest.raises(OSError):
                socket.create_connection((other, port), 0.3)
    client.close()


def test_restarted_master(master: MooncakeMaster) -> None:
    tier = RemoteTier(master.address, "m", BLOCK_BYTES, MEMORY)
    assert fill(tier, NAMES[:2]) == 2
    master.kill()
    assert load(tier, NAMES[:2]) == 0 and not tier.stats().on
    tier.refresh()
    assert not tier.stats().on
    master.start()
    until = time.monotonic() + 30
    while fill(tier, NAMES[2:3]) == 0:
        assert time.monotonic() < until, "the store does not come back"
        tier.refresh()
        time.sleep(0.1)
    assert load(tier, NAMES[2:3]) == 1
    tier.close()


def test_hanging_master(master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = RemoteTier(master.address, "m", BLOCK_BYTES, MEMORY)
    assert fill(tier, NAMES[:2]) == 2
    monkeypatch.setattr(storeclient, "CALL_TIMEOUT_S", 0.3)
    master.freeze()
    assert load(tier, NAMES[:2]) == 0 and not tier.stats().on
    monkeypatch.setattr(storeclient, "SETUP_TIMEOUT_S", 0.5)
    newcomer = RemoteTier(
        master.address, "m", BLOCK_BYTES, MEMORY
    )  # the kernel accepts the connection, the master does not answer
    assert not newcomer.stats().on
    newcomer.close()
    master.resume()
    wait_until_on(tier)
    monkeypatch.setattr(storeclient, "CALL_TIMEOUT_S", 5.0)
    assert load(tier, NAMES[:2]) == 2
    tier.close()


def test_client_process_hangs_or_dies(master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch) -> None:
    client = StoreClient(master.address, MEMORY, 1 << 16)
    tier = RemoteTier(master.address, "m", BLOCK_BYTES, MEMORY, client=client)
    assert fill(tier, NAMES[:2]) == 2
    monkeypatch.setattr(storeclient, "CALL_TIMEOUT_S", 0.3)
    first = client.pid
    assert first is not None
    freeze_process(first)
    into = buffer()
    before = bytes(into)
    assert tier.load(NAMES[:1], [into]) == 0 and not tier.stats().on
    os.kill(first, signal.SIGCONT)
    wait_until_on(tier)
    monkeypatch.setattr(storeclient, "CALL_TIMEOUT_S", 5.0)
    assert bytes(into) == before and load(tier, NAMES[:2]) == 2 and client.pid == first
    monkeypatch.setattr(storeclient, "CALL_TIMEOUT_S", 0.3)
    freeze_process(first)
    assert load(tier, NAMES[:1]) == 0
    monkeypatch.setattr(storeclient, "STUCK_TIMEOUT_S", 0.0)
    wait_until_on(tier)
    second = client.pid
    assert second is not None and second != first
    os.kill(second, signal.SIGKILL)
    monkeypatch.setattr(storeclient, "CALL_TIMEOUT_S", 5.0)
    assert fill(tier, NAMES[4:5]) == 0 and not tier.stats().on
    wait_until_on(tier)
    # For ten seconds the master also allocates memory of the dead process, so some writes fail.
    answers = {name: client.put(name.hex(), lambda room: len(room)) for name in map(digest, range(100, 140))}
    assert {answer for answer, _ in answers.values()} <= {0, PROVIDER_GONE} and (0, 1 << 16) in answers.values()
    before = tier.stats().errors
    stored = {name: fill(tier, [name]) for name in map(digest, range(200, 240))}
    assert tier.stats().errors - before == 40 - sum(stored.values()) < 40 and tier.stats().on
    assert all(load(tier, [name]) == here for name, here in stored.items())
    tier.close()


def wait_until_on(tier: RemoteTier) -> None:
    until = time.monotonic() + 30
    while not tier.stats().on:
        assert time.monotonic() < until, "the store does not come back"
        tier.refresh()
        time.sleep(0.02)
