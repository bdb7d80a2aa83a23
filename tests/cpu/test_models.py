"""Every architecture compared with transformers in float32, with a shuffled paged cache and mixed batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from paged_model import Cache, assert_close, oracle, prompts

from emberline.kernels import ops
from emberline.kernels.packed_weight import WeightLayout
from emberline.models.loader import load_decoder

transformers = pytest.importorskip("transformers")


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    before = ops.current_backend()
    if request.param == "native" and before.library is None:
        pytest.skip(f"no native kernels: {before.reason}")
    ops.start_backend(native=request.param == "native")
    yield request.param
    ops.start_backend(native=before.library is not None)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_logits_equal_transformers(name: str, backend: str, tmp_path: Path) -> None:
    directory = tiny.write(tmp_path, name)
    tokens = prompts(37, 21, 20, 50)
    theirs = oracle(directory, tokens)
    model = load_decoder(directory)
    whole = [Cache(model, [ids]).step([len(ids)]) for ids in tokens]
    assert_close(whole, theirs)
    for seed in range(2):
        mixed = Cache(model, tokens, seed).run(seed)
        assert_close(mixed, theirs)
        if backend == "native":
            assert all(torch.equal(a, b) for a, b in zip(mixed, whole, strict=True)), (
                "the result depends on chunks or batch"
            )


def test_logits_of_requested_rows_only(backend: str, tmp_path: Path) -> None:
    model = load_decoder(tiny.write(tmp_path))
    tokens = prompts(12, 9)
    every = Cache(model, tokens).step([12, 9])
    some = Cache(model, tokens).step([12, 9], rows=[20, 3, 11])
    torch.testing.assert_close(some, every[[20, 3, 11]])
    cache = Cache(model, tokens)
    assert cache.step([11, 8], rows=[]).shape == (0, 131)
    torch.testing.assert_close(
        cache.step([1, 1]), every[[11, 20]], msg="a step without logits must still fill the cache"
    )


def check_context(directory: Path, context: int, length: int) -> None:
    tokens = prompts(length)
    model = load_decoder(directory, max_context=context)
    assert model.context == context
    assert_close([Cache(model, tokens).step([length])], oracle(directory, tokens))


def test_dynamic_rope_beyond_its_original_context(tmp_path: Path) -> None:
    check_context(tiny.write(tmp_path, "llama-dynamic"), context=100, length=100)


def test_longrope_within_its_original_context(tmp_path: Path) -> None:
    check_context(tiny.write(tmp_path, "llama-longrope"), context=16, length=16)


@pytest.mark.parametrize(
    ("narrow", "dtype", "used"),
    [
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float16, "auto", torch.bfloat16),
        (torch.float16, "float32", torch.float32),
        (torch.float16, "float16", torch.float16),
    ],
    ids=str,
)
def test_narrow_weights_only_round(
    narrow: torch.dtype, dtype: str, used: torch.dtype, backend: str, tmp_path: Path
) -> None:
    """Activations stay float32, so a model in a narrow dtype equals the float32 model of the rounded weights."""
    tensors = {name: t.to(narrow) for name, t in tiny.tensors(tiny.CONFIGS["llama"]).items()}
    wide = {name: t.to(used if t.dim() == 2 else narrow).float() for name, t in tensors.items()}
    model = load_decoder(tiny.write_tensors(tmp_path / "narrow", tiny.CONFIGS["llama"], tensors), dtype)
    exact = load_decoder(tiny.write_tensors(tmp_path / "wide", tiny.CONFIGS["llama"], wide))
    assert (model.dtype, exact.dtype) == (used, torch.float32)
    tokens = prompts(20)
    ours, wanted = Cache(model, tokens).step([20]), Cache(exact, tokens).step([20])
    if model.head.weight.layout is WeightLayout.BF16_TILES:  # it rounds activations too
        (theirs,) = oracle(tmp_path / "narrow", tokens, torch.bfloat16)
        assert (ours - wanted).abs().max() <= 2 * (theirs.float() - wanted).abs().max()
    else:
        assert_close([ours], [wanted])


def test_float16_checkpoint_is_close_to_transformers(backend: str, tmp_path: Path) -> None:
    directory, tokens = tiny.write(tmp_path, dtype=torch.float16), prompts(30)
    (exact,) = oracle(directory, tokens)
    for dtype in ("float16", "float32"):
        assert_close([Cache(load_decoder(directory, dtype), tokens).step([30])], [exact])
    ours = Cache(load_decoder(directory), tokens).step([30])
    errors = [
        float((logits.float() - exact).abs().max()) for logits in (ours, *oracle(directory, tokens, torch.bfloat16))
    ]
    assert 0 < errors[0] <= 1.5 * errors[1], errors  # bfloat16 weights, and float32 activations if the CPU has no AMX


def test_cast_rounds_matrices(tmp_path: Path) -> None:
    tensors = tiny.tensors(tiny.CONFIGS["llama"])
    rounded = {name: t.bfloat16() if t.dim() == 2 else t for name, t in tensors.items()}
    cast = load_decoder(tiny.write_tensors(tmp_path / "a", tiny.CONFIGS["llama"], tensors), "bfloat16")
    kept = load_decoder(tiny.write_tensors(tmp_path / "b", tiny.CONFIGS["llama"], rounded))
    tokens = prompts(20)
    assert torch.equal(Cache(cast, tokens).step([20]), Cache(kept, tokens).step([20]))
