"""Engines of the GPU runner whose experts move between ranks: tokens stay the same, and the load evens out.

Here the ranks are threads, and the CPU is their device; see also tests/gpu/test_rank_hot_experts_on_gpu.py."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_rank_engines import DeviceThreadRanks, load_host_rank_model, make_device_thread_engine
from hot_experts import choose_hot_experts, move_all, watch_moves
from test_device_rank_engine import build_config, submissions
from test_dp_attention import run_with_scores

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EngineFailed
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine import memory
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.ranks.control import RankReady
from emberline.engine.ranks.device_boot import check_same_forms
from emberline.engine.ranks.device_experts import describe_expert_forms, list_transfers, move_weights
from emberline.engine.ranks.device_leader import DeviceLeaderRunner
from emberline.engine.ranks.expert_moves import ExpertMoves
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.leader_experts import LeaderExperts
from emberline.kernels.comm.lone_rank import LoneRank
from emberline.kernels.comm.thread_group import ThreadGroup
from emberline.kernels.cuda.narrow_layout import pack, use_common_factor
from emberline.kernels.expert_slots import ExpertSlots
from emberline.kernels.mixture import StackedExperts
from emberline.kernels.quantised_matrix import QuantisedMatrix
from emberline.kernels.reference import ReferenceBackend
from emberline.models.expert_placement import EMPTY_SLOT, Placement, list_slots
from emberline.models.movable_experts import MovableExperts, read_row_counts

DP2_EP2: dict[str, Any] = {"tp": 2, "ep": 2, "dp_attention": True, "redundant_experts": 1}
DP4_EP2 = DP2_EP2 | {"tp": 4}


@pytest.fixture(autouse=True)
def moves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_moves(monkeypatch.setattr)


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let experts compute each row by itself. Products of torch round differently with the number of rows, and those of
    a GPU do not."""
    run = ReferenceBackend.run_experts

    def run_each(self: ReferenceBackend, x: torch.Tensor, experts: torch.Tensor, mixture: Any) -> torch.Tensor:
        rows = [run(self, x[i : i + 1], experts[i : i + 1], mixture) for i in range(len(x))]
        return torch.cat(rows) if rows else x

    monkeypatch.setattr(ReferenceBackend, "run_experts", run_each)


def make_engine(config: EngineConfig, layout: dict[str, Any]) -> tuple[Engine, DeviceLeaderRunner]:
    engine = make_device_thread_engine(config.with_settings(**layout))
    assert isinstance(engine.runner, DeviceLeaderRunner)
    return engine, engine.runner


Scores = dict[str, tuple[list[int], list[float]]]  # tokens and log-probabilities by choice


def run_on_one_rank(config: EngineConfig, pending: list[Submission]) -> dict[str, list[int]]:
    one = config.with_settings(device="cpu", threads=1)
    return select_tokens(run_with_scores(boot(one).engine, pending))


def select_tokens(found: Scores) -> dict[str, list[int]]:
    return {key: tokens for key, (tokens, _) in found.items()}


def plain_submissions() -> list[Submission]:
    """Return requests whose prompts are computed in chunks."""
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=0)
    return [Submission(f"r{i}", [3 + (7 * i + j) % 90 for j in range(n)], params) for i, n in enumerate((3, 21, 30))]


