"""DenseStack: consecutive dense decoder layers that run as one op."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from emberline.kernels.arguments import AttentionLayer, LinearLayer
from emberline.kernels.cpu.library import NativeLayer
from emberline.kernels.packed_weight import PackedWeight

MAX_PARTS = 2  # of one matrix


@dataclass(frozen=True, slots=True)
class DenseLayer:
    attention: AttentionLayer
    qkv: LinearLayer
    o: LinearLayer
    gate_up: LinearLayer
    down: LinearLayer

    @property
    def weights(self) -> tuple[PackedWeight, ...]:
        """The weights of all products. The rows of qkv may be split into parts with different layouts."""
        qkv = self.qkv.weight
        return *(qkv.parts or (qkv,)), self.o.weight, self.gate_up.weight, self.down.weight

    @property
    def can_run_natively(self) -> bool:
        """Whether native kernels exist for all weights. They support at most two parts per matrix."""
        return len(self.qkv.weight.parts) <= MAX_PARTS and all(weight.layout >= 0 for weight in self.weights)


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
    attention, qkv = layer.attention, layer.qkv.weight
    head, tail = qkv.parts or (qkv, None)
    weights = head, layer.o.weight, layer.gate_up.weight, layer.down.weight
    vectors = layer.qkv.bias, layer.o.bias, layer.qkv.norm, layer.gate_up.norm, attention.q_norm, attention.k_norm
    return NativeLayer(
        *(ctypes.c_void_p(w.ptr) for w in weights),
        None if tail is None else ctypes.c_void_p(tail.ptr),
        *(None if v is None else v.data_ptr() for v in vectors),
        *(w.layout for w in weights),
        attention.window,
        *((0, 0) if tail is None else (tail.layout, tail.n)),
    )
