"""The tiles of a rank that has some of the experts: those of its experts, renumbered, and nothing else is added."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from emberline.kernels.triton.routing import SortedRows, clear_other_outputs, select_local_tiles

TILE_ROWS, EXPERTS, UNUSED = 4, 6, 7


def sort_rows(chosen: list[int]) -> SortedRows:
    """Sort assignments into tiles; three more tiles are not used, and have numbers of no meaning."""
    tiles: list[tuple[int, list[int]]] = []
    for expert in range(EXPERTS):
        own = [at for at, found in enumerate(chosen) if found == expert]
        tiles += [(expert, own[at : at + TILE_ROWS]) for at in range(0, len(own), TILE_ROWS)]
    order = [place for _, own in tiles for place in (own + [UNUSED] * TILE_ROWS)[:TILE_ROWS]]
    return SortedRows(
        weights=torch.ones(len(chosen)),
        chosen=torch.tensor(chosen, dtype=torch.int32),
        order=torch.tensor(order + [10**6] * 3 * TILE_ROWS, dtype=torch.int32),
        tile_experts=torch.tensor([expert for expert, _ in tiles] + [1, -5, 900], dtype=torch.int32),
        tile_counts=torch.tensor([len(own) for _, own in tiles] + [TILE_ROWS] * 3, dtype=torch.int32),
        num_tiles=torch.tensor([len(tiles)], dtype=torch.int32),
        tile_rows=TILE_ROWS,
        experts_per_row=2,
    )


@pytest.mark.parametrize("own", [range(3), range(3, 6), range(2, 4), range(5, 6), range(6)])
def test_own_tiles(own: range) -> None:
    chosen = [3, 0, 1, 3, 3, 0, 5, 3, 3, 4, 1, 3]  # nobody chose 2
    found = select_local_tiles(rows := sort_rows(chosen), own)
    assert len(found.tile_experts) == rows.max_tiles and bool((found.tile_experts < len(own)).all())
    tiles, order = int(found.num_tiles), found.order.view(-1, TILE_ROWS)
    listed = [
        (int(found.tile_experts[tile]) + own.start, order[tile, : int(found.tile_counts[tile])].tolist())
        for tile in range(tiles)
    ]
    expected = [(expert, at) for expert in own for at in range(len(chosen)) if chosen[at] == expert]
    assert [(expert, at) for expert, places in listed for at in places] == expected
    outputs = clear_other_outputs(torch.full((len(chosen), 3), torch.nan), rows, own)
    assert outputs.isnan().all(1).tolist() == [expert in own for expert in chosen]
    assert clear_other_outputs(outputs, rows, None) is outputs