@pytest.mark.parametrize(
    ("name", "layout", "graphs"),
    [("deepseek_v3", DP2_EP2, True), ("gpt-oss", DP4_EP2, True), ("qwen3-moe", DP2_EP2, False)],
)
def test_moves_do_not_change_bits(
    name: str, layout: dict[str, Any], graphs: bool, row_by_row: None, tmp_path: Path
) -> None:
    """Experts have shared ones beside them, are divided by columns and have biases, or have tensors of their own."""
    config = build_config(tmp_path, name, graphs=graphs, prefix_cache=False)
    expected = run_on_one_rank(config, plain_submissions())
    engine, runner = make_engine(config, layout)
    with closing(engine):
        before = run_with_scores(engine, plain_submissions(), closes=False)
        assert select_tokens(before) == expected
        move_all(engine, runner, [90, 1, 0, 1])
        copies = [each.movable.slots.copies.tolist() for each in runner.model.movable_layers.values() if each.movable]
        assert copies == [[2, 1, 1, 1]] * len(copies) and copies
        assert run_with_scores(engine, plain_submissions(), closes=False) == before
        move_all(engine, runner, [0, 0, 90, 80])  # all experts of the second group
        found = [each.movable.slots.copies.tolist() for each in runner.model.movable_layers.values() if each.movable]
        assert found != copies
        assert run_with_scores(engine, plain_submissions(), closes=False) == before
        stats = engine.stats().experts
        assert stats is not None and stats.moved >= 2 * len(copies)


@pytest.mark.parametrize("graphs", [True, False])
def test_hot_experts_get_copies(graphs: bool, tmp_path: Path) -> None:
    """All rows select the experts of one group of ranks. Afterwards each group computes half of them. The last layer,
    which is the only one with experts, computes only the rows whose logits are needed."""
    config = build_config(tmp_path, "deepseek_v3", prefix_cache=False, graphs=graphs)
    choose_hot_experts(tmp_path)
    expected = run_on_one_rank(config, submissions())
    engine, runner = make_engine(config, DP2_EP2)
    with closing(engine):
        assert select_tokens(run_with_scores(engine, submissions(), closes=False)) == expected
        stats = engine.stats().experts
        assert stats is not None and stats.imbalance == 2.0 and stats.rows[1] == 0 and stats.moved == 0
        move_all(engine, runner)
        assert select_tokens(run_with_scores(engine, submissions(), closes=False)) == expected
        stats = engine.stats().experts
        assert stats is not None and stats.imbalance < 1.25 and stats.moved > 0


def test_only_rows_of_requests_are_counted(tmp_path: Path) -> None:
    """Captured steps have padding, and those that are captured ahead nothing else."""
    engine, runner = make_engine(build_config(tmp_path, "qwen3-moe"), DP2_EP2)
    with closing(engine):
        runner.run_uncaptured_once()
        while super(DeviceLeaderRunner, runner).is_preparing:
            runner.prepare_next()
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        run_with_scores(engine, [Submission("r", [7, 8, 9] * 7, params)], closes=False)
        stats = engine.stats().experts
    assert stats is not None and sum(stats.rows) == (21 + 3) * 2  # one layer has experts, and a row has two of them


