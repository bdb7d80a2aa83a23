"""DenseStack: consecutive dense decoder layers that run as one op."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from emberline.kernels.arguments import AttentionLayer, LinearLayer
from emberline.kernels.cpu.library import NativeLayer
from emberline.kernels.packed_weight import PackedWeight


@dataclass(frozen=True, slots=True)
class DenseLayer:
    attention: AttentionLayer
    qkv: LinearLayer
    o: LinearLayer
    gate_up: LinearLayer
    down: LinearLayer

    @property
    def weights(self) -> tuple[PackedWeight, ...]:
        return self.qkv.weight, self.o.weight, self.gate_up.weight, self.down.weight


class DenseStack:
    """Decoder layers of equal shape, with the C structs that describe them to the native library.

    Each forward pass gives `run_dense_layers` its activations and the KV cache.
    """

    def __init__(self, layers: Sequence[DenseLayer]) -> None:
        assert len({weight.layout < 0 for layer in layers for weight in layer.weights}) == 1
        self.layers = tuple(layers)
        self.native = (NativeLayer * len(layers))(*map(_to_native_layer, layers))
        self._parts: dict[tuple[int, int], DenseStack] = {}

    def select_layers(self, begin: int, end: int) -> DenseStack:
        """Return a stack of the layers [begin, end)."""
        if (begin, end) == (0, len(self.layers)):
            return self
        if (begin, end) not in self._parts:
            self._parts[begin, end] = DenseStack(self.layers[begin:end])
        return self._parts[begin, end]


def _to_native_layer(layer: DenseLayer) -> NativeLayer:
    assert layer.gate_up.weight.gated and layer.down.bias is layer.gate_up.bias is None
    attention = layer.attention
    vectors = layer.qkv.bias, layer.o.bias, layer.qkv.norm, layer.gate_up.norm, attention.q_norm, attention.k_norm
    return NativeLayer(
        *(ctypes.c_void_p(w.ptr) for w in layer.weights),
        *(None if v is None else v.data_ptr() for v in vectors),
        *(w.layout for w in layer.weights),
        attention.window,
    )
