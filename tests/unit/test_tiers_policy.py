"""Eviction policies compared with simple simulations of LRU and ARC."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.errors import InvalidRequest
from emberline.kv.tiers.policy import ARCPolicy, EvictionPolicy, LRUPolicy, make_eviction_policy


def use(policy: EvictionPolicy, capacity: int, key: bytes) -> bool:
    """Use a key as a cache does; return whether it was stored."""
    if key in policy:
        policy.record_use(key)
        return True
    if len(policy) >= capacity:
        assert policy.evict(key, lambda _: True) is not None
    policy.insert(key)
    return False


def simulate_lru(capacity: int, trace: list[bytes]) -> list[bool]:
    kept: list[bytes] = []
    hits = []
    for key in trace:
        hits.append(key in kept)
        kept = [*(k for k in kept if k != key), key][-capacity:]
    return hits


def simulate_arc(c: int, trace: list[bytes]) -> list[bool]:
    """Simulate the four cases of the paper on lists, in order of use."""
    t1: list[bytes] = []
    t2: list[bytes] = []
    b1: list[bytes] = []
    b2: list[bytes] = []
    p, hits = 0.0, []

    def replace(x: bytes) -> None:
        if t1 and (len(t1) > p or (x in b2 and len(t1) == p)):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    for x in trace:
        hits.append(x in t1 or x in t2)
        if x in t1 or x in t2:
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1:
            p = min(float(c), p + max(len(b2) / len(b1), 1.0))
            replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:
            p = max(0.0, p - max(len(b1) / len(b2), 1.0))
            replace(x)
            b2.remove(x)
            t2.append(x)
        else:
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.pop(0)
                    replace(x)
                else:
                    t1.pop(0)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.pop(0)
                replace(x)
            t1.append(x)
    return hits


TRACE = st.lists(st.integers(0, 14).map(lambda i: bytes([i])), max_size=300)


@settings(max_examples=300, deadline=None)
@given(capacity=st.integers(1, 8), trace=TRACE)
def test_hits_equal_a_simulation(capacity: int, trace: list[bytes]) -> None:
    lru, arc = LRUPolicy(), ARCPolicy(capacity)
    assert [use(lru, capacity, key) for key in trace] == simulate_lru(capacity, trace)
    assert [use(arc, capacity, key) for key in trace] == simulate_arc(capacity, trace)


def test_scan_evicts_lru_but_not_arc() -> None:
    often = [bytes([i]) for i in range(4)]
    scan = [bytes([1, i]) for i in range(100)]
    lru, arc = LRUPolicy(), ARCPolicy(8)
    for policy in (lru, arc):
        for key in [*often, *often, *scan]:
            use(policy, 8, key)
    assert not any(key in lru for key in often)
    assert all(key in arc for key in often)


@pytest.mark.parametrize("name", ["lru", "arc"])
@settings(max_examples=100, deadline=None)
@given(
    actions=st.lists(st.tuples(st.sampled_from(["use", "pin", "remove"]), st.integers(0, 9)), max_size=80),
    capacity=st.integers(1, 5),
)
def test_unevictable_blocks_stay(name: str, actions: list[tuple[str, int]], capacity: int) -> None:
    policy, pinned, kept = make_eviction_policy(name, capacity), set[bytes](), set[bytes]()

    def may(key: bytes) -> bool:
        return key not in pinned

    for action, number in actions:
        key = bytes([number])
        if action == "pin" and key in kept:
            pinned.symmetric_difference_update({key})
        elif action == "remove" and key in kept - pinned:
            policy.remove(key)
            kept.remove(key)
        elif action == "use" and key in kept:
            policy.record_use(key)
        elif action == "use":
            left = policy.evict(key, may) if len(kept) == capacity else None
            assert left is None or left in kept - pinned
            kept.discard(left or b"")
            assert left is not None or len(kept) < capacity or kept == pinned
            if len(kept) < capacity:
                policy.insert(key)
                kept.add(key)
        assert set(policy) == kept and len(policy) == len(kept)


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="lru or arc"):
        make_eviction_policy("mru", 3)