def test_nothing_moves_if_the_load_is_even(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make_engine(build_config(tmp_path, "qwen3-moe", graphs=False), DP2_EP2)
    with closing(engine):
        run_with_scores(engine, submissions(), closes=False)
        move_all(engine, runner, [5, 5, 5, 5])
        stats = engine.stats().experts
    assert stats is not None and stats.moved == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks_per_group", [1, 2])
def test_weights_arrive_in_their_places(seed: int, ranks_per_group: int) -> None:
    """Random placements, in which experts also change places. Ranks of a group have parts of the same experts."""
    pick, experts, groups, places = random.Random(seed), 6, 3, 4
    before, after = (draw_placement(pick, experts, groups, places) for _ in range(2))

    def expected(placement: Placement, group: int, column: int) -> torch.Tensor:
        return torch.tensor([[[10.0 * expert + column] * 3] * 2 for expert in placement[group]])

    def run(comm: Any) -> None:
        group, column = divmod(comm.rank, ranks_per_group)
        slots = ExpertSlots(experts, groups, places, torch.device("cpu"), group)
        tensors = [expected(before, group, column), expected(before, group, column).to(torch.bfloat16)[:, 0]]
        move_weights(tensors, list_transfers(before, after), slots, comm)
        used = [place for place, expert in enumerate(after[group]) if expert != EMPTY_SLOT]
        assert torch.equal(tensors[0][used], expected(after, group, column)[used])
        assert torch.equal(tensors[1][used], expected(after, group, column).to(torch.bfloat16)[used, 0])

    ThreadGroup(groups * ranks_per_group).run(run)


def draw_placement(pick: random.Random, experts: int, groups: int, places: int) -> Placement:
    """Return a placement with each expert at least once, and at most once in a group."""
    placed: list[list[int]] = [[] for _ in range(groups)]
    for expert in [*range(experts), *pick.choices(range(experts), k=4)]:
        free = [each for each in placed if len(each) < places and expert not in each]
        if free:
            pick.choice(free).append(expert)
    return tuple(tuple(pick.sample([*each, *[EMPTY_SLOT] * (places - len(each))], places)) for each in placed)


def test_slots_of_rows() -> None:
    """Copies of an expert compute as many rows each, also if most rows are padding. Tables keep their addresses."""
    slots = ExpertSlots(4, 2, 3, torch.device("cpu"), local_group=1)
    address = slots.table.data_ptr(), slots.copies.data_ptr()
    slots.assign(list_slots(((0, 1, EMPTY_SLOT), (2, 3, EMPTY_SLOT)), 4))
    assert slots.choose(torch.tensor([[0, 3], [0, 2]])).tolist() == [[0, 4], [0, 3]]
    slots.assign(list_slots(((0, 1, 2), (2, 3, 0)), 4))
    found = slots.choose(torch.tensor([[0, 1, 2]]).expand(1024, -1))
    for every in (1, 8, 136):
        for column, copies in ((0, {0, 5}), (1, {1}), (2, {2, 3})):
            of_rows = found[::every, column].tolist()
            assert set(of_rows) == copies and abs(of_rows.count(min(copies)) / len(of_rows) - 1 / len(copies)) <= 0.125
    assert (slots.table.data_ptr(), slots.copies.data_ptr()) == address and slots.local_slots == range(3, 6)


def test_counts_are_those_of_the_experts_that_slots_had() -> None:
    """The device counts rows by slot. What was counted before a move belongs to the experts of the old placement."""
    layers = [MovableExperts(4, ExpertSlots(4, 2, 3, torch.device("cpu"))) for _ in range(2)]
    layers[1].row_counts += torch.tensor([5, 1, 0, 2, 3, 0])
    read_row_counts(layers)
    assert layers[1].expert_row_counts.recent.tolist() == [5, 1, 2, 3] and not layers[0].expert_row_counts.recent.any()
    layers[1].set_placement(((0, 1, EMPTY_SLOT), (2, 3, 0)))
    assert (
        layers[1].expert_row_counts.rows_by_group.tolist() == [6, 5]
        and not layers[1].expert_row_counts.recent_by_group.any()
    )
    layers[1].row_counts += torch.tensor([2, 0, 0, 0, 0, 7])
    read_row_counts(layers)
    read_row_counts(layers)
    assert layers[1].expert_row_counts.recent.tolist() == [14, 1, 2, 3] and layers[
        1
    ].expert_row_counts.rows_by_group.tolist() == [8, 12]


def test_rows_are_read_before_experts_move() -> None:
    order: list[str] = []
    layer = MovableExperts(4, ExpertSlots(4, 2, 3, torch.device("cpu")))
    layer.expert_row_counts.add(np.array([900, 800, 1, 1]), np.array([1700, 2]))
    layout = Layout(2, ep=2, dp_attention=True, redundant_experts=1)
    experts = LeaderExperts({3: layer}, layout, update_loads=lambda: order.append("read"))
    assert experts.balancer is not None
    experts.balancer._next_check = 0.0

    def move(moves: ExpertMoves) -> bool:
        order.append("move")
        return list(moves) == [3]

    assert experts.is_due and order == ["read"]
    assert experts.move_next(move) and order == ["read", "read", "move"]
    assert not experts.is_due, "the next check is later"


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt-oss"])
def test_planned_weights_have_room_for_copies(name: str, tmp_path: Path) -> None:
    config = build_config(tmp_path, name)
    sizes, activations = [], []
    for layout in (DP2_EP2 | {"redundant_experts": 0}, DP2_EP2):
        own = config.with_settings(**layout)
        part = load_host_rank_model(own, Layout.of_gpus(own.parallel), 1, lambda name, rank, size: LoneRank(rank, size))
        planned = memory.weight_bytes(part.planned.rank_config, 4)
        assert planned == pytest.approx(part.planned.model.weight_bytes, rel=0.01)
        sizes.append(planned)
        activations.append(part.planned.plan.activations)
    assert activations[1] > activations[0], "outputs and sums are in float64"
    hidden, experts = part.planned.rank_config.hidden, part.planned.rank_config.experts
    assert experts is not None and experts.num_local_slots == 3
    biases = (2 * experts.ffn + hidden) * experts.options.has_biases
    assert sizes[1] - sizes[0] == sum(experts.layers) * 4 * (3 * hidden * experts.ffn + biases)


def test_sums_are_in_no_order_of_ranks(tmp_path: Path) -> None:
    """Blocks of engines with and without such sums are kept apart, since they round differently."""
    config = build_config(tmp_path, "qwen3-moe")
    names = set()
    for redundant in (0, 1):
        ranks = DeviceThreadRanks(config.with_settings(**DP2_EP2 | {"redundant_experts": redundant}))
        with closing(ranks.make_engine(config.with_settings(**DP2_EP2 | {"redundant_experts": redundant}))) as engine:
            assert isinstance(engine.runner, DeviceLeaderRunner)
            names.add((engine.runner.layout, ranks.layout.numerics_name))
    assert len({layout for layout, _ in names}) == len({numerics for _, numerics in names}) == 2


def make_int4_experts(scales: list[float]) -> QuantisedMatrix:
    """Return an expert of random codes for each scale."""
    random_codes = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (1, 64, 64), generator=random_codes, dtype=torch.uint8).expand(len(scales), -1, -1)
    groups = torch.rand(1, 64, 1, generator=random_codes).add(1.0) * torch.tensor(scales)[:, None, None]
    return QuantisedMatrix("int4", codes.contiguous(), groups.to(torch.bfloat16), 1, 128)


