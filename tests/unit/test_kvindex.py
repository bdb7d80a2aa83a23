"""What the router believes of workers' caches: all of it is true, or it does not claim to know."""

from __future__ import annotations

import random

import pytest

from emberline.core.blockbatch import BlockBatch
from emberline.core.params import SamplingParams
from emberline.core.request import Priority, Request
from emberline.engine import block_event_log as ledgers
from emberline.engine.block_event_log import BlockEventLog
from emberline.kv.manager import KVManager
from emberline.router.dialect import InvalidWorkerReply
from emberline.router.kvindex import KVIndex, KVIndexState
from emberline.router.prefix_block_map import BlockPosition, PrefixBlockMap
from emberline.router.prefixmap import PromptPrefix
from emberline.router.stream_tracker import StreamTracker
from emberline.tokens.blockhash import block_hash, hash_last_full_block, root_hash

SIZE = 4  # tokens of a block


class Cache:
    """A worker's engine, as far as its blocks go: requests come and go at random."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.kv = KVManager(24, SIZE, "t")
        self.kv.track_prefix_changes()
        self.open: list[Request] = []
        self.count = 0

    def step(self) -> None:
        if self.open and self.rng.random() < 0.5:
            request = self.open.pop(self.rng.randrange(len(self.open)))
            request.num_computed = request.num_known
            self.kv.index_full_blocks(request)
            self.kv.free_request(request)
            return
        self.count += 1
        tokens = [self.rng.randrange(2)] * self.rng.randrange(SIZE, 5 * SIZE)
        request = prompt_prefixes(str(self.count), [*tokens, *(self.rng.randrange(2) for _ in range(2 * SIZE))])
        if self.kv.admit(request):
            self.open.append(request)
            request.num_computed = self.rng.randrange(request.num_computed, request.num_known)
            self.kv.index_full_blocks(request)


def prompt_prefixes(name: str, tokens: list[int]) -> Request:
    return Request(
        id=name,
        submission_id=name,
        index=0,
        prompt_len=len(tokens),
        tokens=tokens,
        params=SamplingParams(),
        seed=0,
        max_len=10_000,
        priority=Priority.INTERACTIVE,
        salt="",
        arrival=0.0,
        deadline=1e9,
    )


class LossyConnection:
    """Between a ledger and an index: it loses, repeats and reorders what is said, and sometimes breaks off."""

    def __init__(self, ledger: BlockEventLog, index: KVIndex, rng: random.Random, faults: float) -> None:
        self.ledger, self.index, self.rng, self.faults = ledger, index, rng, faults
        self.at = ("", 0)
        self.sent: list[BlockBatch] = []

    def deliver(self) -> None:
        if self.rng.random() < self.faults:
            self.index.mark_disconnected("w")
            self.at = self.index.last_applied_batch("w")
        batches = self.ledger.batches_after(*self.at) or [self.ledger.make_heartbeat()]
        if batches[-1].has_changes or batches[-1].parts:
            self.at = batches[-1].incarnation, batches[-1].seq
        self.sent = [*self.sent, *batches][-64:]
        for batch in batches:
            if self.rng.random() >= self.faults:
                self.index.apply_batch("w", batch)
        if self.rng.random() < self.faults:
            for batch in self.rng.choices(self.sent, k=4):
                self.index.apply_batch("w", batch)

    def mend(self) -> None:
        """What a router does when something is missing: it asks again."""
        self.at = self.index.last_applied_batch("w")


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("faults", [0.0, 0.1, 0.4])
def test_exact_index_equals_cache(seed: int, faults: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "SNAPSHOT_PART_BLOCKS", 3)
    monkeypatch.setattr(ledgers, "MAX_LOGGED_CHANGES", 24)
    rng = random.Random(seed)
    cache, ledger, index = Cache(rng), BlockEventLog(["m"]), KVIndex(1 << 20, 64)
    line, exact = LossyConnection(ledger, index, rng, faults), 0
    truth: dict[tuple[str, int], dict[bytes, bytes]] = {}  # after each batch
    for _ in range(120):
        if rng.random() < 0.02:
            cache = Cache(rng)
            ledger.restart()
        for _ in range(rng.randrange(1, 4)):
            cache.step()
            if (news := cache.kv.take_prefix_changes()) is not None:
                ledger.record("m", *news)
                truth[ledger.incarnation, ledger.seq] = cache.kv.parent_hashes()
        line.deliver()
        if index.state("w") is KVIndexState.EXACT:
            exact += 1
            assert index.parent_by_held_block("w") == truth[index.last_applied_batch("w")]
            assert faults or index.parent_by_held_block("w") == cache.kv.parent_hashes()
        elif rng.random() < 0.5:
            line.mend()
    assert exact > (115 if not faults else 5)
    line.faults = 0.0
    for _ in range(3):
        line.mend()
        line.deliver()
    assert index.state("w") is KVIndexState.EXACT and index.parent_by_held_block("w") == cache.kv.parent_hashes()


def test_no_events_kept_without_subscriber() -> None:
    cache = Cache(random.Random(1))
    cache.kv = KVManager(24, SIZE, "t")
    for _ in range(50):
        cache.step()
    assert cache.kv.take_prefix_changes() is None
    cache.kv.track_prefix_changes()
    whole, stored, removed = cache.kv.take_prefix_changes() or (False, [], [])
    assert whole and dict(stored) == cache.kv.parent_hashes() and not removed
    assert cache.kv.take_prefix_changes() is None


def test_block_counts_until_last_cache_evicts_it() -> None:
    ledger = BlockEventLog(["a", "b"])
    ledger.record("a", True, [(b"1", b"")], [])
    assert not ledger.is_complete and ledger.batches_after("", 0) == []
    ledger.record("b", True, [(b"1", b""), (b"2", b"1")], [])
    (snapshot,) = ledger.batches_after("", 0)
    assert dict(snapshot.stored) == {b"1": b"", b"2": b"1"}
    ledger.record("a", False, [], [b"1"])
    assert ledger.batches_after(snapshot.incarnation, snapshot.seq) == []
    ledger.record("b", True, [(b"3", b"")], [])  # it has slept
    (batch,) = ledger.batches_after(snapshot.incarnation, snapshot.seq)
    assert (batch.stored, sorted(batch.removed), batch.seq) == ([(b"3", b"")], [b"1", b"2"], 1)


def test_new_incarnation_starts_empty() -> None:
    index = build_index(b"a")
    assert (
        index.apply_batch("w", BlockBatch("second", 0)) is KVIndexState.DEGRADED
        and index.parent_by_held_block("w") == {}
    )
    index.apply_batch("w", BlockBatch("second", 0, parts=1))
    assert index.state("w") is KVIndexState.EXACT and index.parent_by_held_block("w") == {}
    assert index.apply_batch("w", BlockBatch("first", 9, [(b"z", b"")], parts=1)) is KVIndexState.EXACT
    assert index.parent_by_held_block("w") == {}


def test_empty_batch_reveals_missed_batches() -> None:
    index = build_index(b"a")
    assert index.apply_batch("w", BlockBatch("first", 0)) is KVIndexState.EXACT
    assert index.apply_batch("w", BlockBatch("first", 1)) is KVIndexState.DEGRADED
    assert index.apply_batch("w", BlockBatch("first", 1, [(b"b", b"a")])) is KVIndexState.EXACT
    assert index.apply_batch("w", BlockBatch("first", 0, [(b"a", b"")], parts=1)) is KVIndexState.EXACT  # old news
    assert index.parent_by_held_block("w") == {b"a": b"", b"b": b"a"}


def test_worker_exceeding_index_is_removed() -> None:
    index = KVIndex(2, 64)
    index.apply_batch("w", BlockBatch("i", 0, [(b"1", b""), (b"2", b"1")], parts=1))
    index.apply_batch("v", BlockBatch("i", 0, [(b"1", b"")], parts=1))
    assert index.state("w") is KVIndexState.EXACT and index.state("v") is KVIndexState.FALLBACK and len(index) == 2
    assert index.has_capacity_for("w") and not index.has_capacity_for("v")
    index.remove_worker("w")
    index.remove_worker("v")
    assert index.state("w") is KVIndexState.FALLBACK and len(index) == 0 and index.has_capacity_for("v")


# -- what it is for ----------------------------------------------------------------------------------------------------

POINTS = (PromptPrefix(b"system", 400), PromptPrefix(b"turn", 1000))


def build_index(*held: bytes) -> KVIndex:
    index = KVIndex(1 << 20, 64)
    index.apply_batch(
        "w", BlockBatch("first", 0, [(digest, held[i - 1] if i else b"") for i, digest in enumerate(held)], parts=1)
    )
    return index


def test_cached_prompt_is_found_only_where_held() -> None:
    index = build_index(*(bytes([i]) for i in range(10)))
    assert index.cached_bytes_by_worker(POINTS, {"w": 1000, "x": 400}) == {
        "w": 1000,
        "x": 400,
    }  # nobody has read it yet
    index.record_prompt_end(POINTS, BlockPosition(bytes([9]), 10))
    index.record_cached_prompt("w", POINTS, BlockPosition(bytes([9]), 10))
    assert index.prefix_blocks.get(POINTS[0]) == BlockPosition(bytes([3]), 4)
    assert index.cached_bytes_by_worker(POINTS, {}) == {"w": 1000}
    index.apply_batch("w", BlockBatch("first", 1, [], [bytes([9])]))
    assert index.cached_bytes_by_worker(POINTS, {"w": 1000}) == {"w": 400}
    index.apply_batch("w", BlockBatch("first", 2, [], [bytes([i]) for i in range(9)]))
    assert index.cached_bytes_by_worker(POINTS, {"w": 1000, "x": 400}) == {"x": 400}
    index.mark_disconnected("w")
    assert index.cached_bytes_by_worker(POINTS, {"w": 1000}) == {"w": 1000}  # it is not known better any more


def test_prefix_ends_where_prompts_diverge() -> None:
    parents = {b"2": b"1", b"3": b"2", b"x4": b"3", b"x5": b"x4", b"y4": b"3", b"y5": b"y4", b"y6": b"y5"}
    chains = PrefixBlockMap(64)
    system, one, other = PromptPrefix(b"s", 800), PromptPrefix(b"one", 1000), PromptPrefix(b"other", 1000)
    chains.record_prefixes_of_prompt([system, one], 1000, BlockPosition(b"x5", 5), parents.get)
    assert chains.get(system) == BlockPosition(b"x4", 4)  # a guess, too far
    chains.record_prefixes_of_prompt([system, other], 1000, BlockPosition(b"y6", 6), parents.get)
    assert chains.get(system) == BlockPosition(b"3", 3)
    assert chains.get(one) == BlockPosition(b"x5", 5) and chains.get(other) == BlockPosition(b"y6", 6)
    chains.record_prefixes_of_prompt([system, one], 1000, BlockPosition(b"x5", 5), parents.get)
    assert chains.get(system) == BlockPosition(b"3", 3)


def test_prefix_map_is_bounded_and_ignores_unknown_blocks() -> None:
    chains = PrefixBlockMap(2)
    chains.record_prefixes_of_prompt(
        [PromptPrefix(b"s", 500), PromptPrefix(b"t", 1000)], 1000, BlockPosition(b"4", 4), lambda digest: None
    )
    assert len(chains) == 0
    for i in range(4):
        chains.record_prefix(PromptPrefix(bytes([i]), 1000), BlockPosition(b"4", 4))
    assert len(chains) == 2 and chains.get(PromptPrefix(bytes([3]), 1000)) is not None


def test_block_position_round_trips() -> None:
    root, tokens = root_hash("t"), list(range(10))
    assert hash_last_full_block(root, tokens, 4) == (block_hash(block_hash(root, tokens[:4]), tokens[4:8]), 2)
    assert hash_last_full_block(root, tokens[:3], 4) is None
    link = BlockPosition(b"\x01" * 16, 12)
    assert BlockPosition.parse(str(link)) == link
    for wrong in ("", "zz 1", "00 0", "00 x", "00"):
        with pytest.raises(ValueError):
            BlockPosition.parse(wrong)


def test_tracked_stream_reports_prompt_end() -> None:
    track = StreamTracker()
    link = BlockPosition(b"\x01" * 16, 12)
    assert track.push(f": cached 3\n\n: chain {link}\n\n: said 0 1 9\n\n".encode() + b"data: x\n\n") == b"data: x\n\n"
    assert track.prompt_end == link and track.cached_tokens == 3
    with pytest.raises(InvalidWorkerReply):
        StreamTracker().push(b": chain nothing\n\n: said 0 1 9\n\ndata: x\n\n")
