"""Block tables of layers with a window: no block is lost, and every token finds the keys that it attends to."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from window_memory import SIZE, STEP, Memory, evict_idle_blocks, make_request

from emberline.core.clock import ManualClock
from emberline.core.events import TierStats
from emberline.kv.layer_groups import LayerGroups
from emberline.kv.manager import KVManager
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.stack import TierStack
from emberline.tokens.blockhash import block_hash, group_block_hash, root_hash


@pytest.mark.parametrize(
    "windows,size,groups",
    [
        ([512, 512, 512, 512, 512, 0] * 3, 3, (0, 512, 512, 512, 512, 512)),  # Gemma 3 270M
        ([128, 0] * 12, 12, (0, 128)),  # gpt-oss
        ([1024 if (i + 1) % 6 else 0 for i in range(62)], 13, (0, 1024, 1024, 1024, 1024)),  # Gemma 3 27B
        ([0] * 5, 5, (0,)),
        ([7] * 5, 5, (0,)),
        ([0, 3, 3, 9], 1, (0, 3, 3, 9)),
        ([0] * 28 + [4096] * 4, 32, (0,)),  # groups would waste memory
    ],
)
def test_groups_of_layers(windows: list[int], size: int, groups: tuple[int, ...]) -> None:
    found = LayerGroups.for_windows(windows)
    assert (found.block_layers, found.windows) == (size, groups)
    assert len(set(found.layer_positions)) == len(windows)
    assert all(index < size for _, index in found.layer_positions)
    if not found.is_single:
        assert [found.windows[group] for group, _ in found.layer_positions] == windows


def test_tokens_of_one_request_that_fit() -> None:
    groups = LayerGroups.for_windows([8, 8, 0])
    assert groups.windows == (0, 8, 8)
    assert groups.max_tokens(60, SIZE, STEP) == (60 - 2 * 7) * SIZE  # (8 + 12) / 4 + 2 blocks for each window
    assert groups.max_tokens(6, SIZE, STEP) == 2 * SIZE


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    blocks=st.integers(14, 60),
    windows=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    prefix_cache=st.booleans(),
)
def test_every_token_finds_its_keys_and_no_block_is_lost(
    seed: int, blocks: int, windows: list[int], prefix_cache: bool
) -> None:
    rng = random.Random(seed)
    kv = KVManager(blocks, SIZE, "t", prefix_cache=prefix_cache, windows=windows, max_step_tokens=STEP)
    memory = Memory(kv, (0, *windows))
    texts = [[rng.randrange(3) for _ in range(40)] for _ in range(2)]
    for number in range(60):
        action = rng.random()
        if action < 0.3:
            tokens = rng.choice(texts)[: rng.randint(1, 30)] + [rng.randrange(3) for _ in range(rng.randint(0, 6))]
            request = make_request(f"r{number}", tokens)
            if kv.admit(request, reserved_blocks=rng.randint(0, 2)):
                memory.open[request.id] = request
        elif memory.open:
            request = rng.choice(list(memory.open.values()))
            left = request.num_known - request.num_computed
            if action < 0.9:
                if not left:
                    request.tokens.append(rng.randrange(3))
                    left = 1
                if not memory.compute(request, rng.randint(1, min(left, STEP))):
                    action = 1.0  # as a preemption
            if action >= 0.9:
                kv.free_request(memory.open.pop(request.id))
        kv.check_invariants()
    for request in memory.open.values():
        kv.free_request(request)
    kv.check_invariants()
    assert kv.num_free_blocks + kv.num_cached_blocks == blocks


@settings(max_examples=60, deadline=None)
@given(blocks=st.integers(8, 60), windows=st.lists(st.integers(1, 14), min_size=1, max_size=3), cached=st.booleans())
def test_the_longest_request_can_run_alone(blocks: int, windows: list[int], cached: bool) -> None:
    """It is admitted, also with a cached prefix, and does not run out of blocks in its prompt."""
    longest = LayerGroups(1, (0, *windows), ()).max_tokens(blocks, SIZE, STEP)
    kv = KVManager(blocks, SIZE, "t", windows=windows, max_step_tokens=STEP)
    memory = Memory(kv, (0, *windows))
    for name in ("a", "b") if cached else ("a",):
        request = make_request(name, [i % 7 for i in range(longest)])
        if not longest:
            return
        assert kv.admit(request)
        while request.num_computed < longest:
            assert memory.compute(request, min(STEP, longest - request.num_computed))
        kv.free_request(request)
        kv.check_invariants()


def test_a_request_starts_only_if_it_will_not_stall_in_its_prompt() -> None:
    kv = KVManager(40, SIZE, "t", windows=[8], max_step_tokens=SIZE)
    memory = Memory(kv, (0, 8))
    first = make_request("a", list(range(60)))
    assert kv.admit(first)
    while first.num_computed < 60:
        assert memory.compute(first, SIZE)
    second = make_request("b", list(range(100, 172)))  # 18 blocks of full layers, and 5 at a time of the window
    assert not kv.admit(second, reserved_blocks=1)
    kv.free_request(first)
    assert kv.admit(second)


def test_a_prefix_needs_only_the_newest_blocks_of_windows() -> None:
    kv = KVManager(40, SIZE, "t", windows=[5], max_step_tokens=STEP)
    memory = Memory(kv, (0, 5))
    first = make_request("a", list(range(33)))
    assert kv.admit(first)
    for _ in range(3):
        assert memory.compute(first, 11)
    held = [block for block in kv.window_tables(first)[0] if block]
    assert len(held) <= 5 and len(kv.block_table(first)) == 9
    kv.free_request(first)
    again = make_request("b", list(range(33)))
    assert kv.admit(again) and again.num_cached == 32
    assert memory.compute(again, 1)


class LossyTier:
    """A lower tier that holds any number of blocks, claims to hold all, and loses some."""

    name = "lossy"

    def __init__(self, rng: random.Random, losses: float) -> None:
        self._rng, self._losses, self._held = rng, losses, set[bytes]()
        self._damaged = 0

    def lookup(self, hashes: Sequence[bytes]) -> int:
        return next((i for i, digest in enumerate(hashes) if digest not in self._held), len(hashes))

    lookup_optimistic = lookup

    def load(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        (digest,) = hashes
        if self._rng.random() < self._losses:
            self._held.discard(digest)
            self._damaged += self._rng.random() < 0.5
        return int(digest in self._held)

    def store(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        self._held.update(hashes)
        return len(hashes)

    def discard(self, hashes: Sequence[bytes]) -> None:
        self._held.difference_update(hashes)

    def refresh(self) -> None: ...

    def stats(self) -> TierStats:
        return TierStats(damaged_blocks=self._damaged)

    def close(self) -> None: ...


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    blocks=st.integers(24, 60),
    windows=st.lists(st.integers(1, 14), max_size=3),
    buffers=st.integers(2, 40),
    losses=st.sampled_from([None, 0.0, 0.2, 0.5]),
)
def test_every_token_finds_its_keys_after_loads_from_tiers(
    seed: int, blocks: int, windows: list[int], buffers: int, losses: float | None
) -> None:
    """Requests load their prefixes from host memory and a lower tier, which loses blocks; `losses` None: no such."""
    rng = random.Random(seed)
    host = HostTier(SIZE, buffers * 4096)
    tiers = TierStack(host, [LossyTier(rng, losses)] if losses is not None else [], threads=False)
    kv = KVManager(blocks, SIZE, "t", tiers=tiers, windows=windows, max_step_tokens=STEP)
    memory = Memory(kv, (0, *windows))
    text = [rng.randrange(3) for _ in range(40)]
    for number in range(100):
        action, request = rng.random(), rng.choice(list(memory.open.values())) if memory.open else None
        if request is None or (action < 0.1 and len(memory.open) < 3):
            evict_idle_blocks(kv, (0, *windows), rng.randrange(2))
            tokens = text[: rng.randint(4, 40)] + [rng.randrange(3) for _ in range(rng.randint(1, 3))]
            if kv.admit(request := make_request(f"r{number}", tokens)):
                memory.open[request.id] = request
        elif action < 0.3:
            memory.copy_blocks()
            while tiers.write_next_block() or (rng.random() < 0.8 and tiers.load_next_block()):
                pass
        elif kv.is_loading(request) and action < 0.95:
            if not kv.update_loaded_prefix(request):
                kv.free_request(memory.open.pop(request.id))
                if kv.admit(request):
                    memory.open[request.id] = request
        elif action < 0.95 and request.num_computed < request.num_known:
            left = request.num_known - request.num_computed
            if not memory.compute(request, rng.randint(1, min(left, STEP))):
                kv.free_request(memory.open.pop(request.id))  # as a preemption
        else:
            kv.free_request(memory.open.pop(request.id))
        kv.check_invariants()
        host.check_invariants()
    for request in memory.open.values():
        kv.free_request(request)
    memory.copy_blocks()
    while tiers.write_next_block():
        pass
    kv.check_invariants()
    assert kv.num_free_blocks + kv.num_cached_blocks == blocks and host.num_pinned == 0


def test_a_prefix_from_tiers_needs_only_the_newest_blocks_of_windows() -> None:
    """All blocks of full layers are loaded, and two of the six of a window; one that is lost costs only computing."""
    for lost in (None, 5, 4, 3):
        host = HostTier(SIZE, 64 * 4096)
        kv = KVManager(40, SIZE, "t", tiers=TierStack(host), windows=[6], max_step_tokens=STEP)
        memory = Memory(kv, (0, 6))
        first = make_request("a", list(range(25)))
        assert kv.admit(first)
        for _ in range(5):
            assert memory.compute(first, 5)
        kv.free_request(first)
        memory.copy_blocks()
        assert host.stats().blocks == 12  # six of each group
        fresh = KVManager(40, SIZE, "t", tiers=TierStack(host), windows=[6], max_step_tokens=STEP)
        memory = Memory(fresh, (0, 6), saved=memory.saved)
        if lost is not None:
            host.discard([group_block_hash(first.block_hashes[lost], 1)])
        again = make_request("b", list(range(25)))
        assert fresh.admit(again) and fresh.is_loading(again) and fresh.update_loaded_prefix(again)
        blocks = {None: 6, 5: 5, 4: 4, 3: 6}[lost]
        assert again.num_cached == blocks * SIZE and host.num_pinned == blocks + 2
        while again.num_computed < 25:
            assert memory.compute(again, 1)
        assert host.num_pinned == 0


def test_the_router_learns_of_blocks_of_the_first_group_only() -> None:
    """These decide which prefixes a worker has; blocks of windows have the same tokens."""
    kv = KVManager(10, SIZE, "t", windows=[6], max_step_tokens=STEP)
    kv.track_prefix_changes()
    request = make_request("a", list(range(13)))
    assert kv.admit(request) and Memory(kv, (0, 6)).compute(request, 12)
    hashes = request.block_hashes
    assert kv.take_prefix_changes() == (True, list(zip(hashes, [b"", *hashes], strict=False)), [])
    kv.free_request(request)
    evict_idle_blocks(kv, (0, 6), 0)
    changes = kv.take_prefix_changes()
    assert changes is not None and changes[:2] == (False, []) and changes[2] and set(changes[2]) <= set(hashes)


def test_hashes_of_blocks_in_tiers() -> None:
    """They name files that outlive a release."""
    digest = block_hash(root_hash("fp/torch.bfloat16/8", "s"), range(8))
    assert digest.hex() == "b39e629e86883a290c8a1f7dde73d330" and group_block_hash(digest, 0) == digest
    assert group_block_hash(bytes(16), 1).hex() == "4a0153c30fd2a90e2e7b6f3586c921bf"
    assert LayerGroups.single(5).name == "" and LayerGroups.for_windows([7, 7]).name == ""
    assert LayerGroups.for_windows([512] * 5 + [0]).name == "1x0+512+512+512+512+512-3d49073b790bfce1"


def test_a_waiting_request_asks_tiers_once_and_again_when_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is planned in every step; what tiers have when it starts counts, not what they had when it began to wait."""
    host, asked = HostTier(SIZE, 64 * 4096), 0
    kv = KVManager(40, SIZE, "t", tiers=TierStack(host), windows=[6], max_step_tokens=STEP)
    memory, first = Memory(kv, (0, 6)), make_request("a", list(range(25)))
    assert kv.admit(first) and all(memory.compute(first, 5) for _ in range(5))
    kv.free_request(first)
    memory.copy_blocks()
    evict_idle_blocks(kv, (0, 6), 0)
    lookup = TierStack.lookup

    def count_lookup(tiers: TierStack, hashes: Sequence[bytes]) -> int:
        nonlocal asked
        asked += 1
        return lookup(tiers, hashes)

    monkeypatch.setattr(TierStack, "lookup", count_lookup)
    other, waiting = make_request("b", list(range(100, 200))), make_request("c", list(range(25)))
    assert kv.admit(other) and memory.compute(other, 5)
    asked = 0
    assert not kv.admit(waiting)
    asked_once = asked
    assert asked_once > 0 and not any(kv.admit(waiting) for _ in range(10)) and asked == asked_once
    host.discard([group_block_hash(first.block_hashes[5], 1)])
    kv.free_request(other)
    assert kv.admit(waiting) and asked > asked_once
    assert kv.update_loaded_prefix(waiting) and waiting.num_cached == 5 * SIZE


