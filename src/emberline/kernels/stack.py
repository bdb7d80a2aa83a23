"""Consecutive dense decoder layers that run as one op: norm, attention, residual, then gated feed-forward likewise."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from emberline.kernels.cpu.library import NativeLayer
from emberline.kernels.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class DenseLayer:
    attention_norm: Tensor
    qkv: PackedWeight
    o: PackedWeight
    ffn_norm: Tensor
    gate_up: PackedWeight
    down: PackedWeight
    k_cache: Tensor
    v_cache: Tensor
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int = 0


class DenseStack:
    """Layers of one shape over caches that stay where they are; only the step's tensors change from call to call."""

    def __init__(
        self, layers: Sequence[DenseLayer], cos_sin: Tensor, heads: tuple[int, int, int], eps: float, scale: float
    ) -> None:
        first = layers[0]
        assert all((x.qkv.layout, x.k_cache.dtype) == (first.qkv.layout, first.k_cache.dtype) for x in layers)
        assert all(x.k_cache.stride() == first.k_cache.stride() for x in layers)
        self.layers, self.cos_sin, self.heads, self.eps, self.scale = tuple(layers), cos_sin, heads, eps, scale
        self.native = (NativeLayer * len(layers))(*map(_native, layers))


def _native(layer: DenseLayer) -> NativeLayer:
    weights = layer.qkv, layer.o, layer.gate_up, layer.down
    assert all(w.layout == layer.qkv.layout for w in weights) and layer.gate_up.gated
    vectors = layer.qkv_bias, layer.o_bias, layer.attention_norm, layer.ffn_norm, layer.q_norm, layer.k_norm
    return NativeLayer(
        *(ctypes.c_void_p(w.ptr) for w in weights),
        *(None if v is None else v.data_ptr() for v in vectors),
        layer.k_cache.data_ptr(),
        layer.v_cache.data_ptr(),
        layer.qkv.layout,
        layer.window,
    )
