"""KV blocks move between engines whose ranks divide the model differently, and the tokens stay the same."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_families
from held_group_memory import find_group_memory, wait_until_group_memory_is_freed
from rank_engines import make_thread_engine
from rank_models import FULL, SLIDING, WIDE, WRITERS

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EngineFailed, InvalidRequest
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.core.transfer_config import TransferConfig
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.ranks.group import RankGroup
from emberline.engine.ranks.settings import check_transfer
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kv.transfer import staged_pieces
from emberline.kv.transfer.group_region import GroupRegion
from emberline.kv.transfer.mooncake import MooncakeEngine
from emberline.kv.transfer.piece import TransferPiece
from emberline.models.config import ModelConfig

BLOCK, WINDOW = 8, 18
PROMPT = [(31 * i) % 83 + 3 for i in range(45)]  # 5 blocks and 5 tokens


def write_windowed(directory: Path) -> None:
    """Write a model whose groups of layers have a place that no layer uses."""
    types = [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING]
    changes = WIDE | {"num_hidden_layers": 7, "layer_types": types, "sliding_window": WINDOW}
    config = tiny_families.cohere("cohere2", **changes)
    tiny.write_tensors(directory, config, tiny_families.tensors(config))


FAMILIES: dict[str, Callable[[Path], object]] = {
    "llama": WRITERS["llama"], "windowed": write_windowed, "latent": WRITERS["deepseek_v3"],
}  # fmt: skip


StartEngine = Callable[..., Engine]


def make_config(
    directory: Path, name: str | None = None, *, lease_seconds: float = 20.0, **settings: Any
) -> EngineConfig:
    transfer = TransferConfig(name, lease_seconds=lease_seconds) if name else None
    common = {"device": "cpu", "threads": 1, "dtype": "float32", "kv_memory": 1 << 20, "block_size": BLOCK}
    limits = {"max_context": 64, "max_batch_tokens": 16, "max_running": 3}
    return EngineConfig.build(str(directory), **common | limits | {"transfer": transfer} | settings)


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[StartEngine]:
    """Return a function that starts an engine, whose other ranks are threads. A failed test ends them too."""
    with ExitStack() as engines:

        def start(name: str | None = None, **settings: Any) -> Engine:
            config = make_config(tmp_path, name, **settings)
            engine = make_thread_engine(config) if config.parallel.num_ranks > 1 else boot(config).engine
            engines.callback(engine.close)
            return engine

        yield start


def ask(name: str = "r", **params: Any) -> Submission:
    sampling = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **params})
    return Submission(name, PROMPT, sampling, salt=name, timeout=60.0)


def run(engine: Engine, *submissions: Submission, background: Engine | None = None) -> list[int]:
    for submission in submissions:
        engine.add(submission)
    tokens: list[int] = []
    ends = time.monotonic() + 30
    while not engine.idle:
        assert time.monotonic() < ends
        for output in engine.step():
            assert output.error is None, output.error
            tokens += output.tokens
        if background is not None:
            background.step()
    engine.kv.check_invariants()
    return tokens


def first_ticket(engine: Engine, submission: Submission) -> dict[str, Any]:
    """Return the first ticket, while the prompt is still being computed."""
    engine.add(replace(submission, publish=True))
    while not (outputs := engine.step()):
        pass
    assert outputs[0].ticket is not None and outputs[0].finish is None
    return outputs[0].ticket


def wait_until_freed(*engines: Engine) -> None:
    ends = time.monotonic() + 30
    while any(e.kv.num_free_blocks + e.kv.num_cached_blocks < e.kv.num_blocks for e in engines):
        assert time.monotonic() < ends, "blocks are still in use"
        for engine in engines:
            engine.step()
        time.sleep(0.002)


def assert_all_was_transferred(d: Engine) -> None:
    stats = d.stats()
    assert stats.transfer is not None and stats.transfer.pull_failures == {}
    assert stats.transfer.hit_tokens == 40 and stats.transfer.verified_blocks >= 5
    assert stats.prompt_tokens == 5, "only tokens behind the full blocks are computed"


LAYOUTS: list[tuple[dict[str, int], dict[str, int]]] = [
    ({"tp": 2}, {}),
    ({"tp": 2}, {"tp": 4}),  # more ranks than KV heads
    ({"tp": 2}, {"pp": 2}),
    ({"pp": 2}, {"tp": 2}),
    ({}, {"tp": 2, "pp": 2}),
    ({"tp": 4}, {}),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_after_a_handoff_between_layouts(family: str, tmp_path: Path, start_engine: StartEngine) -> None:
    FAMILIES[family](tmp_path)
    expected = run(start_engine(), ask())
    for sender, receiver in LAYOUTS:
        p = start_engine("p", kv_checksums=True, **sender)
        d = start_engine("d", **receiver)
        assert p.kv.has_windows == d.kv.has_windows == (family == "windowed")
        assert run(d, replace(ask(), source=first_ticket(p, ask())), background=p) == expected, (sender, receiver)
        assert_all_was_transferred(d)
        run(p)
        wait_until_freed(p, d)
        assert p.stats().transfer.ended == {"acknowledged": 1}  # type: ignore[union-attr]
        assert run(d, ask()) == expected, "the blocks stay in the prefix cache"


@pytest.mark.parametrize("family", ["llama", "windowed"])
def test_same_tokens_after_a_handoff_by_mooncake(family: str, tmp_path: Path, start_engine: StartEngine) -> None:
    """All engines of this process share one of Mooncake's, which reads their memory by TCP."""
    FAMILIES[family](tmp_path)
    expected = run(start_engine(), ask())
    for sender, receiver in LAYOUTS if family == "llama" else LAYOUTS[2:3]:
        p = start_engine("p", kv_mooncake=True, **sender)
        d = start_engine("d", kv_mooncake=True, **receiver)
        assert run(d, replace(ask(), source=first_ticket(p, ask())), background=p) == expected, (sender, receiver)
        assert_all_was_transferred(d)
        assert d.transfer_endpoint is not None
        assert d.transfer_endpoint.receiver.connected_transports == {"mooncake": 1}
        run(p)
        wait_until_freed(p, d)
        assert p.stats().transfer.ended == {"acknowledged": 1}  # type: ignore[union-attr]


