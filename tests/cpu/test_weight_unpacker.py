"""WeightUnpacker: each product reads its own weight, no weight is overwritten too early, and no stream waits too long.

The streams that could run at the same time are those of `race_detector`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from race_detector import RaceDetector, TrackedStream
from torch import Tensor

from emberline.engine.gpu.device import DeviceEvent, HostStream
from emberline.kernels import backend, ops
from emberline.kernels.cuda.uw12 import UW12Weight
from emberline.kernels.packed_weight import PackedWeight, WeightLayout
from emberline.kernels.uw12_ref import reference_pack, reference_unpack
from emberline.kernels.weight_unpacker import WeightUnpacker
from emberline.models.forward import ForwardBatch
from emberline.models.loader import load_decoder

SHAPES = [(128, 64), (64, 128), (192, 64), (64, 64), (64, 192)] * 2


@pytest.fixture
def rows() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(n, k).bfloat16() for n, k in SHAPES]


def packed(weight: Tensor) -> PackedWeight:
    made = reference_pack(weight, max_bits=99.0)
    assert made is not None
    return PackedWeight(made.planes, made.n, made.k, weight.dtype, WeightLayout.UW12, handle=made)


def unpack(weight: PackedWeight, out: Tensor) -> None:
    assert isinstance(weight.handle, UW12Weight)
    out.copy_(reference_unpack(weight.handle))


class NonWaitingStream(TrackedStream):
    """A stream that does not wait for events."""

    def wait_event(self, event: DeviceEvent) -> None:
        return


class UnpackedProducts:
    """Runs products one after the other, as a model does."""

    def __init__(self, rows: list[Tensor], non_waiting: str = "") -> None:
        self.device = RaceDetector()
        self.rows, self.weights = rows, [packed(weight) for weight in rows]
        names = {"computing": "steps", "unpacking": "lane 1"}
        self.computing, self.unpacking = (
            (NonWaitingStream if role == non_waiting else TrackedStream)(self.device, name)
            for role, name in names.items()
        )
        self.unpacker = WeightUnpacker(self.weights, len(rows), self.computing, self.unpacking, unpack)
        self.step()  # allocates the buffers
        self.device.watch(buffer_tensors=self.buffer_tensors)

    @property
    def buffer_tensors(self) -> list[Tensor]:
        return [buffer.memory for buffer in self.unpacker._buffers]

    def step(self, skipped: int = -1) -> list[tuple[int, int]]:
        """Run all products and return, after each, the computing stream's progress and what unpacking awaited.

        `skipped`: a product that reads its packed weight directly, so that unpacking of the next one was not started.
        """
        self.unpacker.begin_step()
        with self.device, self.computing.activate():
            return [self.product(i, i + 1 != skipped) for i in range(len(self.rows)) if i != skipped]

    def product(self, i: int, unpack_next: bool = True) -> tuple[int, int]:
        weight, pasts = self.weights[i], self.device.pasts
        x = torch.ones(1, weight.k, dtype=torch.bfloat16)
        with self.unpacker.unpacked_rows(
            weight, self.unpacker.next_weight(weight) if unpack_next else None
        ) as unpacked:
            product = x @ unpacked.t()
        done = pasts["steps"].get("steps", 0), pasts["lane 1"].get("steps", 0)
        assert torch.equal(product, x @ self.rows[i].t())
        return done


def test_each_product_reads_its_own_weight_without_races(rows: list[Tensor]) -> None:
    products = UnpackedProducts(rows)
    for skipped in (-1, -1, 0, 3, len(rows) - 1, -1):
        products.step(skipped)
    assert products.device.races == []


@pytest.mark.parametrize("non_waiting", ["computing", "unpacking"])
def test_missing_wait_is_detected(rows: list[Tensor], non_waiting: str) -> None:
    products = UnpackedProducts(rows, non_waiting)
    products.step()
    assert any("buffer_tensors" in race for race in products.device.races)


def test_unpacking_waits_only_for_the_product_that_read_the_buffer(rows: list[Tensor]) -> None:
    seen = UnpackedProducts(rows).step()
    for (before, _), (done, waited) in pairwise(seen[:-1]):
        assert before == waited < done


def test_interrupted_step_does_not_leave_a_stale_weight(rows: list[Tensor]) -> None:
    products = UnpackedProducts(rows)
    products.product(0)  # unpacking of the second weight was started
    for buffer in products.buffer_tensors:  # as the replay of a captured step would, without Python
        buffer.fill_(float("nan"))
    products.unpacker.begin_step()
    products.product(1)
    products.unpacker.release()
    assert not products.buffer_tensors
    products.step()


def record_weight(op: Callable[..., Tensor], used: list[PackedWeight]) -> Callable[..., Tensor]:
    def run(x: Tensor, layer: ops.LinearLayer, **options: Any) -> Tensor:
        used.append(layer.weight)
        return op(x, layer, **options)

    return run


@pytest.mark.parametrize("biased", [False, True])
def test_model_uses_weights_in_the_declared_order(
    biased: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_backend", ops.ReferenceBackend("asked for"))
    model = load_decoder(tiny.write(tmp_path, {**tiny.CONFIGS["llama"], "mlp_bias": biased}))
    used: list[PackedWeight] = []
    for op in ("linear", "gate_up_silu"):
        monkeypatch.setattr(ops, op, record_weight(getattr(ops, op), used))
    c, at, one = model.config, torch.arange(6), torch.zeros(1, dtype=torch.int32)
    keys, values = torch.zeros(2, c.layers, 1, c.kv_heads, 8, c.head_dim)
    start = torch.tensor([0, 6], dtype=torch.int32)
    metadata = ops.AttentionMetadata(at.int(), at, start, one, one[None])
    model.forward(ForwardBatch(at + 3, metadata, torch.tensor([5]), keys, values))
    unpacker = model.make_unpacker(HostStream(), HostStream())
    assert used[-1] is model.head.weight and len(used) == 4 * c.layers + 1
    following, last = [unpacker.next_weight(weight) for weight in used], 4 * (c.layers - 1)
    assert following[:last] == used[1 : last + 1] and following[last:] == [None] * 5
    assert unpacker._max_elements == max(weight.n * weight.k for weight in used[:-1])
