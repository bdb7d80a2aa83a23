"""DenseStack: consecutive dense decoder layers that run as one op."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from emberline.kernels.cpu.library import NativeLayer
from emberline.kernels.packed_weight import PackedWeight


@dataclass(frozen=True, slots=True)
class DenseLayer:
    attention_norm: Tensor
    qkv: PackedWeight
    o: PackedWeight
    ffn_norm: Tensor
    gate_up: PackedWeight
    down: PackedWeight
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int = 0

    @property
    def weights(self) -> tuple[PackedWeight, ...]:
        return self.qkv, self.o, self.gate_up, self.down


class DenseStack:
    """Layers of one shape, described to the native library once.

    Each step passes its own tensors and the KV cache.
    """

    def __init__(
        self, layers: Sequence[DenseLayer], cos_sin: Tensor, heads: tuple[int, int, int], eps: float, scale: float
    ) -> None:
        assert len({weight.layout for layer in layers for weight in layer.weights}) == 1
        self.layers, self.cos_sin, self.heads, self.eps, self.scale = tuple(layers), cos_sin, heads, eps, scale
        self.native = (NativeLayer * len(layers))(*map(_to_native, layers))


def _to_native(layer: DenseLayer) -> NativeLayer:
    assert layer.gate_up.gated
    vectors = layer.qkv_bias, layer.o_bias, layer.attention_norm, layer.ffn_norm, layer.q_norm, layer.k_norm
    return NativeLayer(
        *(ctypes.c_void_p(w.ptr) for w in layer.weights),
        *(None if v is None else v.data_ptr() for v in vectors),
        layer.qkv.layout,
        layer.window,
    )
