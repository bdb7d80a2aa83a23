"""HostTier: no buffer is lost, and no buffer changes while it is read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_blocks import BLOCK_BYTES, BUFFER_BYTES, block, buffer, content, digest

from emberline.core.errors import InvalidRequest
from emberline.kv.tiers.host import HostTier


def tier(blocks: int = 3, policy: str = "lru") -> HostTier:
    return HostTier(BLOCK_BYTES, blocks * BUFFER_BYTES, policy)


def test_only_leading_blocks_count() -> None:
    host, names = tier(), [digest(i) for i in range(4)]
    host.store([names[0], names[1], names[3]], [block(names[i]) for i in (0, 1, 3)])
    into = [buffer() for _ in names]
    assert host.lookup(names) == 2 and host.lookup(names[2:]) == 0 and host.lookup([]) == 0
    assert host.load(names, into) == 2
    assert [bytes(b) for b in into[:2]] == [content(n) for n in names[:2]]


def test_block_being_filled_is_not_found() -> None:
    host, name = tier(), digest(1)
    room = host.reserve_buffer(name)
    assert room is not None and name in host and host.lookup([name]) == 0 and host.pin_block(name) is None
    assert host.reserve_buffer(name) is None, "the block is being filled"
    host.release_reserved_buffer(name)
    assert name not in host and host.reserve_buffer(name) is not None
    host.publish_buffer(name)
    assert host.lookup([name]) == 1
    host.check_invariants()


def test_pinned_blocks_are_not_evicted() -> None:
    host, names = tier(2), [digest(i) for i in range(4)]
    host.store(names[:2], [block(n) for n in names[:2]])
    read = host.pin_block(names[0])
    assert read is not None
    host.discard(names[:1])
    assert host.store(names[2:3], [block(names[2])]) == 1 and host.lookup([names[1]]) == 0
    assert host.pin_block(names[2]) is not None
    assert host.reserve_buffer(names[3]) is None, "all blocks are pinned"
    assert bytes(read) == content(names[0])
    host.unpin_block(names[0])
    assert host.reserve_buffer(names[3]) is not None and host.lookup([names[0]]) == 0
    host.check_invariants()


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least 2"):
        tier(1)


ACTIONS = ["reserve", "publish", "abandon", "pin", "unpin", "forget"]


@settings(max_examples=150, deadline=None)
@given(
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 6)), max_size=120),
    policy=st.sampled_from(["lru", "arc"]),
)
def test_content_is_right_for_any_operations(actions: list[tuple[str, int]], policy: str) -> None:
    host = tier(3, policy)
    filling: dict[bytes, memoryview] = {}
    pinned: dict[bytes, list[memoryview]] = {}
    for action, number in actions:
        name = digest(number)
        if action == "reserve" and (room := host.reserve_buffer(name)) is not None:
            assert name not in filling
            filling[name] = room
        elif action == "publish" and name in filling:
            filling.pop(name)[:] = content(name)
            host.publish_buffer(name)
        elif action == "abandon" and name in filling:
            filling.pop(name)
            host.release_reserved_buffer(name)
        elif action == "pin" and (read := host.pin_block(name)) is not None:
            pinned.setdefault(name, []).append(read)
        elif action == "unpin" and pinned.get(name):
            pinned[name].pop()
            host.unpin_block(name)
        elif action == "forget":
            host.discard([name])
        host.check_invariants()
        assert all(bytes(read) == content(n) for n, reads in pinned.items() for read in reads)
    assert host.num_pinned == len(filling) + sum(bool(reads) for reads in pinned.values())
