"""tune_products: finds the fastest algorithms for large matrix products and caches them on disk.

It measures the algorithms that cuBLAS proposes. For gate-and-up weights, a kernel for silu(gate) * up follows each
proposal. Our own kernels compete: Hopper's GEMM for gate-and-up weights, which computes silu(gate) * up too, and the
portable kernel for few rows, which also adds to the output. Measurements alternate between
several weights, so that no weight is still in the L2 cache. To be chosen, an algorithm other than cuBLAS's first
proposal must be faster by the factor MIN_SPEEDUP, which excludes noise. Tuning is optional: a product whose tuning
fails is computed by torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from emberline.core.config import kernel_dir
from emberline.kernels.cuda import cublas, gemm, nvrtc, wide
from emberline.kernels.cuda.cublas import OWN_KERNEL, CublasError, Matmul, MatmulProblem, ProductKind
from emberline.kernels.cuda.driver import CudaDriverError
from emberline.kernels.cuda.linear import BF16Weight
from emberline.kernels.packed_weight import PackedWeight, WeightLayout
from emberline.kernels.triton import activation, jit
from emberline.kernels.triton import linear as few_rows
from emberline.kernels.work_limits import GATE_GROUP_ROWS

log = logging.getLogger("emberline.kernels")
TIMING_ROUNDS = 3
MIN_SPEEDUP = 1.02
ROTATED_WEIGHT_BYTES = 150 << 20  # bytes of other weights between two uses of one weight; more than the L2 holds
WEIGHT_STD = 0.02  # standard deviation of random weights; the values determine how much power a product draws
FILE_VERSION = 2  # of the cache file and of what is measured; part of the file name
MIN_PRODUCT_FLOP = 1e10  # FLOP; a smaller product takes no longer than its launch
# Rows and FLOP from which the portable kernel for few rows is compared with cuBLAS; below, it is as fast or faster.
MIN_PORTABLE_ROWS, MIN_PORTABLE_FLOP = 17, 1e9

TunedChoices = dict[MatmulProblem, int]
ProductCall = Callable[[Tensor], object]  # computes the product with the given weight


def tune_products(
    weights: Collection[PackedWeight], hidden: int, row_counts: Collection[int], *, portable: bool = False
) -> float:
    """Find and activate the fastest algorithm for each weight and each of the `row_counts`.

    Return the seconds that this took. Products that are not in the cache on disk are measured. `hidden` is the hidden
    size of the model. `portable`: whether Hopper's kernels cannot be used.
    """
    began = time.perf_counter()
    if cublas.is_available():
        cache_file = _cache_file(portable=portable)
        min_rows = MIN_PORTABLE_ROWS if portable else wide.SMALL_COLUMNS[-1] + 1
        min_flop = MIN_PORTABLE_FLOP if portable else MIN_PRODUCT_FLOP
        found = _load_choices(cache_file)
        plain = [weight for weight in weights if weight.layout is not WeightLayout.QUANTISED]
        shapes = {_make_problem(weight, hidden) for weight in plain if weight.dtype is torch.bfloat16}
        all_problems = (replace(shape, m=m) for shape, m in product(shapes, row_counts) if m >= min_rows)
        needed = {problem for problem in all_problems if 2.0 * problem.m * problem.n * problem.k >= min_flop}
        if missing := needed - found.keys():
            if portable:
                _compile_portable_kernels(missing)
            measured = _measure(missing, portable=portable)
            found |= measured
            try:
                _save_choices(cache_file, found)
            except OSError as error:
                log.warning(
                    "Cannot save the tuned matrix products, the next start measures them again: error=%s", error
                )
            log.info("Tuned matrix products: count=%d seconds=%.1f", len(measured), time.perf_counter() - began)
        cublas.choices.update(found)
    return time.perf_counter() - began


def list_choices() -> list[tuple[int, int, int, str, int]]:
    """Return the algorithms that are active, for `use_choices` in another process with the same kind of GPU."""
    return [(p.m, p.n, p.k, str(p.kind), choice) for p, choice in cublas.choices.items()]


def use_choices(rows: Sequence[tuple[int, int, int, str, int]]) -> None:
    """Activate these algorithms, and no others."""
    cublas.choices.clear()
    cublas.choices.update({MatmulProblem(m, n, k, ProductKind(kind)): choice for m, n, k, kind, choice in rows})


def _make_problem(weight: PackedWeight, hidden: int) -> MatmulProblem:
    kind = ProductKind.GATED if weight.gated else ProductKind.ADD if weight.n == hidden else ProductKind.STORE
    return MatmulProblem(0, weight.n, weight.k, kind)


def _measure(problems: Collection[MatmulProblem], *, portable: bool) -> TunedChoices:
    """Return the fastest algorithm for each product that can be measured and fits into free memory."""
    found: TunedChoices = {}
    for n, k in {(problem.n, problem.k) for problem in problems}:
        count = max(2, -(-ROTATED_WEIGHT_BYTES // (2 * n * k)))
        free = torch.cuda.mem_get_info()[0] - 2 * count * n * k
        of_weights = [p for p in problems if (p.n, p.k) == (n, k) and 2 * p.m * (2 * n + k) < free // 2]
        if not of_weights:
            continue
        weights: list[Tensor] = []
        for problem in of_weights:
            try:
                weights = weights or [_random_matrix(n, k, WEIGHT_STD) for _ in range(count)]
                found[problem] = _find_fastest(problem, weights, portable=portable)
            except (CublasError, CudaDriverError, torch.OutOfMemoryError) as error:
                log.warning(
                    "Cannot tune a matrix product, torch computes it instead: product=%s error=%s", problem, error
                )
        del weights
        torch.cuda.empty_cache()
    return found


def _find_fastest(problem: MatmulProblem, weights: Sequence[Tensor], *, portable: bool) -> int:
    matmul, x = Matmul(problem), _random_matrix(problem.m, problem.k, 1.0)
    out = torch.zeros(problem.m, problem.n, dtype=torch.bfloat16, device=x.device)
    choices = find_bitwise_equal_proposals(matmul, x, weights[0])
    calls: list[ProductCall] = [partial(_call_proposal, matmul, x, out, index) for index in choices]
    activated = out
    if problem.kind is ProductKind.GATED:
        width = problem.n // 2
        group = GATE_GROUP_ROWS if width % GATE_GROUP_ROWS == 0 else width
        activated = torch.empty(problem.m, width, dtype=torch.bfloat16, device=x.device)
        calls = [partial(_call_then_silu, call, out, activated, group) for call in calls]
    make_call = _make_portable_call if portable else _make_hopper_call
    if (own := make_call(problem, x, activated, weights)) is not None:
        calls.append(own)
        choices.append(OWN_KERNEL)
    times = _time_calls(calls, weights)
    best = times.index(min(times))
    return choices[best if times[0] > MIN_SPEEDUP * times[best] else 0]


def _make_hopper_call(problem: MatmulProblem, x: Tensor, out: Tensor, weights: Sequence[Tensor]) -> ProductCall | None:
    is_gated = problem.kind is ProductKind.GATED and problem.n // 2 % GATE_GROUP_ROWS == 0
    if not is_gated or not gemm.supports(problem.m, problem.n, problem.k):
        return None
    handles = {w.data_ptr(): BF16Weight(w) for w in weights}
    return lambda w: gemm.linear(x, handles[w.data_ptr()], out=out, gated=True)


def _make_portable_call(
    problem: MatmulProblem, x: Tensor, out: Tensor, weights: Sequence[Tensor]
) -> ProductCall | None:
    is_gated, residual = problem.kind is ProductKind.GATED, out if problem.kind is ProductKind.ADD else None
    has_groups = problem.n // 2 % GATE_GROUP_ROWS == 0
    if not few_rows.supports(problem.m, problem.n, problem.k, x.dtype) or (is_gated and not has_groups):
        return None
    group = GATE_GROUP_ROWS if is_gated else 0
    return lambda w: few_rows.linear(x, w, out=out, residual=residual, group=group, pdl=True)


def _compile_portable_kernels(problems: Collection[MatmulProblem]) -> None:
    """Compile in parallel, without launching them, the kernels that are compared with cuBLAS."""
    with jit.compile_in_parallel():
        for problem in problems:
            if problem.m > few_rows.MAX_ROWS:
                continue
            x, w, out = (
                torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
                for rows, columns in ((problem.m, problem.k), (problem.n, problem.k), (problem.m, problem.n))
            )
            target = out[:, : problem.n // 2].contiguous() if problem.kind is ProductKind.GATED else out
            if (call := _make_portable_call(problem, x, target, [w])) is not None:
                call(w)


def find_bitwise_equal_proposals(matmul: Matmul, x: Tensor, w: Tensor) -> list[int]:
    """Return the indices of the proposals with the same bits as the first: tuning keeps results equal."""
    outs = (matmul(x, w, x.new_zeros(len(x), len(w)), index) for index in range(len(matmul)))
    first = next(outs)
    return [0, *(index for index, out in enumerate(outs, 1) if torch.equal(out, first))]


def _call_proposal(matmul: Matmul, x: Tensor, out: Tensor, index: int, w: Tensor) -> Tensor:
    return matmul(x, w, out, index)


def _call_then_silu(call: ProductCall, out: Tensor, activated: Tensor, group: int, w: Tensor) -> Tensor:
    call(w)
    return activation.silu_mul(out, activated, group, pdl=True)


def _time_calls(calls: Sequence[ProductCall], weights: Sequence[Tensor]) -> list[float]:
    """Return for each call the milliseconds of the fastest of several rounds over all weights.

    All rounds are queued before the host waits, so that the device never waits for the host.
    """
    for call in calls:
        call(weights[0])  # compiles kernels and creates handles
    events = []
    for _, call in product(range(TIMING_ROUNDS), calls):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for w in weights:
            call(w)
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    times = [float(begin.elapsed_time(end)) for begin, end in events]
    return [min(times[i :: len(calls)]) for i in range(len(calls))]


def _random_matrix(rows: int, columns: int, scale: float) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_(0.0, scale)


# -- cache file -------------------------------------------------------------------------------------------------------


def _cache_file(*, portable: bool) -> Path:
    """Return the cache file.

    Its name has a hash of the GPU, the cuBLAS version and limits, and our own kernel.
    """
    versions = FILE_VERSION, cublas.library_version(), cublas.MAX_PROPOSALS, cublas.WORKSPACE_BYTES
    source = Path(few_rows.__file__).read_text("utf-8") if portable else nvrtc.read_source(gemm.FILE)
    key = f"{torch.cuda.get_device_name()} {versions} {source}"
    return kernel_dir() / f"products-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _load_choices(file: Path) -> TunedChoices:
    """Return the choices in the file, or an empty dict if the file is missing or damaged."""
    try:
        rows = json.loads(file.read_text("utf-8"))
        found = {MatmulProblem(m, n, k, ProductKind(kind)): choice for m, n, k, kind, choice in rows}
        return (
            found if all(isinstance(choice, int) and choice < cublas.MAX_PROPOSALS for choice in found.values()) else {}
        )
    except (OSError, ValueError, TypeError):
        return {}


def _save_choices(file: Path, tuned: TunedChoices) -> None:
    rows = [[p.m, p.n, p.k, p.kind, choice] for p, choice in tuned.items()]
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{uuid.uuid4().hex}")
    try:
        draft.write_text(json.dumps(rows), "utf-8")
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
