"""Backends of GPUs whose kernels are not launched, for tensors on the meta device: only memory is allocated."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Literal

import pytest
import torch
from torch import Tensor

from emberline.kernels import ops, portable_backend
from emberline.kernels.comm import communicator
from emberline.kernels.cuda import driver, expert_layer, fp8, hopper_backend, narrow_layout, uw12, wide
from emberline.kernels.four_bit_size import count_packed_bytes
from emberline.kernels.packed_weight import PackedWeight, WeightLayout
from emberline.kernels.portable_backend import PortableBackend
from emberline.kernels.quantised_matrix import QuantisedMatrix
from emberline.kernels.triton import (
    activation,
    attention,
    experts,
    grouped,
    linear,
    narrow,
    norm,
    rope,
    router,
    routing,
)

TRITON_MODULES: tuple[ModuleType, ...] = (
    activation, attention, experts, grouped, linear, narrow, norm, rope, router, routing,
)  # fmt: skip
Form = Literal["plain", "packed", "fp8", "fp8 blocks", "int4", "mxfp4"]
BLOCK = 128


def use_meta_kernels(monkeypatch: pytest.MonkeyPatch, kernels: str) -> PortableBackend:
    """Let ops on meta tensors use the kernels of this name, whose launches do nothing, and return their backend."""
    backend = hopper_backend.HopperBackend() if kernels == "hopper" else PortableBackend()
    for module in (ops, communicator):
        monkeypatch.setattr(module, "backend_of", lambda tensor: backend)
    monkeypatch.setattr(driver.CudaKernel, "__call__", lambda *arguments, **more: None)
    monkeypatch.setattr(driver.CudaKernel, "load", lambda self: self)
    monkeypatch.setattr(driver, "_encode_tensor_map", lambda *arguments: None)
    monkeypatch.setattr(expert_layer.ExpertLayer, "_get_second_stream", lambda self, device: None)
    monkeypatch.setattr(expert_layer, "MAX_ROWS_IN_TWO_STREAMS", 0)
    monkeypatch.setattr(portable_backend, "multiply_float32", _multiply_float32)  # torch.mm makes no float32 on meta
    monkeypatch.setattr(hopper_backend, "multiply_float32", _multiply_float32)
    monkeypatch.setattr(linear, "arrival_counters", lambda device: _make(linear.MAX_TILES, dtype=torch.int32))
    monkeypatch.setattr(wide, "get_exchange_memory", lambda device: (None, None))
    monkeypatch.setattr(grouped, "has_bulk_copies", lambda: kernels == "hopper")
    monkeypatch.setattr(grouped, "TensorDescriptor", SimpleNamespace(from_tensor=lambda tensor, block: tensor))
    for module in TRITON_MODULES:
        for kernel in vars(module).values():
            if hasattr(kernel, "run") and hasattr(kernel, "fn"):
                monkeypatch.setattr(kernel, "run", lambda *arguments, **options: None)
    return backend


def make_weight(backend: PortableBackend, form: Form, n: int, k: int, *, gated: bool = False) -> PackedWeight:
    """Return a weight [n, k] without memory."""
    if form == "plain":
        return backend.pack_linear(_make(n, k), gated=gated)
    if form == "packed":
        planes = _make(n // 64, k // 64, 4, uw12.UNIT_BYTES, dtype=torch.uint8)
        packed = uw12.UW12Weight(planes, _make(n // 16, 512, dtype=torch.uint8), n, k)
        return PackedWeight(planes, n, k, torch.bfloat16, WeightLayout.UW12, gated, handle=packed)
    if form == "int4" and isinstance(backend, hopper_backend.HopperBackend):
        size = count_packed_bytes("int4", n, k, BLOCK)
        units = -(-k // narrow_layout.UNIT_COLUMNS)
        data = _make(1, n // 64, units, 4, size // (n // 16 * units), dtype=torch.uint8)
        made = narrow_layout.FourBitWeight(data, "Int4<1, false>", n, k, 1.0, None, None, gated)
        return PackedWeight(data, n, k, torch.bfloat16, WeightLayout.QUANTISED, gated, handle=made)
    matrix = describe(form, n, k)
    return fp8.pack(matrix, gated=gated) if _has_fp8(backend, form) else backend.pack_quantised(matrix, gated=gated)  # type: ignore[return-value]


def describe(form: Form, n: int, k: int) -> QuantisedMatrix:
    if form == "int4":
        return QuantisedMatrix("int4", _make(n, k // 2, dtype=torch.uint8), _make(n, k // BLOCK), 1, BLOCK)
    rows = BLOCK if form == "fp8 blocks" else 1
    scales = _make(n // rows, k // BLOCK if form == "fp8 blocks" else 1, dtype=torch.float32)
    return QuantisedMatrix("fp8", _make(n, k, dtype=torch.uint8), scales, rows, BLOCK if rows > 1 else k)


def _multiply_float32(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor | None) -> Tensor:
    return _make(len(x), weight.n, dtype=torch.float32)


def _has_fp8(backend: PortableBackend, form: Form) -> bool:
    return isinstance(backend, hopper_backend.HopperBackend) and form != "int4"


def _make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