def test_packed_experts_do_not_depend_on_others() -> None:
    """The bytes of an expert are the same on ranks whose other experts have other scales."""
    scales = [0.001, 0.25, 0.004]
    together, alone = (pack(make_int4_experts(each)) for each in (scales, scales[:1]))
    assert together is not None and alone is not None and together.factor != alone.factor
    whole, single = use_common_factor(together), use_common_factor(alone)
    assert whole is not None and single is not None and whole.factor == single.factor
    assert torch.equal(whole.data[:1], single.data)
    for unusable in ([1e-9, 1.0], [1e4]):
        packed = pack(make_int4_experts(unusable))
        assert packed is not None and use_common_factor(packed) is None


def test_experts_in_other_forms_are_refused(tmp_path: Path) -> None:
    config = build_config(tmp_path, "qwen3-moe")
    ranks = DeviceThreadRanks(config.with_settings(**DP2_EP2))
    with closing(ranks.make_engine(config.with_settings(**DP2_EP2))):
        forms = [describe_expert_forms(part.runner.model) for part in ranks.parts]
        assert forms[0] == forms[1] != ""
        model = ranks.parts[1].runner.model
        experts = next(iter(model.movable_layers.values())).mixture.experts
        assert isinstance(experts, StackedExperts) and isinstance(experts.down, torch.Tensor)
        experts.down.data = experts.down.to(torch.bfloat16)
        changed = describe_expert_forms(model)
    check_same_forms(forms[0], {1: RankReady(0, forms[1])}, ranks.layout)
    with pytest.raises(EngineFailed, match=r"rank 1 of 2 .* stores experts with other dtypes, shapes or factors"):
        check_same_forms(forms[0], {1: RankReady(0, changed)}, ranks.layout)
