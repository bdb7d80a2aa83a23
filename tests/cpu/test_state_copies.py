"""Recurrent layers: the same tokens after their states were in tiers, or came from another engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import tiny_delta

from emberline.bench.mooncake_master import MooncakeMaster
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.core.params import SamplingParams
from emberline.core.request import Priority, Submission
from emberline.core.transfer_config import TransferConfig
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.runner import TorchRunner
from emberline.kv.state_manager import StateKVManager
from emberline.tokens.blockhash import state_page_hash

BLOCK = 8
PROMPT = [(31 * i) % 83 + 3 for i in range(75)]  # 9 blocks and 3 tokens
SAMPLED = {"temperature": 0.9, "seed": 7}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_delta.write(directory, "next")
    return directory


def start_engine(checkpoint: Path, name: str | None = None, **others: Any) -> Engine:
    settings = {"max_batch_tokens": 32, "max_running": 8, "kv_memory": 1 << 19, "block_size": BLOCK, **others}
    transfer = TransferConfig(name) if name else None
    engine = boot(EngineConfig.build(str(checkpoint), device="cpu", threads=1, transfer=transfer, **settings)).engine
    assert isinstance(engine.kv, StateKVManager)
    return engine


def manager_of(e: Engine) -> StateKVManager:
    assert isinstance(e.kv, StateKVManager)
    return e.kv


def num_pages(e: Engine) -> int:
    return manager_of(e)._pages.per_slot


@dataclass
class Reply:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = field(default=0, compare=False)


def run(e: Engine, *submissions: Submission, background: Engine | None = None) -> dict[str, Reply]:
    for submission in submissions:
        e.add(submission)
    replies, ends = {submission.id: Reply() for submission in submissions}, time.monotonic() + 30
    while not e.idle:
        assert time.monotonic() < ends
        for output in e.step():
            assert output.error is None, output.error
            reply = replies.setdefault(output.id, Reply())
            reply.tokens += output.tokens
            reply.logprobs += [each.logprob for each in output.logprobs]
            reply.cached += output.cached_tokens
        e.kv.check_invariants()
        if background is not None:
            background.step()
    if e.kv.tiers is not None:
        assert e.kv.tiers.wait_until_written(20.0)
    return replies


def ask(prompt: list[int] = PROMPT, name: str = "r", **params: Any) -> Submission:
    wishes = {"max_tokens": 30, "temperature": 0.0, "logprobs": 0, "ignore_eos": True, **params}
    return Submission(name, prompt, SamplingParams(**wishes), timeout=60.0)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Reply:
    """Return the output of an engine that copies nothing."""
    return run(start_engine(checkpoint, prefix_cache=False), ask())["r"]


@pytest.fixture(scope="module")
def next_turn(checkpoint: Path, expected: Reply) -> tuple[Submission, Reply]:
    """Return a prompt that continues the output, and its own output. There is a snapshot after 104 of its tokens."""
    submission = ask([*PROMPT, *expected.tokens, 5], "next", max_tokens=3)
    return submission, run(start_engine(checkpoint, prefix_cache=False), submission)["next"]


def evict_all(e: Engine) -> None:
    """Fill the slots with snapshots of other prompts."""
    for seed in range(1, 1 + manager_of(e).states.total):
        run(e, ask([(seed + 7 * i) % 83 + 3 for i in range(72)], f"other-{seed}", max_tokens=1))


# -- tiers -------------------------------------------------------------------------------------------------------------


def test_states_load_from_host_memory(checkpoint: Path, expected: Reply) -> None:
    e = start_engine(checkpoint, kv_host_memory=8 << 20, kv_memory=1 << 17, max_running=2)
    assert run(e, ask())["r"] == expected
    evict_all(e)
    before = e.stats().tiers["host"]
    again = run(e, ask())["r"]
    after = e.stats().tiers["host"]
    assert again == expected and again.cached == 72
    assert after.loaded_blocks - before.loaded_blocks >= num_pages(e) > 1
    longer = run(e, ask([*PROMPT, *expected.tokens[:25]], max_tokens=5))["r"]
    assert longer == Reply(expected.tokens[25:], expected.logprobs[25:])
    e.close()


@pytest.mark.parametrize("codec", ["uw", "none"])
def test_states_load_from_disk_after_restart(
    checkpoint: Path, expected: Reply, next_turn: tuple[Submission, Reply], tmp_path: Path, codec: str
) -> None:
    tiers = {"kv_disk": str(tmp_path), "kv_disk_size": 1 << 24, "kv_codec": codec}
    before = start_engine(checkpoint, **tiers)
    assert run(before, ask())["r"] == expected
    before.close()
    after = start_engine(checkpoint, **tiers)
    reply = run(after, ask())["r"]
    assert reply == expected and reply.cached == 72
    assert after.stats().tiers["disk"].loaded_blocks == 9 + num_pages(after)
    slots = manager_of(after).states
    assert slots.num_snapshots == 2, "the snapshot from the disk can be used again, like that behind the output"
    assert run(after, ask(name="again"))["again"].cached == 72
    third = start_engine(checkpoint, **tiers)
    reply = run(third, next_turn[0])["next"]
    assert reply == next_turn[1] and reply.cached == 104
    for each in (after, third):
        each.close()


def test_states_come_back_after_sleep(checkpoint: Path, expected: Reply, next_turn: tuple[Submission, Reply]) -> None:
    """A sleeping model loses its cache and its states, but not what is in host memory."""
    e = start_engine(checkpoint, kv_host_memory=8 << 20)
    e.kv.track_prefix_changes()
    assert run(e, ask())["r"] == expected and e.kv.take_prefix_changes() is not None
    runner = e.runner
    assert isinstance(runner, TorchRunner) and runner.states is not None
    for tensor in (runner.cache.keys, runner.cache.values, runner.states.conv, runner.states.matrices):
        tensor.fill_(float("nan"))
    e.reset_kv()
    assert manager_of(e).states.num_free == manager_of(e).states.total
    assert e.kv.take_prefix_changes() == (True, [], [])
    reply = run(e, next_turn[0])["next"]
    assert reply == next_turn[1] and reply.cached == 104
    e.close()


@pytest.mark.parametrize("page,is_lost", [(0, False), (1, True), (-1, False)])
def test_a_damaged_or_lost_page_costs_only_computing(
    checkpoint: Path, expected: Reply, tmp_path: Path, page: int, is_lost: bool
) -> None:
    tiers = {"kv_disk": str(tmp_path), "kv_disk_size": 1 << 24}
    before = start_engine(checkpoint, **tiers)
    before.add(ask())
    hashes = before.kv._hasher.block_hashes(before.scheduler.requests["r#0"], 9)
    assert run(before)["r"] == expected
    before.close()
    after = start_engine(checkpoint, **tiers)
    digest = state_page_hash(hashes[8], page % num_pages(after))
    file = next(tmp_path.glob(f"*/*/{digest.hex()}"))
    data = bytearray(file.read_bytes())
    data[4200] ^= 1
    file.unlink() if is_lost else file.write_bytes(data)
    reply = run(after, ask())["r"]
    assert reply == expected and reply.cached == 0
    assert after.stats().tiers["disk"].damaged_blocks == (not is_lost)
    after.close()
    third = start_engine(checkpoint, **tiers)
    assert run(third, ask())["r"].cached == 72, "the page was written again"
    third.close()


def test_states_are_reused_through_the_store(checkpoint: Path, expected: Reply, master: MooncakeMaster) -> None:
    store = {"kv_store": master.address, "kv_store_memory": 64 << 20}
    one, two = start_engine(checkpoint, **store), start_engine(checkpoint, **store)
    assert run(one, ask())["r"] == expected
    reply = run(two, ask([*PROMPT, *expected.tokens[:25]], max_tokens=5))["r"]
    assert reply == Reply(expected.tokens[25:], expected.logprobs[25:])
    assert reply.cached == 72, "one of the boundaries at which the store was asked"
    one.close()
    two.close()


def test_preempted_request_reloads_its_states(checkpoint: Path) -> None:
    submissions = [ask([i + 3, *PROMPT], f"r{i}", max_tokens=60, **SAMPLED) for i in range(5)]
    expected = run(start_engine(checkpoint, prefix_cache=False), *submissions)
    tight = start_engine(checkpoint, kv_memory=110_000, max_running=4, kv_host_memory=8 << 20)
    tight.add(replace(submissions[0], priority=Priority.BATCH))
    early = [token for _ in range(12) for output in tight.step() for token in output.tokens]
    tight.scheduler._preempt_request(tight.scheduler.requests["r0#0"])
    replies = run(tight, *submissions[1:])  # these come first, and need all slots
    replies["r0"].tokens[:0] = early
    assert {name: reply.tokens for name, reply in replies.items()} == {name: r.tokens for name, r in expected.items()}
    assert tight.stats().tiers["host"].hit_tokens >= 64
    tight.close()


def test_host_memory_must_hold_a_snapshot(checkpoint: Path) -> None:
    with pytest.raises(InvalidRequest, match="kv_host_memory is 32768 bytes, which hold 8 KV blocks of 4096"):
        start_engine(checkpoint, kv_host_memory=32768)


# -- other engines -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(checkpoint: Path) -> Iterator[tuple[Engine, Engine]]:
    engines = start_engine(checkpoint, "p"), start_engine(checkpoint, "d", kv_host_memory=1 << 22)
    yield engines
    for one in engines:
        one.close()


def first_ticket(p: Engine, submission: Submission, transport: str = "tcp") -> dict[str, Any]:
    """Return the first ticket, while the prompt is still being computed, with one transport only."""
    p.add(replace(submission, publish=True))
    while not (outputs := p.step()):
        pass
    ticket = outputs[0].ticket
    assert ticket is not None and outputs[0].finish is None
    return {**ticket, "peer": {**ticket["peer"], "endpoints": {transport: ticket["peer"]["endpoints"][transport]}}}


def wait_until_freed(*engines: Engine) -> None:
    ends = time.monotonic() + 30
    while any(e.kv.num_free_blocks + e.kv.num_cached_blocks < e.kv.num_blocks for e in engines):
        assert time.monotonic() < ends, "blocks are still in use"
        for e in engines:
            e.step()
            e.kv.check_invariants()
        time.sleep(0.002)


@pytest.mark.parametrize(
    "transport,length,first,pulled",
    [("shm", 75, 0, 72), ("tcp", 72, 0, 64), ("shm", 73, 0, 72), ("tcp", 75, 30, 72), ("shm", 20, 0, 16)],
)
def test_prefill_and_decode_on_two_engines_give_the_same_tokens(
    checkpoint: Path, pair: tuple[Engine, Engine], transport: str, length: int, first: int, pulled: int
) -> None:
    """`first`: leading tokens whose blocks the decoding engine has cached, without states."""
    p, d = pair
    submission = replace(ask(PROMPT[:length]), salt=f"{transport} {length} {first}")
    expected = run(start_engine(checkpoint, prefix_cache=False), submission)
    if first:
        run(d, replace(ask(PROMPT[:first], "part", max_tokens=1), salt=submission.salt))
    before = d.stats().transfer, p.stats().transfer
    assert run(d, replace(submission, source=first_ticket(p, submission, transport)), background=p) == expected
    after = d.stats().transfer, p.stats().transfer
    assert before[0] is not None and before[1] is not None and after[0] is not None and after[1] is not None
    assert after[0].hit_tokens - before[0].hit_tokens == pulled and after[0].pull_failures == {}
    run(p)
    wait_until_freed(p, d)
    published = after[1].published_blocks - before[1].published_blocks
    assert published == (length - 1) // BLOCK + num_pages(p)
    # The prefilling engine has a snapshot where the handoff was, and publishes it without computing the prompt again.
    computed = p.stats().prompt_tokens
    again = run(d, replace(submission, source=first_ticket(p, submission, transport)), background=p)
    run(p)
    assert again == expected and p.stats().prompt_tokens - computed == length - pulled
    wait_until_freed(p, d)
    assert d.stats().transfer.hit_tokens - after[0].hit_tokens == pulled  # type: ignore[union-attr]
    assert p.stats().transfer.ended.keys() == {"acknowledged"}  # type: ignore[union-attr]
    assert run(d, submission) == expected


def test_the_first_token_comes_with_the_states(checkpoint: Path, pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    submission = replace(ask(logprobs=None, **SAMPLED), salt="token")
    expected = run(start_engine(checkpoint, prefix_cache=False), submission)
    before = d.stats().prompt_tokens
    assert run(d, replace(submission, source=first_ticket(p, submission)), background=p) == expected
    assert d.stats().prompt_tokens - before == 3  # those behind the full blocks
    run(p)
    wait_until_freed(p, d)


def test_a_moved_stream_continues_from_the_states_of_another_engine(
    checkpoint: Path, pair: tuple[Engine, Engine], expected: Reply
) -> None:
    p, d = pair
    moved = replace(ask(), resumed=(tuple(expected.tokens[:14]),), salt="moved")
    reply = run(d, replace(moved, source=first_ticket(p, moved)), background=p)["r"]
    assert reply == Reply(expected.tokens[14:], expected.logprobs[14:])
    run(p)
    wait_until_freed(p, d)


@pytest.mark.parametrize("fault", ["lost", "changed"])
def test_a_failed_handoff_costs_only_computing(checkpoint: Path, expected: Reply, fault: str) -> None:
    """The sender dies before the states are published, or they change before they are copied."""
    p, d = (start_engine(checkpoint, name, kv_checksums=True) for name in "pd")
    ticket = first_ticket(p, ask())
    if fault == "changed":
        run(p)
        newest = p._publisher._sender.poll_ticket(ticket["id"])  # type: ignore[union-attr]
        assert len(newest.blocks) == 9 + num_pages(p)
        p.runner.cache.keys[0, newest.blocks[-1], 0, 0, 0] += 1  # type: ignore[attr-defined]
    d.add(replace(ask(), source=ticket))
    if fault == "lost":
        for _ in range(5):
            d.step()
        p.close()
    assert run(d)["r"] == expected
    stats = d.stats()
    assert stats.transfer is not None and stats.transfer.hit_tokens == 0 and stats.transfer.recomputed == 1
    assert stats.preemptions == 0 and stats.prompt_tokens == 75
    wait_until_freed(d)
    for one in (p, d):
        one.close()


def test_abort_during_a_pull_frees_blocks_and_slots(checkpoint: Path, expected: Reply) -> None:
    p, d = start_engine(checkpoint, "p"), start_engine(checkpoint, "d")
    d.add(replace(ask(), source=first_ticket(p, ask())))
    d.step()
    d.abort("r")
    d.step()
    wait_until_freed(d)
    run(p)
    wait_until_freed(p, d)
    slots = manager_of(d).states
    assert slots.num_free == slots.total
    assert run(d, ask())["r"] == expected
    for one in (p, d):
        one.close()


def test_without_room_for_states_nothing_is_handed_over(checkpoint: Path, expected: Reply) -> None:
    """The sender's cache has blocks for the prompt, but not for the states in addition."""
    p, d = start_engine(checkpoint, "p", kv_memory=40_000), start_engine(checkpoint, "d")
    assert p.kv.num_blocks < 10 + num_pages(p)
    assert run(d, replace(ask(), source=first_ticket(p, ask())), background=p)["r"] == expected
    run(p)
    wait_until_freed(p, d)
    for one in (p, d):
        one.close()
