"""`exact`: the setting, fixed cuts of keys, plans of products with one split of k, and the benchmark's counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.bench.exact import ModeResult, RequestOutput, add_results, compare_outputs, cut_unfinished
from emberline.bench.report import BenchReport
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.core.plan import WorkItem
from emberline.engine.gpu.batch import DeviceBatch
from emberline.kernels import worklist
from emberline.kernels.cuda import fixed_order, gemm
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES, SLOT_K
from emberline.kernels.worklist import WorkList

SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (1152, 896), (64, 64), (960, 576)]
SHAPES += [(896, 4864), (2048, 2048), (1024, 128), (9792, 192)]


def plan_for(lengths: list[int]) -> WorkList:
    room = worklist.max_fixed_work_items(len(lengths), max(lengths))
    return worklist.plan_decode_work(np.array(lengths, np.int32), 8, 132, room, fixed_cuts=True)


def spans(work: WorkList, row: int) -> list[tuple[int, int]]:
    """Return the keys of a row's items, sorted."""
    return sorted((first, end) for r, first, end, _ in work.items[: work.count].tolist() if r == row)


@given(st.lists(st.integers(0, 200_000) | st.integers(0, 1100), min_size=1, max_size=40))
def test_fixed_cuts_are_the_same_for_all_lengths(lengths: list[int]) -> None:
    work, cuts = plan_for(lengths), set(worklist.FIXED_CUTS.tolist())
    assert work.partial_starts[0] == 0 and work.count <= work.capacity
    for row, length in enumerate(lengths):
        parts = spans(work, row)
        edges = [0, *(end for _, end in parts)]
        assert [first for first, _ in parts] == edges[:-1] and edges[-1] == length
        assert edges[:-1] == sorted(cut for cut in cuts if cut < length) or not length
        assert len(parts) <= 8 + 4 * max(0, (length // 4096).bit_length())
    partials = sorted(work.items[: work.count, 3][work.items[: work.count, 3] >= 0].tolist())
    assert partials == list(range(int(work.partial_starts[-1])))


def test_partial_results_are_in_the_order_of_keys() -> None:
    work = plan_for([600, 10, 9000, 512])
    for row, first, _, partial in work.items[: work.count].tolist():
        start, end = work.partial_starts[row : row + 2].tolist()
        before = [begin for begin, _ in spans(work, row) if begin < first]
        assert partial == (start + len(before) if end > start else -1)


@pytest.mark.parametrize("n,k", SHAPES)
@pytest.mark.parametrize("packed", [False, True])
def test_every_plan_of_a_weight_has_one_split(n: int, k: int, packed: bool) -> None:
    split = fixed_order.choose_split(n, k)
    assert fixed_order.supports(n, k) and 1 <= split <= max(1, k // SLOT_K // 2)
    for m in (1, 8, 16, 17, 32, 33, 64, 65, 128, 129, 256):
        plan = fixed_order.choose_wide_plan(m, n, k, packed=packed)
        assert plan.split == split and plan.packed is packed and not plan.unclustered and plan.columns >= m
        assert plan.stages >= plan.min_stages and plan.shared_bytes <= MAX_SHARED_BYTES and plan.cluster <= 8
        assert plan.stages > 1 or k <= SLOT_K * plan.split
        assert split == 1 or plan.grid == plan.split * plan.share * -(
            -n // (64 * plan.groups * plan.share)
        )  # one tile each
    for m in (257, 512, 8192):
        many = gemm.choose_plan(m, n, k, split)
        assert many.split == split and (split == 1 or many.width == 128)
        assert many.kernel_name("STORE") in gemm.VARIANTS


def test_unsupported_shapes() -> None:
    assert not fixed_order.supports(1000, 256) and not fixed_order.supports(1024, 200)


def test_prompt_tokens_are_chunks() -> None:
    """A work item with one token of a prompt is a chunk if the caller asks for it."""
    prompt, output = (WorkItem(name, 7, (1,), (0,), True) for name in ("prompt", "output"))
    assert DeviceBatch.split([prompt, output]) == ([prompt, output], [])
    assert DeviceBatch.split([prompt, output], lambda w: w.id == "prompt") == ([output], [prompt])


def test_setting() -> None:
    assert not EngineConfig.build("").gpu.exact
    assert EngineConfig.build("", exact=True).with_gpu_defaults().gpu.exact
    with pytest.raises(InvalidRequest, match="kv_dtype is float8"):
        EngineConfig.build("", exact=True, kv_dtype="float8").with_gpu_defaults()


def test_outputs_are_compared_up_to_the_first_mismatch() -> None:
    assert compare_outputs([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]]) == (5, 0)
    assert compare_outputs([[1, 2, 3, 4]], [[1, 9, 3, 4]]) == (2, 1)
    assert compare_outputs([[1, 2, 3, 4]], [[1, 2]]) == (3, 1)
    assert compare_outputs([[1]], [[1, 2]]) == (2, 1)


def test_report() -> None:
    report = BenchReport("exact")
    normal = ModeResult(50_000, 2, 9, 100, 40, {1: [4.0, 4.2], 8: [5.0, 5.0]}, "cuda")
    exact = ModeResult(60_000, 0, 9, 100, 40, {1: [4.4, 4.2], 8: [6.0, 6.0]}, "cuda")
    add_results(report, {"normal": normal, "exact": exact})
    results = {name: result.value for name, result in report.results.items()}
    assert results["spec_mismatch_per_100k"] == 4.0 and results["spec_exact_mismatches"] == 0
    assert results["exact_step_ratio_b8"] == 1.2 and results["exact_step_b1"] == pytest.approx(4.3)


def test_report_of_one_mode_if_the_other_failed() -> None:
    report = BenchReport("exact")
    add_results(report, {"exact": ModeResult(60_000, 0, 9, 100, 40, {8: [6.0]}, "cuda")})
    assert report.results["spec_exact_tokens"].value == 60_000 and "spec_tokens" not in report.results


def test_requests_that_the_time_cut_short_are_compared_as_far_as_both_runs_went() -> None:
    done, cut = RequestOutput([1, 2, 3], True), RequestOutput([1, 2])
    assert cut_unfinished([done, done], [cut]) == ([[1, 2]], [[1, 2]])
    assert cut_unfinished([cut], [RequestOutput([1, 9, 3], True)]) == ([[1, 2]], [[1, 9]])
    assert cut_unfinished([done], [RequestOutput([1, 2], True)]) == ([[1, 2, 3]], [[1, 2]])
