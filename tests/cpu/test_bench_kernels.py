"""The bench of CPU kernels measures whole steps and single products, here of small sizes."""

from __future__ import annotations

import pytest

from emberline.bench import kernels
from emberline.bench.machine_limits import MachineLimits


def test_steps_and_products_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = MachineLimits({"read_sum": 10.0, "matmul_float32": 100.0})
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setattr(kernels, "SMOLLM2", kernels.SMOLLM2 | small | {"intermediate_size": 96, "vocab_size": 128})
    monkeypatch.setattr(kernels, "STEPS", {"decode_2": (2, 1, 20), "prefill_16": (1, 16, 0)})
    monkeypatch.setattr(kernels, "LINEARS", {"down": (64, 96), "8b_o": (64, 256)})
    monkeypatch.setattr(kernels, "ROWS", (1, 20))
    monkeypatch.setattr(kernels, "SMALL_BLOCK_TYPES", ())
    monkeypatch.setattr(kernels, "SECONDS", 0.001)
    monkeypatch.setattr(kernels, "MIN_COPIED_BYTES", 1 << 18)  # many copies of small weights would take long
    monkeypatch.setattr(kernels, "last_level_cache_bytes", lambda: 0)
    monkeypatch.setattr(kernels.machine_limits, "measure_limits", lambda threads: limits)
    results = kernels.bench(2).results
    expected = {"decode_2", "decode_2_attention", "prefill_16", "down_1", "down_20", "8b_o_20"}
    assert expected <= set(results)
    assert all(results[name].value > 0 for name in expected)
