"""Weights of the portable backend, whose compressed values a GPU would make."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from emberline.kernels import portable_backend
from emberline.kernels.portable_backend import PortableBackend


def test_filled_weight_has_the_address_of_its_compressed_values(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.zeros(4, 8, dtype=torch.bfloat16)
    backend = PortableBackend()
    weight = backend.pack_linear(values[:0])
    packed = SimpleNamespace(planes=torch.zeros(48, dtype=torch.uint8), nbytes=48)
    monkeypatch.setattr(portable_backend.uw12, "pack", lambda values: packed)
    assert backend.fill_weight(weight, values) == 48
    assert weight.data is packed.planes and weight.ptr == packed.planes.data_ptr()
