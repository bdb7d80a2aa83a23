"""Mixtures of experts on a GPU: routing, grouped products, and whole models with the logits of the CPU's reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import expert_cases
import pytest
import tiny
import tiny_experts
import tiny_fused_experts
import torch
from engine_runs import run_engine
from expert_cases import BF16, F32
from test_engine import engine, scores, submissions
from test_families_on_gpu import compute_logits, load_on
from test_model_swap_on_gpu import make_swapped, poison

from emberline.core.params import SamplingParams
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops, work_limits
from emberline.kernels.cuda import wide
from emberline.kernels.mixture import ClampedSwiGLU, Expert, Mixture, Routing, SharedExpert, StackedExperts
from emberline.kernels.triton import experts
from emberline.kernels.triton.experts import ExpertTiles
from emberline.kernels.work_limits import PASS_ROW_GRAIN, max_pass_rows, split_evenly
from emberline.models.loader import load_decoder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
GPU = "cuda"


@pytest.fixture(autouse=True)
def seed_and_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the seed, and capture only a few shapes when an engine starts: others are captured at their first use."""
    torch.manual_seed(0)
    monkeypatch.setattr("emberline.engine.gpu.boot.CAPTURE_BUDGET_S", 0.2)
    yield
    ops.start_backend()


@pytest.mark.parametrize("name", expert_cases.ROUTINGS)
@pytest.mark.parametrize(("rows", "tile_rows"), [(1, 16), (3, 16), (8, 16), (32, 32), (65, 16), (500, 64), (5000, 128)])
def test_routing(name: str, rows: int, tile_rows: int) -> None:
    expert_cases.check_routing(GPU, name, rows, tile_rows, pdl=True)


@pytest.mark.parametrize("name", expert_cases.ROUTINGS)
def test_routing_of_nan(name: str) -> None:
    for rows in (3, 40):
        expert_cases.check_routing_of_nan(GPU, name, rows)


@pytest.mark.parametrize("rows", [1, 8, 64, 2048])
def test_routing_of_many_experts(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"groups": 8, "groups_per_row": 4, "group_best": 2, "scores": "sigmoid"}
    for count, rules in ((128, {}), (256, groups)):
        case = expert_cases.RoutingCase(count, {"experts_per_row": 8, "renormalize": True, **rules})
        monkeypatch.setitem(expert_cases.ROUTINGS, "many", case)
        expert_cases.check_routing(GPU, "many", rows, 16, pdl=True)


@pytest.mark.parametrize(("rows", "columns", "count"), [(1, 2048, 128), (7, 2880, 32), (64, 2048, 64), (5, 96, 5)])
def test_norm_and_logits(rows: int, columns: int, count: int) -> None:
    for dtype, biased in ((BF16, True), (BF16, False), (F32, True)):
        expert_cases.check_router(GPU, dtype, rows, columns, count, biased=biased, pdl=True)


TILES = {"float32": experts.FLOAT32_TILES, "large": experts.LARGE_BF16_TILES}
TILES |= {f"up-to-{rows}": tiles for rows, tiles in experts.BF16_TILES}


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(("rows", "sizes"), [(1, (256, 128)), (40, (256, 192)), (300, (192, 96)), (9, (48, 40))])
def test_products(name: str, rows: int, sizes: tuple[int, int]) -> None:
    tiles: ExpertTiles = TILES[name]
    dtype = F32 if name == "float32" else BF16
    for case, biased, clamp in (
        ("qwen3", False, None),
        ("llama4", False, None),
        ("gpt-oss", True, ClampedSwiGLU(1.7, 1.0)),
    ):
        kinds = {"biased": biased, "clamp": clamp, "pdl": True}
        expert_cases.check_products(GPU, dtype, case, rows, sizes, tiles.rows, (tiles.gate_up, tiles.down), **kinds)


