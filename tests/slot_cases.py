"""What kernels for experts that may move between ranks must do, on any device."""

from __future__ import annotations

from dataclasses import replace

import torch
from expert_cases import ROUTINGS
from torch import Tensor
from triton_cases import random

from emberline.kernels.cuda.expert_layer import ExpertLayer
from emberline.kernels.exact_sums import round_term
from emberline.kernels.expert_slots import ExpertSlots
from emberline.kernels.mixture import Mixture, Routing, StackedExperts, select_experts
from emberline.kernels.packed_weight import PackedWeight, WeightLayout
from emberline.kernels.reference import ReferenceBackend
from emberline.kernels.triton.exact_sums import sum_exactly
from emberline.kernels.triton.slotted_rows import select_slots
from emberline.models.expert_placement import EMPTY_SLOT, Placement, list_slots, place_in_order

EXPERTS, GROUPS, PLACES = 6, 2, 5
PLACEMENTS: tuple[Placement, ...] = (
    place_in_order(EXPERTS, GROUPS, PLACES),
    ((5, 1, EMPTY_SLOT, 3, 0), (0, 4, 5, 2, 3)),
    ((0, 1, 2, 3, 4), (3, 4, 5, 0, EMPTY_SLOT)),
)


def check_selected_slots(device: str, name: str, rows: int, tile_rows: int, *, pdl: bool = False) -> None:
    """Check slots, weights and tiles of each rank: every pair of a row and an expert is in a tile of one rank."""
    case = ROUTINGS[name]
    rules, logits = case.make(device), random(rows, case.experts, device=device) * 3
    experts = list(range(case.experts))
    own = [experts[: case.experts // 2], experts[case.experts // 2 :]]
    places = len(own[1]) + 2
    spare: Placement = tuple(
        (*each, *[EMPTY_SLOT] * (places - len(each) - 1), other[0]) for each, other in zip(own, own[::-1], strict=True)
    )
    found: list[tuple[int, int]] = []
    for group in range(2):
        slots = ExpertSlots(case.experts, 2, places, torch.device(device), group)
        slots.assign(list_slots(spare, case.experts))
        selected = select_slots(logits, rules, slots, pdl=pdl)
        weights, chosen = select_experts(
            logits.cpu(), replace(rules, correction=None if rules.correction is None else rules.correction.cpu())
        )
        torch.testing.assert_close(selected.weights.cpu().view(rows, -1), weights, rtol=1e-5, atol=1e-7)
        wanted = slots.choose(chosen.to(device)).cpu()
        assert torch.equal(selected.slots.cpu(), wanted) and len({*wanted[:, 0].tolist()}) > 1 - (rows == 1)
        tiles = selected.sort(logits, rules, tile_rows, pdl=pdl)
        assert torch.equal(tiles.weights, selected.weights) and torch.equal(
            tiles.chosen.long(), selected.slots.flatten()
        )
        order = tiles.order.cpu().view(-1, tile_rows)
        for tile in range(int(tiles.num_tiles)):
            slot = int(tiles.tile_experts[tile]) + slots.local_slots.start
            found += [(slot, at) for at in order[tile, : int(tiles.tile_counts[tile])].tolist()]
    assert sorted(found) == sorted((slot, at) for at, slot in enumerate(wanted.flatten().tolist()))


def check_exact_sums(device: str, dtype: torch.dtype, *, pdl: bool = False) -> None:
    """Check that terms in any order have the same sums, which are those of `round_term`."""
    rows, terms, columns = 3, 5, 70
    scales = 10.0 ** torch.randint(-12, 5, (rows * terms, columns), device=device)
    outputs, shared = (
        (random(rows * terms, columns, device=device) * scales).to(dtype),
        random(rows, columns, device=device, dtype=dtype),
    )
    found = sum_exactly(outputs, terms, shared=shared, pdl=pdl)
    exact = round_term(outputs).view(rows, terms, columns).sum(1) + round_term(shared)
    assert found.dtype is torch.float64 and torch.equal(found, exact)
    other = outputs.view(rows, terms, columns).flip(1).reshape(-1, columns)
    assert torch.equal(sum_exactly(other, terms, shared=shared, pdl=pdl), found)
    assert torch.equal(sum_exactly(outputs, terms, pdl=pdl) + round_term(shared), found)


def check_own_sums(device: str, dtype: torch.dtype, rows: int, sizes: tuple[int, int], layer: ExpertLayer) -> None:
    """Check the sums of both groups of ranks: they are those of the reference, with the same bits in all placements."""
    hidden, width = sizes
    generator = torch.Generator().manual_seed(rows)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weights = [make(EXPERTS, 2 * width, hidden).div(8), make(EXPERTS, hidden, width).div(8)]
    gate_up, down = (each.to(dtype).to(device) for each in weights)
    data = (make(EXPERTS, hidden) / 4).to(dtype).to(device)
    router = PackedWeight(data, EXPERTS, hidden, dtype, WeightLayout.ROWS, ptr=data.data_ptr())
    rules = Routing(2, renormalize=True)
    x = make(rows, hidden).to(dtype).to(device)
    totals = []
    for placement in PLACEMENTS:
        total = torch.zeros(rows, hidden, dtype=torch.float64)
        for group in range(GROUPS):
            slots = ExpertSlots(EXPERTS, GROUPS, PLACES, torch.device(device), group)
            slots.assign(list_slots(placement, EXPERTS))
            experts = StackedExperts(
                *(
                    torch.stack([each[max(0, e)] * (1 if e != EMPTY_SLOT else torch.nan) for e in placement[group]])
                    for each in (gate_up, down)
                )
            )
            mixture = Mixture(torch.ones(hidden, device=device), 1e-6, router, experts, rules, slots=slots)
            found = layer.sum_local(x, mixture)
            total += found.sums.cpu()
            assert found.slots.shape == (rows, 2)
        totals.append(total)
    assert all(torch.equal(each, totals[0]) for each in totals)
    whole = Mixture(
        torch.ones(hidden), 1e-6, PackedWeight(data.float().cpu(), EXPERTS, hidden, torch.float32),
        StackedExperts(gate_up.cpu(), down.cpu()), rules,
    )  # fmt: skip
    expected = ReferenceBackend().run_mixture(x.float().cpu(), whole, torch.zeros(rows, hidden))
    # With logits that are nearly equal, rounding decides which experts a row selects.
    normed = torch.nn.functional.rms_norm(x.float().cpu(), (hidden,), eps=1e-6)
    best = (normed @ data.float().cpu().T).topk(3).values
    clear = best[:, 1] - best[:, 2] > 0.05
    assert clear.float().mean() > 0.9
    atol = 0.03 * float(expected.abs().max())
    assert torch.allclose(totals[0].float()[clear], expected[clear], atol=atol)
