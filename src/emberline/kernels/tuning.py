"""tune: by which algorithms products of many rows are fastest, measured once on a GPU and kept beside compiled kernels.

What is measured: cuBLAS's proposals, and for gates and ups our own product, which has silu(gate) * up built in, against
each of them followed by one more kernel. Weights are rotated past the L2. What is not cuBLAS's first proposal must be
faster by MARGIN, or noise would choose. All of it is advice: what fails is left to torch.
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
from emberline.kernels.cuda.cublas import OURS, CublasError, Kind, Matmul, Problem
from emberline.kernels.cuda.driver import DriverError
from emberline.kernels.cuda.linear import Weight
from emberline.kernels.packed import PackedWeight
from emberline.kernels.tiles import GATED_ROWS
from emberline.kernels.triton import activation

log = logging.getLogger("emberline.kernels")
ROUNDS = 3
MARGIN = 1.02
L2_BYTES = 150 << 20  # of different weights between two uses of one
SCALE = 0.02  # of random weights: what they are decides how much power a product takes
FORM = 2
LEAST_WORK = 1e10  # FLOP of a product: those of less take no longer than launching them does

Found = dict[Problem, int]
Way = Callable[[Tensor], object]  # of computing a problem, for one of the weights


def tune(weights: Collection[PackedWeight], hidden: int, sizes: Collection[int]) -> float:
    """For products of a layer's weights with so many rows: what is not known yet is measured, then all is in use.
    `hidden`: the width of what layers add to. Seconds."""
    began = time.perf_counter()
    if cublas.available():
        kept = _kept_at()
        found = _load(kept)
        shapes = {_shape(weight, hidden) for weight in weights if weight.dtype is torch.bfloat16}
        of_sizes = (replace(shape, m=m) for shape, m in product(shapes, sizes) if m > wide.COLUMNS[-2])
        wanted = {problem for problem in of_sizes if 2.0 * problem.m * problem.n * problem.k >= LEAST_WORK}
        if missing := wanted - found.keys():
            measured = _measured(missing)
            found |= measured
            try:
                _save(kept, found)
            except OSError as error:
                log.warning("what products were measured is not kept, and measured at each start: %s", error)
            log.info("measured %d products of many rows in %.1f s", len(measured), time.perf_counter() - began)
        cublas.choices.update(found)
    return time.perf_counter() - began


def _shape(weight: PackedWeight, hidden: int) -> Problem:
    kind = Kind.GATED if weight.gated else Kind.ADD if weight.n == hidden else Kind.STORE
    return Problem(0, weight.n, weight.k, kind)


def _measured(problems: Collection[Problem]) -> Found:
    """Of all for which there is memory, and which do not fail."""
    found: Found = {}
    for n, k in {(problem.n, problem.k) for problem in problems}:
        count = max(2, -(-L2_BYTES // (2 * n * k)))
        free = torch.cuda.mem_get_info()[0] - 2 * count * n * k
        of_weights = [p for p in problems if (p.n, p.k) == (n, k) and 2 * p.m * (2 * n + k) < free // 2]
        if not of_weights:
            continue
        weights: list[Tensor] = []
        for problem in of_weights:
            try:
                weights = weights or [_random(n, k, SCALE) for _ in range(count)]
                found[problem] = _fastest(problem, weights)
            except (CublasError, DriverError, torch.OutOfMemoryError) as error:
                log.warning("%s was not measured: %s", problem, error)
        del weights
        torch.cuda.empty_cache()
    return found


def _fastest(problem: Problem, weights: Sequence[Tensor]) -> int:
    matmul, x = Matmul(problem), _random(problem.m, problem.k, 1.0)
    out = torch.zeros(problem.m, problem.n, dtype=torch.bfloat16, device=x.device)
    choices = alike(matmul, x, weights[0])
    ways: list[Way] = [partial(_proposal, matmul, x, out, index) for index in choices]
    if problem.kind is Kind.GATED:
        width = problem.n // 2
        group = GATED_ROWS if width % GATED_ROWS == 0 else width
        narrow = torch.empty(problem.m, width, dtype=torch.bfloat16, device=x.device)
        ways = [partial(_then_silu, way, out, narrow, group) for way in ways]
        if group == GATED_ROWS and gemm.supports(problem.m, problem.n, problem.k):
            handles = {w.data_ptr(): Weight(w) for w in weights}
            ways.append(lambda w: gemm.linear(x, handles[w.data_ptr()], out=narrow, gated=True))
            choices.append(OURS)
    taken = _milliseconds(ways, weights)
    best = taken.index(min(taken))
    return choices[best if taken[0] > MARGIN * taken[best] else 0]


def alike(matmul: Matmul, x: Tensor, w: Tensor) -> list[int]:
    """The proposals with the first one's bits: what is measured must not decide on results."""
    outs = (matmul(x, w, x.new_zeros(len(x), len(w)), index) for index in range(len(matmul)))
    first = next(outs)
    return [0, *(index for index, out in enumerate(outs, 1) if torch.equal(out, first))]


def _proposal(matmul: Matmul, x: Tensor, out: Tensor, index: int, w: Tensor) -> Tensor:
    return matmul(x, w, out, index)


def _then_silu(way: Way, out: Tensor, narrow: Tensor, group: int, w: Tensor) -> Tensor:
    way(w)
    return activation.silu_mul(out, narrow, group, pdl=True)


def _milliseconds(ways: Sequence[Way], weights: Sequence[Tensor]) -> list[float]:
    """The least of each. All is queued before anything is waited for, so that the device does not wait for us."""
    for way in ways:
        way(weights[0])  # compiles, and sets up
    marks = []
    for _, way in product(range(ROUNDS), ways):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for w in weights:
            way(w)
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    taken = [float(begin.elapsed_time(end)) for begin, end in marks]
    return [min(taken[i :: len(ways)]) for i in range(len(ways))]


def _random(rows: int, columns: int, scale: float) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_(0.0, scale)


# -- on disk ----------------------------------------------------------------------------------------------------------


def _kept_at() -> Path:
    """For this GPU, what cuBLAS is asked, and our product as it is. FORM: of what is asked besides, and of the file."""
    asked = FORM, cublas.version(), cublas.MOST, cublas.WORKSPACE
    what = f"{torch.cuda.get_device_name()} {asked} {nvrtc.source(gemm.FILE)}"
    return kernel_dir() / f"products-{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"


def _load(file: Path) -> Found:
    """Nothing of a file that is not as it was written: it is made again."""
    try:
        rows = json.loads(file.read_text("utf-8"))
        found = {Problem(m, n, k, Kind(kind)): choice for m, n, k, kind, choice in rows}
        return found if all(isinstance(choice, int) and choice < cublas.MOST for choice in found.values()) else {}
    except (OSError, ValueError, TypeError):
        return {}


def _save(file: Path, found: Found) -> None:
    rows = [[p.m, p.n, p.k, p.kind, choice] for p, choice in found.items()]
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{uuid.uuid4().hex}")
    try:
        draft.write_text(json.dumps(rows), "utf-8")
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
