"""Decides which ranks keep which experts, by how many rows select each expert (its load).

Experts are divided among groups of ranks. Each group has slots, one for each expert that it can keep. With more slots
than experts, experts with much load get copies in several groups, among which their rows are divided. This module does
not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence

EMPTY_SLOT = -1  # a slot without an expert
MOVE_TOLERANCE = 0.1  # share by which the largest load may be above the lowest found, for fewer moves

Placement = tuple[tuple[int, ...], ...]  # by group: the expert in each of its slots, or EMPTY_SLOT


def place_in_order(experts: int, groups: int, slots: int) -> Placement:
    """Return the placement for unknown loads: each group has consecutive experts, then empty slots."""
    each = experts // groups
    empty = (EMPTY_SLOT,) * (slots - each)
    return tuple((*range(group * each, (group + 1) * each), *empty) for group in range(groups))


def list_slots(placement: Placement, experts: int) -> list[list[int]]:
    """Return the slots of each expert. Slots are numbered through all groups, in the order of the groups."""
    slots: list[list[int]] = [[] for _ in range(experts)]
    for slot, expert in enumerate(expert for group in placement for expert in group):
        if expert != EMPTY_SLOT:
            slots[expert].append(slot)
    return slots


def group_loads(loads: Sequence[float], placement: Placement) -> list[float]:
    """Return the load of each group. An expert's load is divided evenly among its copies."""
    copies = [0] * len(loads)
    for slots in placement:
        for expert in slots:
            if expert != EMPTY_SLOT:
                copies[expert] += 1
    return [sum(loads[expert] / copies[expert] for expert in slots if expert != EMPTY_SLOT) for slots in placement]


def place_experts(loads: Sequence[float], current: Placement) -> Placement:
    """Return a placement, with as many groups and slots as `current`, that keeps the largest load of a group small.

    `loads`: of each expert. The largest load is never above that of `current`, nor above that of `place_in_order`. Of
    placements with nearly the same largest load, the one with the fewest moves from `current` is returned. Experts that
    stay in their group keep their slot."""
    groups, slots = len(current), len(current[0])
    in_order = place_in_order(len(loads), groups, slots)
    packed = _pack(loads, _count_copies(loads, groups, slots), groups, slots)
    candidates = [
        current,
        _add_copies(loads, current),
        *(keep_expert_slots(current, each) for each in (packed, in_order)),
    ]
    largest = [max(group_loads(loads, each)) for each in candidates]
    limit = min(min(largest) * (1 + MOVE_TOLERANCE), largest[0], largest[-1])
    good = [each for each, load in zip(candidates, largest, strict=True) if load <= limit]
    return min(good, key=lambda each: len(list_moved_experts(current, each)))


def list_moved_experts(before: Placement, after: Placement) -> list[tuple[int, int]]:
    """Return (group, expert) for each expert that a group has in `after` but not in `before`."""
    return [
        (group, expert)
        for group, (old, new) in enumerate(zip(before, after, strict=True))
        for expert in set(new) - set(old) - {EMPTY_SLOT}
    ]


def _add_copies(loads: Sequence[float], current: Placement) -> Placement:
    """Return the current placement without its copies, and with new ones in the empty slots.

    A copy moves load from the group with the most load to one with little. Copies are added as long as they lower the
    largest load."""
    seen: set[int] = set()
    placed: list[list[int]] = []
    for slots in current:
        placed.append([EMPTY_SLOT if expert in seen else expert for expert in slots])
        seen |= set(slots)
    while (copy := _find_copy(loads, placed)) is not None:
        expert, group = copy
        placed[group][placed[group].index(EMPTY_SLOT)] = expert
    return tuple(map(tuple, placed))


def _find_copy(loads: Sequence[float], placed: list[list[int]]) -> tuple[int, int] | None:
    """Return an expert to copy and the group that gets the copy, to lower the largest load of a group.

    The expert is in the group with the most load. It is the one with the most load of which a copy helps. The copy goes
    to the group with the least load of those that have an empty slot and not this expert. None: no copy lowers the
    largest load."""
    totals = group_loads(loads, tuple(map(tuple, placed)))
    hot = max(range(len(placed)), key=totals.__getitem__)
    for expert in sorted(set(placed[hot]) - {EMPTY_SLOT}, key=lambda e: (-loads[e], e)):
        free = [g for g, slots in enumerate(placed) if EMPTY_SLOT in slots and expert not in slots]
        if free:
            group = min(free, key=totals.__getitem__)
            trial = tuple((*slots, expert) if number == group else tuple(slots) for number, slots in enumerate(placed))
            if max(group_loads(loads, trial)) < totals[hot]:
                return expert, group
    return None


def _count_copies(loads: Sequence[float], groups: int, slots: int) -> list[int]:
    """Return the number of copies of each expert. Each spare slot goes to the expert with the most load per copy."""
    copies = [1] * len(loads)
    for _ in range(groups * slots - len(loads)):
        expert = max(range(len(loads)), key=lambda e: (copies[e] < groups, loads[e] / copies[e], -e))
        if copies[expert] == groups or not loads[expert]:
            break
        copies[expert] += 1
    return copies


def _pack(loads: Sequence[float], copies: Sequence[int], groups: int, slots: int) -> Placement:
    """Return a placement. Copies with the most load come first, each in the group with room and the least load."""
    placed: list[list[int]] = [[] for _ in range(groups)]
    totals = [0.0] * groups
    items = sorted(((loads[e] / n, e) for e, n in enumerate(copies) for _ in range(n)), key=lambda i: (-i[0], i[1]))
    for load, expert in items:
        free = [g for g in range(groups) if len(placed[g]) < slots and expert not in placed[g]]
        if not free:
            continue  # all groups with room have a copy of it
        group = min(free, key=lambda g: (totals[g], g))
        placed[group].append(expert)
        totals[group] += load
    return tuple((*each, *[EMPTY_SLOT] * (slots - len(each))) for each in placed)


def keep_expert_slots(current: Placement, target: Placement) -> Placement:
    """Return `target` with its groups and slots in another order, so that many experts stay where they are.

    Groups are interchangeable: each group of `target` gets the number of a current group with many of its experts."""
    common = [
        (-len(set(old) & set(new) - {EMPTY_SLOT}), i, j)
        for i, old in enumerate(current)
        for j, new in enumerate(target)
    ]
    chosen: dict[int, int] = {}
    for _, old, new in sorted(common):
        if old not in chosen and new not in chosen.values():
            chosen[old] = new
    return tuple(_keep_slots(old, target[chosen[group]]) for group, old in enumerate(current))


def _keep_slots(current: Sequence[int], target: Sequence[int]) -> tuple[int, ...]:
    wanted = set(target) - {EMPTY_SLOT}
    kept = [expert if expert in wanted else EMPTY_SLOT for expert in current]
    new = iter(sorted(wanted - set(kept)))
    return tuple(next(new, EMPTY_SLOT) if expert == EMPTY_SLOT else expert for expert in kept)
