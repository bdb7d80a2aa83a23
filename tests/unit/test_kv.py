"""KVManager: no block is lost, and equal prefixes share blocks."""

from __future__ import annotations

from emberline.core.clock import ManualClock
from emberline.core.params import SamplingParams
from emberline.core.request import Priority, Request
from emberline.kv.manager import KVManager


def request(name: str, tokens: list[int], salt: str = "") -> Request:
    return Request(
        id=name,
        submission_id=name,
        index=0,
        prompt_len=len(tokens),
        tokens=list(tokens),
        params=SamplingParams(),
        seed=0,
        max_len=10_000,
        priority=Priority.INTERACTIVE,
        salt=salt,
        arrival=0.0,
        deadline=1e9,
    )


def finish(kv: KVManager, r: Request) -> None:
    r.num_computed = r.num_known
    kv.index_full_blocks(r)
    kv.free_request(r)


def test_equal_prefixes_share_blocks_and_unequal_ones_do_not() -> None:
    kv = KVManager(total_blocks=16, block_size=8, layout="t")
    a, b, c = request("a", list(range(20))), request("b", list(range(20))), request("c", [99, *range(1, 20)])
    assert kv.admit(a)
    a.num_computed = a.num_known
    kv.index_full_blocks(a)
    assert kv.admit(b) and b.num_cached == 16 and kv.block_table(b)[:2] == kv.block_table(a)[:2]
    assert kv.admit(c) and c.num_cached == 0
    kv.check_invariants()


def test_the_last_token_is_always_computed() -> None:
    kv = KVManager(16, 8, "t")
    a, b = request("a", list(range(16))), request("b", list(range(16)))
    kv.admit(a)
    finish(kv, a)
    assert kv.admit(b) and b.num_cached == 8


def test_tenants_never_share() -> None:
    kv = KVManager(16, 8, "t")
    a, b, c = request("a", list(range(20)), "x"), request("b", list(range(20)), "y"), request("c", list(range(20)), "x")
    kv.admit(a)
    finish(kv, a)
    assert kv.admit(b) and b.num_cached == 0
    assert kv.admit(c) and c.num_cached == 16


def test_idle_blocks_are_evicted_oldest_first_and_leaf_first() -> None:
    kv = KVManager(4, 8, "t")
    a, b = request("a", list(range(17))), request("b", [7] * 9)
    kv.admit(a)
    finish(kv, a)  # leaves two indexed blocks idle, one free
    assert (kv.num_free_blocks, kv.num_cached_blocks) == (2, 2)
    assert kv.admit(b)  # uses the two free blocks
    finish(kv, b)
    c = request(
        "c", [5] * 9
    )  # needs two: one free, then the oldest idle one; a's second block is evicted before its first
    assert kv.admit(c)
    kv.free_request(c)
    for name, tokens in (("a", list(range(17))), ("b", [7] * 9)):
        again = request(name, tokens)
        assert kv.admit(again) and again.num_cached == 8
        kv.free_request(again)
    kv.check_invariants()


def test_num_reclaimable_blocks() -> None:
    kv = KVManager(16, 8, "t")
    a, b = request("a", list(range(20))), request("b", list(range(20)))
    kv.admit(a)
    assert kv.num_reclaimable_blocks(a) == 3
    a.num_computed = a.num_known
    kv.index_full_blocks(a)
    kv.admit(b)
    assert kv.num_reclaimable_blocks(a) == kv.num_reclaimable_blocks(b) == 1


def test_request_without_pulls_computes_everything() -> None:
    a = request("a", list(range(20)))
    a.source = {"some": "ticket"}
    KVManager(16, 8, "t").keep_source_lease_alive(a)
    assert a.source is None


def test_failed_admission_changes_nothing() -> None:
    kv = KVManager(4, 8, "t")
    a, b = request("a", list(range(20))), request("b", list(range(30)))
    assert kv.admit(a)
    before = (kv.num_free_blocks, kv.num_cached_blocks, kv.queried_tokens)
    assert not kv.admit(b)
    assert (kv.num_free_blocks, kv.num_cached_blocks, kv.queried_tokens) == before
    kv.check_invariants()


def test_without_prefix_cache_only_choices_share() -> None:
    kv = KVManager(16, 8, "t", prefix_cache=False)
    a, b, sibling = request("a", list(range(20))), request("b", list(range(20))), request("a2", list(range(20)))
    sibling.submission_id = "a"
    a.params = sibling.params = SamplingParams(n=2)
    kv.admit(a)
    a.num_computed = a.num_known
    kv.index_full_blocks(a)
    assert kv.admit(b) and b.num_cached == 0
    assert kv.admit(sibling) and sibling.num_cached == 16
    finish(kv, b)
    assert (
        not b.block_hashes and kv.num_cached_blocks == 0
    )  # no other request can share its blocks, so they are not even hashed


def test_residency_samples() -> None:
    clock = ManualClock()
    kv = KVManager(2, 8, "t", clock=clock)
    first = request("first", list(range(9)))  # two blocks: one full, one partial
    assert kv.admit(first)
    clock.advance(2.0)
    first.num_computed = 9
    kv.index_full_blocks(first)
    kv.free_request(first)
    assert sorted(kv.residency.take_samples()) == [("lifetime", 2.0)]  # the partial one; the full one is idle
    clock.advance(3.0)
    again = request("again", list(range(9)))
    assert kv.admit(again) and again.num_cached == 8
    kv.free_request(again)
    assert sorted(kv.residency.take_samples()) == [("lifetime", 0.0), ("reuse_gap", 3.0)]
    clock.advance(4.0)
    other = request("other", list(range(500, 516)))
    assert kv.admit(other)
    assert sorted(kv.residency.take_samples()) == [("idle_before_evict", 4.0), ("lifetime", 9.0)]
