"""The parts of all ranks cover every whole KV block and every page of recurrent states, each byte saved once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from emberline.kv.block_shard import BlockShard, StateShard, rank_state_layers
from emberline.kv.cache import StateShape
from emberline.kv.layer_groups import LayerGroups
from emberline.models.shard import Shard

HEAD_BYTES = 6


@st.composite
def divided_layers(draw: st.DrawFn) -> tuple[LayerGroups, list[range]]:
    """Return groups of layers with or without windows or states, and the layers of each stage."""
    count = draw(st.integers(1, 12))
    kinds = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    if draw(st.booleans()):
        groups = LayerGroups.for_windows([8 * kind for kind in kinds])
    else:
        groups = LayerGroups.with_states(count, [layer for layer, kind in enumerate(kinds) if kind])
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=3))) if count > 1 else []
    return groups, [range(begin, end) for begin, end in zip([0, *cuts], [*cuts, count], strict=True)]


def numbered(*dims: int) -> NDArray[np.uint8]:
    return np.random.default_rng(3).integers(1, 255, dims, dtype=np.uint8)


@settings(deadline=None)
@given(divided_layers(), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(1, 2))
def test_blocks(
    divided: tuple[LayerGroups, list[range]], each: int, factor: int, replicated: bool, num_parts: int
) -> None:
    groups, stages = divided
    kv_heads, tp = (each, each * factor) if replicated else (each * factor, factor)
    for group in range(len(groups.windows)):
        whole = numbered(num_parts, groups.block_layers, kv_heads, HEAD_BYTES)
        saved, times = np.zeros_like(whole), np.zeros_like(whole)
        for layers in stages:
            own_groups = groups.of_layers(layers)
            for rank in range(tp):
                heads = Shard(rank, tp).divide(kv_heads)
                part = BlockShard.of_rank(groups, layers, heads, is_first=Shard(rank, tp).is_first_of(kv_heads))
                own = np.zeros((num_parts, own_groups.block_layers, len(heads), HEAD_BYTES), np.uint8)
                count = len(part.layers[group])
                own[:, :count] = part.slice_block(whole, group)
                for layer, place in zip(layers, own_groups.layer_positions, strict=True):
                    if place[0] == group:
                        assert groups.layer_positions[layer] == (group, part.layers[group][place[1]])
                        expected = whole[:, groups.layer_positions[layer][1], heads.start : heads.stop]
                        assert (own[:, place[1]] == expected).all()
                if part.is_first:
                    part.slice_block(saved, group)[:] = own[:, :count]
                    part.slice_block(times, group)[:] += 1
        exists = np.array([(group, index) in groups.layer_positions for index in range(groups.block_layers)], bool)
        assert (saved[:, exists] == whole[:, exists]).all() and not saved[:, ~exists].any()
        assert (times[:, exists] == 1).all()


@settings(deadline=None)
@given(divided_layers(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 60))
def test_states(divided: tuple[LayerGroups, list[range]], tp: int, keys: int, per_key: int, page_numbers: int) -> None:
    groups, stages = divided
    num_layers = len(rank_state_layers(groups, range(len(groups.layer_positions))))
    key_heads, heads = keys * tp, keys * per_key * tp
    shape = StateShape(num_layers, 2, 2 * key_heads * 3 + heads * 2, heads, 3, 2)
    conv = numbered(num_layers, 2, shape.conv_channels, 4)
    matrices = numbered(num_layers, heads, 3, 2, 4)
    slot, page_bytes = np.concatenate([conv.ravel(), matrices.ravel()]), page_numbers * 4
    assert slot.nbytes == shape.slot_bytes
    saved = np.zeros_like(slot)
    for layers in stages:
        own = rank_state_layers(groups, layers)
        at = slice(own.start, own.stop)
        for rank in range(tp):
            sections = np.split(conv[at], [key_heads * 3, 2 * key_heads * 3], axis=2)
            own_conv = np.concatenate([np.split(each, tp, axis=2)[rank] for each in sections], axis=2)
            tensors = [own_conv.ravel(), np.split(matrices[at], tp, axis=1)[rank].ravel()]
            part = StateShard.of_rank(shape, own, rank, tp)
            for page in range(-(-slot.size // page_bytes)):
                for tensor, own_bytes, place in part.iter_page_pieces(page, page_bytes):
                    target = saved[page * page_bytes :][place]
                    assert not target.any(), "two ranks save the same bytes"
                    target[:] = tensors[tensor][own_bytes]
    assert (saved == slot).all()
