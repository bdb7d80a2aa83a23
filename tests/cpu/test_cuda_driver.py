"""Tensor maps of GPU kernels, as far as they can be tested without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from emberline.kernels.cuda import driver


class EncodingDriver:
    """Counts the encoded tensor maps, and writes the address of the tensor into each."""

    def __init__(self) -> None:
        self.count = 0

    def cuTensorMapEncodeTiled(self, result: object, kind: int, dims: int, address: ctypes.c_void_p, *_: object) -> int:
        self.count += 1
        result._obj.opaque[0] = address.value  # type: ignore[attr-defined]
        return 0


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[EncodingDriver]:
    library = EncodingDriver()
    monkeypatch.setattr(driver, "driver_library", lambda: library)
    driver._encode_tensor_map.cache_clear()
    yield library
    driver._encode_tensor_map.cache_clear()


def test_a_tensor_map_is_encoded_once(encoding: EncodingDriver) -> None:
    x = torch.zeros(64, 128, dtype=torch.bfloat16)
    first = driver.make_tensor_map(x, (8, 64))
    assert driver.make_tensor_map(x[:], [8, 64]).opaque[0] == first.opaque[0] == x.data_ptr()
    assert encoding.count == 1


def test_other_tensors_and_boxes_have_other_maps(encoding: EncodingDriver) -> None:
    x = torch.zeros(64, 128, dtype=torch.bfloat16)
    others = [
        (x[8:], (8, 64), 128),
        (x[:8], (8, 64), 128),
        (x[::2], (8, 64), 128),
        (x, (16, 64), 128),
        (x, (8, 32), 64),
    ]
    for count, (tensor, box, swizzle) in enumerate(others, 1):
        assert driver.make_tensor_map(tensor, box, swizzle=swizzle).opaque[0] == tensor.data_ptr()
        assert encoding.count == count
    driver.make_tensor_map(x.view(torch.int32), (8, 64))
    assert encoding.count == len(others) + 1
