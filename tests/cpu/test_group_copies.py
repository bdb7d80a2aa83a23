"""Layers with a window: the same tokens after their blocks were in tiers, or came from another engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import random_checkpoints
import tiny
import tiny_families

from emberline.bench.mooncake_master import MooncakeMaster
from emberline.core.engine_config import EngineConfig
from emberline.core.params import SamplingParams
from emberline.core.request import Priority, Submission
from emberline.core.transfer_config import TransferConfig
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.kv.layer_groups import LayerGroups
from emberline.kv.transfer.errors import IncompatibleCaches
from emberline.kv.transfer.ticket import Ticket
from emberline.tokens.blockhash import group_block_hash

BLOCK, WINDOW, CONTEXT = 8, 25, 160
PROMPT = [(31 * i) % 83 + 3 for i in range(75)]  # 9 blocks and 3 tokens
TAIL = 3  # blocks of a window behind a prefix of full blocks
SAMPLED = {"temperature": 0.9, "seed": 7}


@pytest.fixture(scope="module", params=["gemma3", "cohere2", "gpt-oss"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), request.param)


def write_checkpoint(directory: Path, family: str) -> Path:
    changes = {"max_position_embeddings": CONTEXT, "sliding_window": WINDOW}
    if family in random_checkpoints.CASES:
        random_checkpoints.write(directory, family, **changes)
    else:
        # With a tied head, a tiny Gemma repeats its last token, whatever it attends to.
        config = tiny_families.CONFIGS[family] | changes | {"tie_word_embeddings": False}
        tiny.write_tensors(directory, config, tiny_families.tensors(config))
    return directory


def start_engine(checkpoint: Path, name: str | None = None, **others: Any) -> Engine:
    settings = {"max_batch_tokens": 32, "max_running": 8, "kv_memory": 1 << 19, "block_size": BLOCK, **others}
    transfer = TransferConfig(name) if name else None
    engine = boot(EngineConfig.build(str(checkpoint), device="cpu", threads=1, transfer=transfer, **settings)).engine
    assert engine.kv.has_windows
    return engine


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


def num_windows(e: Engine) -> int:
    return e.kv._num_tables - 1


def evict_all(e: Engine) -> None:
    """Fill the cache with other prompts, until nothing of earlier requests is left."""
    seed = 0
    while any(block in e.kv._prefix for block in range(e.kv.num_blocks)) and seed < 12:
        seed += 1
        run(e, ask([(seed + 7 * i) % 83 + 3 for i in range(120)], f"other-{seed}", max_tokens=1))


# -- tiers -------------------------------------------------------------------------------------------------------------


def test_prefix_loads_from_host_memory(checkpoint: Path, expected: Reply) -> None:
    e = start_engine(checkpoint, kv_host_memory=8 << 20, kv_memory=1 << 17)
    assert run(e, ask())["r"] == expected
    evict_all(e)
    before = e.stats().tiers["host"]
    again = run(e, ask())["r"]
    after = e.stats().tiers["host"]
    assert again == expected and again.cached == 72
    assert after.hit_tokens - before.hit_tokens == 72
    assert after.loaded_blocks - before.loaded_blocks == 9 + TAIL * num_windows(e)
    e.close()


@pytest.mark.parametrize("codec", ["uw", "none"])
def test_prefix_loads_from_disk_after_restart(checkpoint: Path, expected: Reply, tmp_path: Path, codec: str) -> None:
    tiers = {"kv_disk": str(tmp_path), "kv_disk_size": 1 << 24, "kv_codec": codec}
    before = start_engine(checkpoint, **tiers)
    assert run(before, ask())["r"] == expected
    before.close()
    after = start_engine(checkpoint, **tiers)
    reply = run(after, ask())["r"]
    assert reply == expected and reply.cached == 72
    assert after.stats().tiers["disk"].loaded_blocks == 9 + TAIL * num_windows(after)
    longer = run(after, ask([*PROMPT, *expected.tokens[:25]], max_tokens=5))["r"]
    assert longer == Reply(expected.tokens[25:], expected.logprobs[25:])
    after.close()


@pytest.mark.parametrize("group,index,is_lost", [(0, 4, False), (1, 8, True), (1, 7, False), (-1, 6, True)])
def test_a_damaged_or_lost_block_costs_only_computing(
    checkpoint: Path, expected: Reply, tmp_path: Path, group: int, index: int, is_lost: bool
) -> None:
    tiers = {"kv_disk": str(tmp_path), "kv_disk_size": 1 << 24}
    before = start_engine(checkpoint, **tiers)
    before.add(ask())
    hashes = before.kv._shareable_hashes(before.scheduler.requests["r#0"])
    assert run(before)["r"] == expected
    before.close()
    digest = group_block_hash(hashes[index], group % (1 + num_windows(before)))
    after = start_engine(checkpoint, **tiers)
    file = next(tmp_path.glob(f"*/*/{digest.hex()}"))
    data = bytearray(file.read_bytes())
    data[4200] ^= 1
    file.unlink() if is_lost else file.write_bytes(data)
    reply = run(after, ask())["r"]
    # A tier also discards the blocks behind a damaged one, which here include those of further windows.
    discards_others = not is_lost and 0 < group < num_windows(before)
    assert reply == expected and reply.cached == (9 - TAIL if discards_others else index) * BLOCK
    assert after.stats().tiers["disk"].damaged_blocks == (not is_lost)
    after.close()
    third = start_engine(checkpoint, **tiers)
    assert run(third, ask())["r"].cached == 72, "the block was written again"
    third.close()


def test_prefix_is_reused_through_the_store(tmp_path: Path, master: MooncakeMaster) -> None:
    checkpoint = write_checkpoint(tmp_path, "gemma3")
    expected = run(start_engine(checkpoint, prefix_cache=False), ask())["r"]
    store = {"kv_store": master.address, "kv_store_memory": 64 << 20}
    one, two = start_engine(checkpoint, **store), start_engine(checkpoint, **store)
    assert run(one, ask())["r"] == expected
    other_end = run(two, ask([*PROMPT[:50], 5, 6], "other", max_tokens=1))["other"]  # the store has the first 6 blocks
    assert other_end.cached == 48
    reply = run(two, ask())["r"]
    assert reply == expected and reply.cached == 72
    one.close()
    two.close()


def test_preempted_request_reloads_from_tiers(checkpoint: Path) -> None:
    submissions = [ask([i + 3, *PROMPT[:40]], f"r{i}", max_tokens=60, **SAMPLED) for i in range(5)]
    roomy = start_engine(checkpoint, prefix_cache=False)
    expected = run(roomy, *submissions)
    block_bytes = roomy.runner.cache.shape.block_bytes  # type: ignore[attr-defined]
    tight = start_engine(checkpoint, kv_memory=(18 + 10 * num_windows(roomy)) * block_bytes, kv_host_memory=8 << 20)
    tight.add(replace(submissions[0], priority=Priority.BATCH))
    early = [token for _ in range(12) for output in tight.step() for token in output.tokens]
    tight.scheduler._preempt_request(tight.scheduler.requests["r0#0"])
    replies = run(tight, *submissions[1:])  # these come first and need all blocks
    replies["r0"].tokens[:0] = early
    assert {name: reply.tokens for name, reply in replies.items()} == {name: r.tokens for name, r in expected.items()}
    assert tight.stats().tiers["host"].hit_tokens >= 40
    tight.close()


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
    [("shm", 75, 0, 72), ("tcp", 72, 0, 71), ("shm", 73, 0, 72), ("tcp", 75, 30, 48), ("shm", 20, 0, 16)],
)
def test_prefill_and_decode_on_two_engines_give_the_same_tokens(
    checkpoint: Path, pair: tuple[Engine, Engine], transport: str, length: int, first: int, pulled: int
) -> None:
    """`first`: leading tokens that the decoding engine has cached. It computes the last token again for its logits."""
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
    full = length // BLOCK
    published = after[1].published_blocks - before[1].published_blocks
    position = min(full * BLOCK, length - 1)
    assert published == full + num_windows(p) * (full - max(0, position - WINDOW + 1) // BLOCK)
    assert p.stats().transfer.ended.keys() == {"acknowledged"}  # type: ignore[union-attr]
    again = run(d, submission)["r"]
    assert again == expected["r"]
    if length % BLOCK:  # otherwise the tail of the windows begins behind the block that the last token needs again
        assert again.cached == full * BLOCK
    run(p, *(replace(ask(name=f"p{i}", max_tokens=1), salt=f"{i} {submission.salt}") for i in range(6)))
    assert run(p, submission) == expected
    p.kv.check_invariants()


def test_the_first_token_comes_with_the_blocks(checkpoint: Path, pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    submission = replace(ask(logprobs=None, **SAMPLED), salt="token")
    expected = run(start_engine(checkpoint, prefix_cache=False), submission)
    before = d.stats().prompt_tokens
    assert run(d, replace(submission, source=first_ticket(p, submission)), background=p) == expected
    assert d.stats().prompt_tokens - before == 3  # those behind the full blocks
    run(p)
    wait_until_freed(p, d)


@pytest.mark.parametrize("fault", ["lost", "changed"])
def test_a_failed_handoff_costs_only_computing(checkpoint: Path, expected: Reply, fault: str) -> None:
    """The sender dies before the tails of windows are published, or a tail changes before it is copied."""
    p, d = (start_engine(checkpoint, name, kv_checksums=True) for name in "pd")
    ticket = first_ticket(p, ask())
    if fault == "changed":
        run(p)
        newest = p._publisher._sender.poll_ticket(ticket["id"])  # type: ignore[union-attr]
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


def test_abort_during_a_pull_frees_the_blocks_of_all_groups(checkpoint: Path, expected: Reply) -> None:
    p, d = start_engine(checkpoint, "p"), start_engine(checkpoint, "d")
    d.add(replace(ask(), source=first_ticket(p, ask())))
    d.step()
    d.abort("r")
    d.step()
    wait_until_freed(d)
    run(p)
    wait_until_freed(p, d)
    assert run(d, ask())["r"] == expected
    for one in (p, d):
        one.close()


def test_another_grouping_or_block_size_is_refused(checkpoint: Path, pair: tuple[Engine, Engine]) -> None:
    p, _ = pair
    layout = p._publisher._sender.region.layout  # type: ignore[union-attr]
    assert layout.groups and Ticket.parse(first_ticket(p, replace(ask(), salt="refused"))).peer.layout == layout
    run(p)
    for changed, message in (
        (replace(layout, groups=""), "differ in groups"),
        (replace(layout, groups=LayerGroups.for_windows([0, 8, 8]).name), "differ in groups"),
        (replace(layout, tokens=2 * BLOCK), "needs equal ones"),
    ):
        with pytest.raises(IncompatibleCaches, match=message):
            layout.check_compatible(changed)
    single = boot(EngineConfig.build(str(checkpoint), device="cpu", block_size=BLOCK, max_context=WINDOW)).engine
    assert not single.kv.has_windows and len(single.runner.layout.split("/")) == 3
    assert p.runner.layout.startswith(single.runner.layout.split("-")[0]) and p.runner.layout.endswith(layout.groups)
