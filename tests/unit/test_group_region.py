"""GroupRegion: the parts of several ranks are read and written as whole blocks."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from transfer_helpers import blank, content, fill, small

from emberline.kv.block_shard import BlockShard
from emberline.kv.layer_groups import LayerGroups
from emberline.kv.transfer import group_region
from emberline.kv.transfer.errors import TransferTimeout
from emberline.kv.transfer.group_region import GroupRegion, StepCounter
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.region import HostRegion, Region, StagingBuffer, copy_piece

HEADS = 4
BLOCKS = 10


def divide(layout: KVLayout, groups: LayerGroups, stages: list[range], tp: int, steps: StepCounter) -> GroupRegion:
    """Return a region of `tp` ranks for each stage. If `tp` is above the number of heads, ranks have copies."""
    parts: list[tuple[BlockShard, HostRegion]] = []
    each, copies = max(1, HEADS // tp), max(1, tp // HEADS)
    for layers in stages:
        for rank in range(tp):
            heads = range(rank // copies * each, rank // copies * each + each)
            part = BlockShard.of_rank(groups, layers, heads, is_first=rank % copies == 0)
            own = replace(layout, layers=groups.of_layers(layers).block_layers, heads=each)
            parts.append((part, blank(own, BLOCKS)))
    return GroupRegion(layout, parts, steps)


def copy_all(source: Region, target: Region, blocks: list[int], target_blocks: list[int]) -> None:
    """Copy blocks in pieces of one layer and of several, as transfers do."""
    ids, into = np.array(blocks), np.array(target_blocks)
    middle = len(blocks) // 2
    for layers in (range(1), range(1, source.layout.layers)):
        for first, end in ((0, middle), (middle, len(blocks))):
            copy_piece(TransferPiece(layers.start, layers.stop, first, end), source, ids, target, into, StagingBuffer())


@pytest.mark.parametrize("parts,turned", [(2, 2), (2, 0), (1, 2)])
@pytest.mark.parametrize("tp,stages", [(2, 1), (1, 3), (4, 2), (8, 1), (8, 3)])
@pytest.mark.parametrize("own_tokens", [8, 4, 16])
def test_blocks_are_the_same_after_they_were_divided(
    parts: int, turned: int, tp: int, stages: int, own_tokens: int
) -> None:
    """A block of a cache with other blocks goes to ranks, from there to other ranks, and back."""
    whole = small(8, layers=3, heads=HEADS, width=6, parts=parts, turned=turned)
    groups, steps = LayerGroups.single(3), StepCounter()
    cuts = [0, 1, 3] if stages == 2 else list(range(0, 4, 3 // stages))
    layers = [range(a, b) for a, b in pairwise(cuts)]
    source, back = blank(whole, BLOCKS), blank(whole, BLOCKS)
    own = replace(whole, tokens=own_tokens)
    divided, other = divide(own, groups, layers, tp, steps), divide(own, groups, [range(3)], 2, steps)
    expected = fill(source, [4, 0, 3, 5], seed=1)
    own_blocks = [5, 2, 0, 4, 1, 3, 7, 9][: 32 // own_tokens]
    copy_all(source, divided, [4, 0, 3, 5], own_blocks)
    copy_all(divided, other, own_blocks, own_blocks[::-1])
    copy_all(other, back, own_blocks[::-1], [0, 1, 2, 3])
    assert content(back, [0, 1, 2, 3]) == expected


def test_the_place_of_a_layer_depends_on_the_group_of_the_block() -> None:
    groups = LayerGroups.for_windows([5, 0, 5, 5, 0, 5])
    assert len(groups.windows) == 3 and groups.block_layers == 2
    whole = small(8, layers=2, heads=HEADS, width=6, groups=groups.name)
    source, back = blank(whole, BLOCKS), blank(whole, BLOCKS)
    divided = divide(whole, groups, [range(2), range(2, 6)], 2, StepCounter())
    expected = fill(source, [0, 1, 2, 3, 4], seed=2)
    for block, group in enumerate([0, 1, 1, 2, 0]):
        divided.bump_generation(block, group)
    copy_all(source, divided, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    copy_all(divided, back, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    assert content(back, [0, 1, 2, 3, 4]) == expected
    assert divided.current_generations(np.arange(6)).tolist() == [1, 1, 1, 1, 1, 0]


def test_writes_wait_for_steps_that_have_started(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, steps = small(8, layers=3, heads=HEADS), StepCounter()
    region = divide(whole, LayerGroups.single(3), [range(3)], 2, steps)
    source = blank(whole, BLOCKS)
    fill(source, [0], seed=3)
    steps.start_step()
    steps.start_step()
    region.wait_for_started_work()
    steps.start_step()  # began later, so it cannot access what the next `scatter` writes
    steps.finish_step()
    writer = threading.Thread(target=copy_all, args=(source, region, [0, 0], [1, 2]))
    writer.start()
    writer.join(0.05)
    assert writer.is_alive()
    steps.finish_step()
    writer.join(10)
    assert not writer.is_alive()
    region.wait_for_started_work()
    monkeypatch.setattr(group_region, "STEP_TIMEOUT_S", 0.01)
    with pytest.raises(TransferTimeout, match="cannot be written"):
        copy_all(source, region, [0, 0], [1, 2])
    monkeypatch.undo()
    steps.close()  # the ranks have ended
    with pytest.raises(TransferTimeout, match="the ranks have ended"):
        copy_all(source, region, [0, 0], [1, 2])
