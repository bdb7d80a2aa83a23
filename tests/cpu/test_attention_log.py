"""The start log names the attention that uses portable kernels, and why."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch

from emberline.engine.gpu.attention_log import log_portable_attention
from emberline.kernels.attention_support import DECODE, PREFILL, explain_portable_kernels
from emberline.kv.cache import KVShape
from emberline.models.config import ModelConfig

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("heads", "dtype", "cache", "block", "expected"),
    [
        ((32, 8, 128), BF16, BF16, 64, {}),
        ((64, 8, 64), BF16, FP8, 16, {}),
        ((16, 8, 256), BF16, FP8, 128, {}),
        ((32, 32, 96), BF16, BF16, 64, {DECODE: "a head size of 96"}),
        ((32, 32, 96), BF16, FP8, 64, {DECODE: "size of 96", PREFILL: "size of 96 with a float8 KV cache"}),
        ((32, 1, 128), BF16, BF16, 64, {DECODE: "32 query heads per KV head"}),
        ((32, 8, 192), BF16, BF16, 64, {DECODE: "size of 192", PREFILL: "size of 192"}),
        ((32, 8, 128), F32, F32, 64, {DECODE: "activations of float32", PREFILL: "activations of float32"}),
        ((32, 8, 128), BF16, F32, 64, {DECODE: "a KV cache of float32", PREFILL: "a KV cache of float32"}),
        ((32, 8, 128), BF16, BF16, 8, {DECODE: "block size of 8", PREFILL: "block size of 8"}),
    ],
)
def test_reasons(
    heads: tuple[int, int, int], dtype: torch.dtype, cache: torch.dtype, block: int, expected: dict[str, str]
) -> None:
    reasons = explain_portable_kernels(heads, dtype, cache, block)
    assert reasons.keys() == expected.keys()
    assert all(reasons[phase].endswith(reason) for phase, reason in expected.items())


def test_one_line_at_start(caplog: pytest.LogCaptureFixture) -> None:
    def log(dtype: torch.dtype, head_dim: int) -> list[str]:
        config = ModelConfig.from_hf(tiny.config("llama", head_dim=head_dim))
        model: Any = SimpleNamespace(config=config, dtype=dtype)
        caplog.clear()
        with caplog.at_level(logging.INFO, "emberline.engine"):
            log_portable_attention(model, KVShape(config.layers, config.kv_heads, head_dim, 64, dtype))
        return caplog.messages

    assert log(BF16, 128) == []
    start = "Attention uses portable kernels: model=llama layers=all"
    assert log(BF16, 96) == [f"{start} phases=decode reason=a head size of 96"]
    assert log(F32, 128) == [f"{start} phases=decode,prefill reason=activations of float32"]
