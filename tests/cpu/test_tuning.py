"""Tuned products are cached on disk, and only missing ones are measured; tests/gpu measures on a GPU."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from emberline.kernels import tuning
from emberline.kernels.cuda import cublas
from emberline.kernels.cuda.cublas import OWN_KERNEL, CublasError, MatmulProblem, ProductKind
from emberline.kernels.packed_weight import PackedWeight

DOWN = MatmulProblem(896, 4096, 14336, ProductKind.ADD)
FOUND = {DOWN: 2, MatmulProblem(1024, 28672, 4096, ProductKind.GATED): OWN_KERNEL}


def weight(n: int, k: int, *, gated: bool = False, dtype: torch.dtype = torch.bfloat16) -> PackedWeight:
    return PackedWeight(torch.empty(0), n, k, dtype, gated=gated)


LAYER = [weight(6144, 4096), weight(4096, 4096), weight(28672, 4096, gated=True), weight(4096, 14336)]


@pytest.fixture
def requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[set[MatmulProblem]]:
    """Replace the measurement and return the sets of problems that were requested."""
    asked: list[set[MatmulProblem]] = []

    def measure(problems: Collection[MatmulProblem], *, portable: bool) -> tuning.TunedChoices:
        asked.append(set(problems))
        return dict.fromkeys(problems, 3)

    monkeypatch.setattr(tuning, "_measure", measure)
    monkeypatch.setattr(tuning, "_cache_file", lambda *, portable: tmp_path / "kept" / "products.json")
    monkeypatch.setattr(tuning, "_compile_portable_kernels", lambda problems: None)
    monkeypatch.setattr(cublas, "is_available", lambda: True)
    monkeypatch.setattr(cublas, "choices", {})
    return asked


def test_saved_choices_are_loaded(tmp_path: Path) -> None:
    file = tmp_path / "products.json"
    assert tuning._load_choices(file) == {}
    tuning._save_choices(file, FOUND)
    assert tuning._load_choices(file) == FOUND and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[[1, 2, 3]]", '[[1, 2, 3, "other", 4]]', '[[1, 2, 3, "add", "4"]]', '[[1, 2, 3, "add", 8]]', "5"],
)
def test_damaged_file_counts_as_missing(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "products.json"
    file.write_text(damage)
    assert tuning._load_choices(file) == {}


def test_only_missing_products_are_measured(requested: list[set[MatmulProblem]]) -> None:
    tuning.tune_products(LAYER, 4096, [64, 128, 896])
    assert requested == [
        {
            MatmulProblem(896, 6144, 4096, ProductKind.STORE),
            MatmulProblem(896, 4096, 4096, ProductKind.ADD),
            MatmulProblem(896, 28672, 4096, ProductKind.GATED),
            DOWN,
        }
    ]
    tuning.tune_products(LAYER, 4096, [896])
    tuning.tune_products([*LAYER, weight(4096, 4096, dtype=torch.float16)], 4096, [896, 1024])
    assert [{problem.m for problem in problems} for problems in requested] == [{896}, {1024}]
    assert cublas.choices[DOWN] == 3 and {problem.m for problem in cublas.choices} == {896, 1024}


def test_few_rows_are_measured_on_portable_kernels(requested: list[set[MatmulProblem]]) -> None:
    tuning.tune_products(LAYER[1:2], 4096, [16, 32, 64, 128], portable=True)
    assert requested == [{MatmulProblem(m, 4096, 4096, ProductKind.ADD) for m in (32, 64, 128)}]


def test_tiny_products_are_not_measured(requested: list[set[MatmulProblem]]) -> None:
    tuning.tune_products([weight(1024, 1024)], 1024, [512, 8192])
    assert requested == [{MatmulProblem(8192, 1024, 1024, ProductKind.ADD)}]


def test_unwritable_cache_is_not_fatal(
    requested: list[set[MatmulProblem]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: Path, found: tuning.TunedChoices) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(tuning, "_save_choices", full)
    tuning.tune_products(LAYER, 4096, [896])
    assert cublas.choices[DOWN] == 3 and "no space left" in caplog.text


@pytest.mark.parametrize("error", [CublasError("no"), torch.OutOfMemoryError("no")])
def test_failing_product_is_skipped(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    other = MatmulProblem(1024, 4096, 14336, ProductKind.ADD)

    def fastest(problem: MatmulProblem, weights: list[torch.Tensor], *, portable: bool) -> int:
        if problem == DOWN:
            raise error
        return 1

    monkeypatch.setattr(tuning, "_find_fastest", fastest)
    monkeypatch.setattr(tuning, "_random_matrix", lambda *sizes: torch.zeros(0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**12, 10**12))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert tuning._measure([DOWN, other], portable=False) == {other: 1}


def test_without_cublas_nothing_is_measured(
    requested: list[set[MatmulProblem]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublas, "is_available", lambda: False)
    tuning.tune_products(LAYER, 4096, [896])
    assert not requested and not cublas.choices


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_cublas_is_unavailable_without_a_gpu() -> None:
    assert not cublas.is_available()


def test_unmeasured_product_is_computed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cublas, "choices", {MatmulProblem(3, 2, 4): 1, MatmulProblem(3, 2, 4, ProductKind.GATED): OWN_KERNEL}
    )
    x, w, wide = (torch.zeros(64, 4, dtype=dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float32))
    x, w, wide = (
        t.as_strided((rows, 4), (4, 1), -t.data_ptr() % 256 // t.itemsize) for t, rows in ((x, 3), (w, 2), (wide, 3))
    )
    assert cublas.can_use_tuned_algorithm(x, w, ProductKind.STORE) and not cublas.can_use_tuned_algorithm(
        x.t().contiguous().t(), w, ProductKind.STORE
    )
    assert not cublas.can_use_tuned_algorithm(x, w, ProductKind.ADD) and not cublas.can_use_tuned_algorithm(
        x, w, ProductKind.GATED
    )
    assert not cublas.can_use_tuned_algorithm(x[:2], w, ProductKind.STORE)
    assert not cublas.can_use_tuned_algorithm(wide, w, ProductKind.STORE) and not cublas.can_use_tuned_algorithm(
        x, w, ProductKind.STORE, wide
    ), "of another type"
    askew = x.as_strided(x.shape, x.stride(), x.storage_offset() + 4)
    assert not cublas.can_use_tuned_algorithm(askew, w, ProductKind.STORE) and not cublas.can_use_tuned_algorithm(
        x, w, ProductKind.STORE, askew
    )


def test_cache_file_is_readable_json(tmp_path: Path) -> None:
    tuning._save_choices(tmp_path / "products.json", FOUND)
    rows = json.loads((tmp_path / "products.json").read_text())
    assert [896, 4096, 14336, "add", 2] in rows
