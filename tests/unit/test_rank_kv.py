"""RankKVManagers: requests have one DP rank, ranks fill evenly, and the router sees the blocks of all ranks."""

from __future__ import annotations

import random

from test_kv import request

from emberline.core.request import Request
from emberline.kv.manager import KVManager
from emberline.kv.rank_managers import RankKVManagers
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.stack import TierStack


def make_managers(ranks: int = 2, blocks: int = 8) -> tuple[RankKVManagers, list[KVManager]]:
    managers = [KVManager(blocks, 4, "t") for _ in range(ranks)]
    return RankKVManagers(managers), managers


def finish(kv: RankKVManagers, r: Request) -> None:
    r.num_computed = r.num_known
    kv.index_full_blocks(r)
    kv.free_request(r)


def test_home_is_the_rank_with_the_fewest_tokens() -> None:
    kv, managers = make_managers(3)
    requests = [request(f"r{i}", [i] * n) for i, n in enumerate((12, 8, 3, 4, 4))]
    assert all(kv.admit(r) for r in requests)
    assert [kv.dp_rank_of(r) for r in requests] == [0, 1, 2, 2, 1]  # 12 tokens, 8 and 4, 4 and 4
    assert kv.block_table(requests[3]) == managers[2].block_table(requests[3])
    assert kv.num_blocks == 24 and kv.num_free_blocks == 24 - 8
    kv.check_invariants()


def test_cached_prefix_determines_the_home_unless_that_has_too_much_to_do() -> None:
    kv, _ = make_managers(blocks=20)
    prompt = list(range(20))
    kv.admit(other := request("other", [7] * 20))
    kv.admit(first := request("first", prompt))
    assert (kv.dp_rank_of(other), kv.dp_rank_of(first)) == (0, 1)
    finish(kv, first)
    kv.free_request(other)
    kv.admit(again := request("again", [*prompt, 5]))
    assert kv.dp_rank_of(again) == 1 and again.num_cached == 20 and kv.hit_tokens == 20
    kv.admit(busy := request("busy", [*prompt, 6]))
    assert kv.dp_rank_of(busy) == 0 and busy.num_cached == 0  # 24 tokens there are as many as both have together
    kv.check_invariants()


def test_a_full_rank_is_passed_over_and_requests_wait_if_all_are_full() -> None:
    kv, managers = make_managers()
    kv.admit(request("a", [1] * 28))  # 7 of 8 blocks of rank 0
    kv.admit(request("b", [2] * 20))  # 5 of rank 1
    assert not kv.admit(large := request("large", [3] * 16), reserved_blocks=2)
    assert large.num_computed == 0 and managers[0].num_free_blocks == 1
    assert kv.admit(small := request("small", [4] * 8), reserved_blocks=2) and kv.dp_rank_of(small) == 1
    assert not kv.admit(request("last", [5] * 4), reserved_blocks=3)  # each rank keeps a block for each of its requests
    assert not kv.extend_block_table(small, 13, reserved_blocks=3) and kv.extend_block_table(small, 12)
    kv.check_invariants()


def test_the_router_gets_the_blocks_of_all_ranks() -> None:
    """A block that two ranks have is removed when the second evicts it."""
    pick = random.Random(3)
    kv, managers = make_managers(blocks=6)
    running: list[Request] = []
    for step in range(200):
        r = request(f"r{step}", [pick.randrange(2)] * 4 + [pick.randrange(2) for _ in range(pick.randrange(1, 14))])
        running += [r] if kv.admit(r) else []
        if running and (len(running) > 2 or pick.random() < 0.3):
            finish(kv, running.pop(pick.randrange(len(running))))
        if step == 20:
            kv.track_prefix_changes()
            known: dict[bytes, bytes] = {}
        if step >= 20 and pick.random() < 0.5:
            is_whole, stored, removed = kv.take_prefix_changes() or (False, [], [])
            assert is_whole == (not known)
            known.update(stored)
            for digest in removed:
                known.pop(digest, None)
            assert known == managers[0].parent_hashes() | managers[1].parent_hashes()
    assert managers[0].parent_hashes().keys() & managers[1].parent_hashes().keys(), "no block was on both ranks"
    kv.check_invariants()


def test_counters_continue_those_of_earlier_managers() -> None:
    kv, _ = make_managers()
    kv.queried_tokens, kv.hit_tokens = 100, 40
    kv.admit(request("a", [1] * 8))
    assert (kv.queried_tokens, kv.hit_tokens) == (108, 40)


def test_a_block_of_two_ranks_is_saved_once_and_loaded_by_any() -> None:
    tiers = TierStack(HostTier(16, 8 * 4096), threads=False)
    managers = [KVManager(8, 4, "t", tiers=tiers) for _ in range(2)]
    kv = RankKVManagers(managers)
    first, second = request("first", [*range(8), 1]), request("second", [*range(8), 2])
    for r in (first, second):  # neither finds the other's blocks
        kv.admit(r)
        r.num_computed = 8
    assert (kv.dp_rank_of(first), kv.dp_rank_of(second)) == (0, 1)
    for r in (second, first):
        kv.index_full_blocks(r)
    assert kv.copies.has_saves
    saves = kv.copies.take_saves()
    assert [(each.dp_rank, each.block) for each in saves] == [(0, block) for block in kv.block_table(first)[:2]]
    assert not kv.copies.has_saves
    kv.copies.finish(saves, [])
    kv.free_request(first)
    kv.free_request(second)
    kv = RankKVManagers([KVManager(8, 4, "t", tiers=tiers) for _ in range(2)])  # with empty caches
    kv.admit(request("busy", [7] * 4))
    kv.admit(third := request("third", [*range(8), 3]))
    assert kv.dp_rank_of(third) == 1 and kv.is_loading(third)
    assert kv.update_loaded_prefix(third) and not kv.is_loading(third) and third.num_cached == 8
    loads = kv.copies.take_loads()
    assert [(each.dp_rank, each.block) for each in loads] == [(1, block) for block in kv.block_table(third)[:2]]
    assert [each.digest for each in loads] == [each.digest for each in saves]
    assert tiers.host.num_pinned == 2
    kv.copies.finish([], loads)
    assert tiers.host.num_pinned == 0
    kv.check_invariants()
    tiers.host.check_invariants()
