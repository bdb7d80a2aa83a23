"""KV blocks move between engines whose ranks have GPUs, and the tokens stay the same. The CPU is their device."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_rank_engines import DeviceThreadRanks
from test_rank_handoff import (
    FAMILIES,
    StartEngine,
    ask,
    assert_all_was_transferred,
    first_ticket,
    make_config,
    run,
    wait_until_freed,
)

from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.gpu.region import DeviceRegion
from emberline.kv.transfer.errors import TransferTimeout
from emberline.kv.transfer.piece import TransferPiece

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the sender and the receiver, with 2 KV heads
    "llama": ({"tp": 4}, {"tp": 2, "pp": 2}),
    "windowed": ({"tp": 2}, {"pp": 2}),
    "latent": ({"pp": 2}, {"tp": 2}),
}


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[StartEngine]:
    """Return a function that starts an engine with the GPU's runner, whose other ranks are threads."""
    with ExitStack() as engines:

        def start(name: str, **settings: Any) -> Engine:
            config = make_config(tmp_path, name, graphs=False, **settings)
            engine = DeviceThreadRanks(config).make_engine(config)
            engines.callback(engine.close)
            return engine

        yield start


def run_on_one_rank(directory: Path) -> list[int]:
    return run(boot(make_config(directory)).engine, ask())


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_after_a_handoff_between_layouts(family: str, tmp_path: Path, start_engine: StartEngine) -> None:
    FAMILIES[family](tmp_path)
    sender, receiver = LAYOUTS[family]
    p, d = start_engine("p", kv_checksums=True, **sender), start_engine("d", **receiver)
    expected = run_on_one_rank(tmp_path)
    assert run(d, replace(ask(), source=first_ticket(p, ask())), background=p) == expected
    assert_all_was_transferred(d)
    run(p)
    wait_until_freed(p, d)
    assert run(d, ask()) == expected, "the blocks stay in the prefix cache"


def test_same_tokens_after_a_handoff_by_mooncake(tmp_path: Path, start_engine: StartEngine) -> None:
    FAMILIES["llama"](tmp_path)
    p, d = start_engine("p", kv_mooncake=True, tp=2), start_engine("d", kv_mooncake=True, pp=2)
    assert run(d, replace(ask(), source=first_ticket(p, ask())), background=p) == run_on_one_rank(tmp_path)
    assert_all_was_transferred(d)
    assert d.transfer_endpoint is not None
    assert d.transfer_endpoint.receiver.connected_transports == {"mooncake": 1}
    run(p)
    wait_until_freed(p, d)


def test_block_sizes_may_differ(tmp_path: Path) -> None:
    """Regions are compared, because kernels for a CPU turn keys, and those of a GPU do not."""
    FAMILIES["llama"](tmp_path)
    configs = [make_config(tmp_path, "p", tp=2, block_size=16), make_config(tmp_path, "d", pp=2, block_size=8)]
    groups = [DeviceThreadRanks(config.with_settings(graphs=False)) for config in configs]
    engines = [group.make_engine(config) for group, config in zip(groups, configs, strict=True)]
    senders, receivers = ([part.runner.cache for part in group.parts] for group in groups)
    for cache in senders:
        for part in cache.tensors:
            part.copy_(torch.rand(part.shape))
    source, target = (engine.transfer_endpoint.sender.region for engine in engines if engine.transfer_endpoint)
    sent, received = np.array([5, 2]), np.array([3, 9, 4, 1])
    piece, data = TransferPiece(0, 2, 0, 2), memoryview(bytearray(2 * source.layout.block_bytes))
    source.gather(piece, sent, source.layout, data)
    target.scatter(piece, received, source.layout, data)
    for kv_index in range(2):
        whole = torch.cat([cache.tensors[kv_index][:, sent] for cache in senders], dim=2)  # heads of the ranks
        arrived = torch.cat([cache.tensors[kv_index][:, received] for cache in receivers])  # layers of the ranks
        assert torch.equal(torch.cat([arrived[:, ::2], arrived[:, 1::2]], dim=3), whole)
    for engine in engines:
        engine.close()


def test_leader_waits_for_slow_ranks(
    tmp_path: Path, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAMILIES["llama"](tmp_path)
    for name in ("gather", "scatter"):
        copy = getattr(DeviceRegion, name)

        def copy_slowly(self: DeviceRegion, *args: Any, copy: Any = copy) -> None:
            if threading.current_thread().name.startswith("transfers"):
                time.sleep(0.02)
            copy(self, *args)

        monkeypatch.setattr(DeviceRegion, name, copy_slowly)
    p, d = start_engine("p", tp=2, kv_checksums=True), start_engine("d", tp=2)
    source = first_ticket(p, ask())
    assert run(d, replace(ask(), source=source), background=p) == run_on_one_rank(tmp_path)
    assert_all_was_transferred(d)
    run(p)


def test_failed_copy_of_a_rank_lets_the_receiver_compute(
    tmp_path: Path, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAMILIES["llama"](tmp_path)
    gather = DeviceRegion.gather

    def fail(self: DeviceRegion, *args: Any) -> None:
        if threading.current_thread().name.startswith("transfers"):
            raise TransferTimeout("no GPU buffer for KV transfers became free")
        gather(self, *args)

    monkeypatch.setattr(DeviceRegion, "gather", fail)
    p, d = start_engine("p", tp=2), start_engine("d", tp=2)
    source = first_ticket(p, ask())
    assert run(d, replace(ask(), source=source), background=p) == run_on_one_rank(tmp_path)
    stats = d.stats().transfer
    assert stats is not None and stats.hit_tokens == 0 and stats.recomputed == 1
    run(p)
