"""Rows that are sorted by expert for products with 4-bit codes: inputs are copied for some tiles at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from emberline.kernels.cuda import narrow_wide
from emberline.kernels.triton.routing import SortedRows

TILE_ROWS, TILES, USED, PER_ROW = 4, 8, 5, 2
FACTORS = (2.0, 3.0, 5.0)  # of experts


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the kernel by a product with an expert's factor, and return the numbers of rows that are copied."""
    counts: list[int] = []

    def describe(inputs: Tensor, w: object, out: Tensor, bias: object, clamp: object) -> SimpleNamespace:
        counts.append(len(inputs))
        return SimpleNamespace(out=out)

    def launch(problem: SimpleNamespace, x: Tensor, w: object, rows: SortedRows, plan: object, **options: Any) -> None:
        for tile in range(int(rows.num_tiles)):
            at = slice(tile * TILE_ROWS, tile * TILE_ROWS + int(rows.tile_counts[tile]))
            problem.out[at] = x[at] * FACTORS[int(rows.tile_experts[tile])]

    monkeypatch.setattr(narrow_wide, "describe_gate_up", describe)
    monkeypatch.setattr(narrow_wide, "_launch_sorted", launch)
    return counts


def sort_rows() -> SortedRows:
    """Return 7 rows with 2 experts each, whose 14 assignments fill 5 of 8 tiles in part."""
    counts = torch.tensor([4, 1, 4, 2, 3, 9, 9, 9], dtype=torch.int32)  # those of unused tiles mean nothing
    experts = torch.tensor([0, 0, 1, 1, 2, 7, 7, 7], dtype=torch.int32)
    order = torch.full((TILES * TILE_ROWS,), 1 << 20, dtype=torch.int32)
    order[list_places(counts)] = torch.arange(14, dtype=torch.int32).flip(0)
    chosen, used = torch.zeros(14, dtype=torch.int32), torch.tensor([USED], dtype=torch.int32)
    return SortedRows(torch.zeros(14), chosen, order, experts, counts, used, TILE_ROWS, PER_ROW)


def list_places(counts: Tensor) -> list[int]:
    return [TILE_ROWS * tile + row for tile in range(USED) for row in range(int(counts[tile]))]


def multiply(rows: SortedRows) -> Tensor:
    x = torch.arange(7 * 8, dtype=torch.float32).view(7, 8)
    weight: Any = SimpleNamespace(n=2 * 8)
    return narrow_wide.multiply_gate_up(x, weight, rows)[list_places(rows.tile_counts)]


def test_parts_of_tiles_give_the_same_results(copied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a part has no tile that is used."""
    rows = sort_rows()
    whole = multiply(rows)
    assert copied == [TILES * TILE_ROWS] and whole.unique().numel() > 14
    monkeypatch.setattr(narrow_wide, "MAX_COPIED_PLACES", 3 * TILE_ROWS + 1)
    assert torch.equal(multiply(rows), whole)
    assert copied[1:] == [12, 12, 8]
    assert int(rows.num_tiles) == USED
