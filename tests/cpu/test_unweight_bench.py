"""`bench unweight` on a matrix or two: figures that cannot be right are not reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from emberline.bench import unweight
from emberline.unweight.format import BLOCK_ELEMENTS


def test_figures_are_where_they_must_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    matrix = unweight.draw_gaussian(256 * 512).view(256, 512).bfloat16()
    odd = unweight.draw_student_t(100 * 70).view(100, 70).bfloat16()  # no multiple of 64: plain in memory
    monkeypatch.setattr(unweight, "matrices_by_model", lambda: [("one", [(matrix, 2.0)]), ("odd", [(odd, 1.0)])])
    monkeypatch.setattr(unweight, "TIMED", 3 * BLOCK_ELEMENTS)
    monkeypatch.setattr(unweight, "WARM_SECONDS", 0.01)
    monkeypatch.setattr(unweight, "PEERS", ("zstd-none", "absent"))
    results = unweight.bench(2, tmp_path).results
    disk, memory = results["disk_bits_per_weight_one"], results["memory_bits_per_weight_one"]
    assert disk.limit is not None and 10 < disk.limit < disk.value < 10.8 < 12 < memory.value < 12.3
    assert results["memory_bits_per_weight_odd"].value == 16
    assert results["disk_saved_one"].value == pytest.approx(100 * (1 - disk.value / 16))
    assert results["decode_1"].value > 0 and results["decode_1"].peer is None
    assert not any("/" in name for name in results)
    assert torch.equal(
        matrix.view(torch.int16), unweight.draw_gaussian(256 * 512).bfloat16().view(torch.int16).view(256, 512)
    )