def test_aborted_request_gives_back_its_slot(
    tmp_path: Path, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is aborted while Mooncake reads its blocks. The next request gets its own blocks."""
    WRITERS["llama"](tmp_path)
    expected = run(start_engine(), ask())
    monkeypatch.setattr(staged_pieces, "NUM_SLOTS", 1)
    p, d = start_engine("p", kv_mooncake=True, tp=2), start_engine("d", kv_mooncake=True, pp=2)
    is_reading, may_read, read = threading.Event(), threading.Event(), MooncakeEngine.read_remote_memory

    def read_later(self: MooncakeEngine, *args: Any) -> bool:
        is_reading.set()
        assert may_read.wait(30)
        return read(self, *args)

    monkeypatch.setattr(MooncakeEngine, "read_remote_memory", read_later)
    d.add(replace(ask(), source=first_ticket(p, ask())))
    while not is_reading.is_set():
        d.step()
    d.abort("r")
    d.step()
    run(p)
    wait_until_freed(d, p)
    assert p.stats().transfer.ended == {"released": 1}  # type: ignore[union-attr]
    may_read.set()
    again = replace(ask("again"), source=first_ticket(p, ask("again")))
    assert run(d, again, background=p) == expected
    assert_all_was_transferred(d)
    run(p)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}])
def test_requests_with_the_same_id_have_their_own_blocks(
    layout: dict[str, int], tmp_path: Path, start_engine: StartEngine
) -> None:
    """All ranks must use the new blocks, which other engines copy."""
    WRITERS["llama"](tmp_path)
    expected, p = run(start_engine(), ask()), start_engine("p", **layout)
    for number in range(2):
        submission, d = replace(ask(), salt=f"{number}"), start_engine("d")
        assert run(d, replace(submission, source=first_ticket(p, submission)), background=p) == expected
        run(p)


def test_block_sizes_may_differ_and_blocks_may_be_compressed(tmp_path: Path, start_engine: StartEngine) -> None:
    WRITERS["llama"](tmp_path)
    expected = run(start_engine(), ask())
    p = start_engine("p", tp=2, block_size=16, kv_codec="uw")
    d = start_engine("d", tp=4, block_size=8, kv_codec="uw")
    assert run(d, replace(ask(), source=first_ticket(p, ask())), background=p) == expected
    stats = d.stats().transfer
    assert stats is not None and stats.hit_tokens == 32 and stats.pull_failures == {}
    run(p)


def test_blocks_are_published_after_all_ranks_have_written_them(
    tmp_path: Path, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank is slow, and the first chunks of the prompt have no logits, for which ranks would wait."""
    WRITERS["llama"](tmp_path)
    p, leader, write = start_engine("p", tp=2), threading.current_thread(), ops.rope_and_cache

    def write_slowly(*args: Any) -> None:
        if threading.current_thread() is not leader:
            time.sleep(0.05)
        write(*args)

    monkeypatch.setattr(ops, "rope_and_cache", write_slowly)
    ticket = first_ticket(p, ask())
    assert p.transfer_endpoint is not None
    region = p.transfer_endpoint.sender.region
    assert isinstance(region, GroupRegion)
    data = bytearray(region.layout.block_bytes)
    region.gather(TransferPiece(0, 2, 0, 1), np.array(ticket["blocks"]), region.layout, memoryview(data))
    assert np.frombuffer(data, np.float32).reshape(2, 2, 2, -1).any(axis=3).all(), "a rank has written nothing yet"
    run(p)


def rank_pid(engine: Engine) -> int:
    ranks = getattr(engine.runner, "ranks", None)
    assert isinstance(ranks, RankGroup)
    (pid,) = ranks.pids.values()
    return pid


def run_until_failure(engine: Engine) -> str:
    """Return why the engine failed. (pytest.raises would keep the traceback, which refers to the engine.)"""
    try:
        run(engine)
    except EngineFailed as error:
        return error.message
    raise AssertionError("the engine did not fail")


def test_ranks_in_processes_and_their_deaths_during_a_transfer(
    tmp_path: Path, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    WRITERS["llama"](tmp_path)
    caplog.set_level(logging.CRITICAL)  # logged errors have tracebacks, which would refer to the engines
    held = len(find_group_memory())  # by earlier tests
    expected = run(start_engine(), ask())
    p = boot(make_config(tmp_path, "p", tp=2)).engine
    d = boot(make_config(tmp_path, "d", pp=2, kv_checksums=True)).engine
    pids = [rank_pid(p), rank_pid(d)]
    assert run(d, replace(ask(), source=first_ticket(p, ask())), background=p) == expected
    assert d.stats().transfer.hit_tokens == 40 and d.stats().prompt_tokens == 5  # type: ignore[union-attr]
    run(p)

    d.add(replace(ask("again"), source=first_ticket(p, ask("again"))))
    d.step()
    os.kill(pids[0], signal.SIGKILL)
    assert run_until_failure(p) == "rank 1 of 2 (stage 0, tensor rank 1) was killed by signal 9"
    p.close()
    assert run(d) == expected, "the rest of the prompt is computed"
    assert d.stats().transfer.recomputed == 1  # type: ignore[union-attr]
    wait_until_freed(d)

    whole = start_engine("whole", lease_seconds=0.5)
    d.add(replace(ask("last"), source=first_ticket(whole, ask("last"))))
    d.step()
    os.kill(pids[1], signal.SIGKILL)
    assert run_until_failure(d) == "rank 0 of 2 (stage 0, tensor rank 0) was killed by signal 9"
    d.close()
    run(whole)
    wait_until_freed(whole)  # the receiver's connections are closed, so the lease expires
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    del p, d
    wait_until_group_memory_is_freed(held)


def test_what_ranks_cannot_exchange_is_refused(tmp_path: Path, start_engine: StartEngine) -> None:
    WRITERS["llama"](tmp_path)
    with pytest.raises(InvalidRequest, match="float8") as caught:
        start_engine("p", tp=2, kv_dtype="float8")
    assert caught.value.param == "kv_dtype"
    WRITERS["delta-dense"](tmp_path)
    model = ModelConfig.from_checkpoint(Checkpoint.open(tmp_path))
    plain = ModelConfig.from_hf(tiny.config("llama"))
    for settings, read_model, obstacle in (
        ({}, model, "the model has recurrent layers"),
        ({"nodes": 2, "master": "127.0.0.1:9000"}, plain, "they are on several nodes"),
        ({"dp_attention": True}, plain, "dp_attention is set"),
    ):
        with pytest.raises(InvalidRequest, match=f"cannot exchange KV blocks .* if {obstacle}") as caught:
            check_transfer(make_config(tmp_path, "p", tp=2, **settings), read_model)
        assert caught.value.param == "transfer"
    optional = make_config(tmp_path, tp=2, transfer=TransferConfig("b", required=False))
    check_transfer(optional, model)
    with pytest.raises(InvalidRequest, match=r"kv_mooncake is set, but .* if the model has recurrent layers") as caught:
        check_transfer(make_config(tmp_path, tp=2, kv_mooncake=True, transfer=optional.transfer), model)
    assert caught.value.param == "kv_mooncake"
    engine = start_engine(transfer=optional.transfer, tp=2)  # a worker with --role both runs without the exchange
    assert engine.transfer_endpoint is None
