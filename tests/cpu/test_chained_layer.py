"""Layers whose products are one op: the same tokens in every step, and only where nothing is between the products."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import family_cases
import pytest
import tiny
import torch
from host_engine import booted, plain_arithmetic
from test_gpu_capture_ahead import generate
from torch import Tensor

from emberline.kernels import backend
from emberline.kernels.arguments import LayerProducts, LinearOutput
from emberline.kernels.cuda import chain
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES
from emberline.kernels.cuda.narrow_layout import FourBitWeight
from emberline.kernels.reference import ReferenceBackend
from emberline.models.chained_layer import ChainedLayer
from emberline.models.loader import load_decoder


@pytest.fixture(autouse=True)
def arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_backend", None)
    plain_arithmetic()


def test_chained_products_keep_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one token have the op, and chunks of the prompt have not."""
    tiny.write(tmp_path, tiny.config("llama"), seed=1)
    expected, rows = generate(booted(tmp_path).engine, "one by one"), []

    def run(self: ReferenceBackend, mixed: Tensor, x: Tensor, products: LayerProducts) -> Tensor | None:
        rows.append(len(x))
        if len(x) > 1:
            return None
        self.linear(mixed, products.o, LinearOutput(add_to=x))
        inner = self.gate_up_silu(x, products.gate_up)
        self.linear(inner, products.down, LinearOutput(add_to=x))
        return self.linear(x, products.qkv, LinearOutput())

    monkeypatch.setattr(ReferenceBackend, "run_layer_products", run)
    booted_engine = booted(tmp_path)
    assert generate(booted_engine.engine, "chained") == expected
    layers = booted_engine.runner.model.config.layers
    assert rows.count(1) % (layers - 1) == 0 and rows.count(1) >= 11 * (layers - 1) > 0 and max(rows) > 1


@pytest.mark.parametrize(
    ("name", "is_chained"), [("llama", True), ("qwen3", True), ("gemma3-256", False), ("cohere-64", False)]
)
def test_layers_with_something_between_their_products(name: str, is_chained: bool, tmp_path: Path) -> None:
    """Norms of outputs, other activations, and one norm for both parts of a layer."""
    if name in ("llama", "qwen3"):
        tiny.write(tmp_path, tiny.config(name))
    else:
        family, config = family_cases.WIDE_CONFIGS[name]
        tiny.write_tensors(tmp_path, config, family.tensors(config))
    for layer in load_decoder(tmp_path, "float32").layers:
        assert (ChainedLayer.make_if_supported(layer.attention, layer.ffn) is not None) == is_chained


LLAMA_8B = ((4096, 4096), (28672, 4096), (4096, 14336), (6144, 4096))
LLAMA_70B = ((8192, 8192), (57344, 8192), (8192, 28672), (10240, 8192))
SHAPES = [LLAMA_8B, LLAMA_70B, ((1024, 2048), (6144, 1024), (1024, 3072), (4096, 1024))]  # the last: Qwen3 0.6B


def make_weight(n: int, k: int, columns: Tensor | None = None) -> FourBitWeight:
    data = torch.empty(1, n // 64, k // 128, 4, 1056, dtype=torch.uint8, device="meta")
    return FourBitWeight(data, "Int4<1, false>", n, k, 1.0, None, columns)


@pytest.mark.parametrize("shapes", SHAPES)
def test_shared_memory(shapes: tuple[tuple[int, int], ...]) -> None:
    weights = [make_weight(*shape) for shape in shapes]
    for rows in range(1, chain.MAX_ROWS + 1):
        layout = chain.ChainMemory.make(rows, weights)
        assert layout.total_bytes <= MAX_SHARED_BYTES or layout.stages == 0
        assert chain.supports(rows, weights, shapes[1][1]) == (layout.stages >= 2)
    assert chain.supports(1, weights, shapes[1][1])
    assert ctypes.sizeof(chain._Chain) == 352, "the size that chain.cu expects"


def test_weights_without_a_kernel() -> None:
    """Of other sizes, of different formats, and with columns in another order."""
    weights = [make_weight(*shape) for shape in SHAPES[2]]
    assert chain.supports(1, weights, 1024) and not chain.supports(0, weights, 1024)
    assert not chain.supports(1, weights, chain.MAX_NORMED_COLUMNS + 128)
    assert not chain.supports(1, [*weights, *weights], 1024)
    ordered = make_weight(1024, 2048, torch.arange(2048))
    other = replace(make_weight(1024, 2048), format="Int4<2, false>")
    for unsupported in (make_weight(1024 - 16, 2048), ordered, other):
        assert not chain.supports(1, [unsupported, *weights[1:]], 1024)
    assert not chain.supports(1, [ordered], 1024)