@pytest.mark.parametrize("shared", ["", "scaled", "gated"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_sums(shared: str, dtype: torch.dtype) -> None:
    expert_cases.check_sums(GPU, dtype, 37, 2500, 6, shared, pdl=True)


def make_mixture(shared_scale: float, *, gated: bool, hidden: int = 512, width: int = 128) -> Mixture:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=GPU, dtype=BF16) / shape[-1] ** 0.5

    shared = Expert(ops.pack_linear(draw(4 * width, hidden), gated=True), ops.pack_linear(draw(hidden, 2 * width)))
    return Mixture(
        norm=torch.rand(hidden, device=GPU) + 0.5,
        eps=1e-6,
        router=ops.pack_linear(draw(16, hidden)),
        experts=StackedExperts(draw(16, 2 * width, hidden), draw(16, hidden, width)),
        routing=Routing(4, renormalize=True),
        shared=SharedExpert(shared, ops.pack_linear(draw(1, hidden)) if gated else None, shared_scale),
    )


@pytest.mark.parametrize(("scale", "gated"), [(1.0, False), (0.5, False), (1.0, True)])
def test_few_rows_agree_with_many(scale: float, gated: bool) -> None:
    """With few rows the shared expert runs in a second stream; captured steps must wait for it too."""
    mixture = make_mixture(scale, gated=gated)
    x, stream = torch.randn(100, 512, device=GPU, dtype=BF16), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wide.get_exchange_memory(x.device)
    many = ops.run_mixture(x.clone(), mixture)
    for rows in (1, 8, 40):
        few = ops.run_mixture(x[:rows].clone(), mixture)
        torch.testing.assert_close(few, many[:rows], rtol=0.02, atol=0.05)
        state, graph = x[:rows].clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            ops.run_mixture(state, mixture)
        for _ in range(20):
            state.copy_(x[:rows])
            graph.replay()
            assert torch.equal(state, few)


def test_passes_compute_what_steps_of_their_rows_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass follows another one directly, and gets the memory that it freed."""
    mixture, x = make_mixture(0.5, gated=True), torch.randn(1500, 512, device=GPU, dtype=BF16)
    monkeypatch.setattr(work_limits, "MIN_EXPERT_PAIRS", 4 * 512)
    monkeypatch.setattr(work_limits, "PAIRS_PER_EXPERT", 1)
    parts = list(split_evenly(len(x), max_pass_rows(16, 4), PASS_ROW_GRAIN))
    assert len(parts) == 3
    expected = torch.cat([ops.run_mixture(x[part].clone(), mixture) for part in parts])
    for _ in range(20):
        assert torch.equal(ops.run_mixture(x.clone(), mixture), expected)


FAMILIES = {name: (tiny_experts, config) for name, config in tiny_experts.CONFIGS.items()}
FAMILIES |= {name: (tiny_fused_experts, config) for name, config in tiny_fused_experts.CONFIGS.items()}
FAMILIES |= {name: (tiny, tiny.CONFIGS[name]) for name in ("mixtral", "qwen3-moe", "qwen3-moe-mixed")}


@pytest.mark.parametrize(("dtype", "bound"), [(F32, 1e-4), (BF16, 0.1)], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_the_cpu(name: str, dtype: torch.dtype, bound: float, tmp_path: Path) -> None:
    """In bfloat16 a row may select other experts than in float32, so only the mean error is bounded."""
    family, config = FAMILIES[name]
    tiny.write_tensors(tmp_path, config, family.tensors(config, dtype=dtype))
    ops.start_backend(native=False)
    theirs = compute_logits(load_decoder(tmp_path, "float32"), 131)
    ours = compute_logits(load_on(GPU, Checkpoint.open(tmp_path), dtype), 131)
    error = (ours - theirs).abs() / theirs.abs().max()
    assert float(error.max() if dtype is F32 else error.mean()) < bound


ENGINE_SIZES = tiny.GPU_SIZES | {"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 128}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny.config("qwen3_moe", **ENGINE_SIZES, norm_topk_prob=True)
    return Path(tiny.write(tmp_path_factory.mktemp("experts"), config))


def test_captured_steps_give_the_same_tokens(checkpoint: Path) -> None:
    given = submissions(SamplingParams(max_tokens=30, temperature=0.0))
    plain = run_engine(engine(checkpoint, F32, graphs=False, overlap=False, prefix_cache=False), given)
    assert run_engine(engine(checkpoint, F32), given, steps_between=1) == plain
    assert run_engine(engine(checkpoint, F32, max_batch_tokens=48), given, steps_between=2) == plain


@pytest.mark.parametrize("form", ["plain", "packed"])
def test_bf16_steps_of_one_token_agree_with_chunks(checkpoint: Path, form: str) -> None:
    """Generated tokens are scored again as a prompt; now and then a row selects another expert than before.

    Packed weights are scored as a prompt with plain ones.
    """
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=1, logprobs=0, ignore_eos=True)
    first, given = engine(checkpoint, BF16, weights=form), submissions(params)
    logprobs: dict[str, list[float]] = {}
    tokens: dict[str, list[int]] = {}
    for submission in given:
        first.add(submission)
    while not first.idle:
        for output in first.step():
            tokens.setdefault(output.id, []).extend(output.tokens)
            logprobs.setdefault(output.id, []).extend(p.logprob for p in output.logprobs)
    again = scores(engine(checkpoint, BF16), [s.prompt + tokens[s.id] for s in given])
    pairs = zip(given, again, strict=True)
    errors = torch.cat([(torch.tensor(logprobs[s.id]) - score[-30:]).abs() for s, score in pairs])
    assert errors.median().item() < 0.05 and errors.mean().item() < 0.3, errors


@pytest.mark.parametrize("form", ["plain", "packed"])
def test_sleep_and_wake_keep_the_tokens(checkpoint: Path, form: str) -> None:
    model = make_swapped(checkpoint, F32) if form == "plain" else make_swapped(checkpoint, BF16, weights=form)
    found = []
    for _ in range(2):
        model.wake()
        found.append(run_engine(model.engine, submissions(SamplingParams(max_tokens=20, temperature=0.0))))
        model.sleep()
        poison(1 << 30)
    model.close()
    assert found[0] == found[1]