class BrokenTier(LossyTier):
    """A tier that claims to hold every block and delivers none."""

    def lookup(self, hashes: Sequence[bytes]) -> int:
        return len(hashes)

    lookup_optimistic = lookup


@pytest.mark.parametrize("waits", [False, True])
def test_loads_that_fail_or_take_too_long_end(waits: bool) -> None:
    """After each failure a shorter prefix is tried. After the time for loads is over, none is."""
    clock = ManualClock()
    tiers = TierStack(HostTier(SIZE, 8 * 4096), [BrokenTier(random.Random(1), 0.0)], threads=False, clock=clock)
    kv = KVManager(40, SIZE, "t", tiers=tiers, windows=[6], max_step_tokens=STEP, clock=clock, load_timeout_s=5.0)
    request, failures = make_request("a", list(range(25))), 0
    assert kv.admit(request)
    while kv.is_loading(request):
        if waits:
            assert kv.update_loaded_prefix(request) and kv.is_loading(request)
            clock.advance(5.0)
        else:
            assert tiers.load_next_block()
        assert not kv.update_loaded_prefix(request)
        failures += 1
        assert failures < 10
        kv.free_request(request)
        assert kv.admit(request)
    assert failures == 1 and request.load_limit is None
    memory = Memory(kv, (0, 6))
    while request.num_computed < 25:
        assert memory.compute(request, 5)
