"""The start log names the attention that uses portable kernels, and why."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch

from emberline.engine.gpu.attention_log import log_portable_attention
from emberline.kernels import worklist
from emberline.kernels.attention_support import DECODE, HEAD_DIMS, PREFILL, explain_portable_kernels
from emberline.kernels.cuda import decode
from emberline.kv.cache import KVShape
from emberline.models.config import ModelConfig

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("heads", "dtype", "cache", "block", "expected"),
    [
        ((32, 8, 128), BF16, BF16, 64, {}),
        ((64, 8, 64), BF16, FP8, 16, {}),
        ((16, 8, 256), BF16, FP8, 128, {}),
        ((32, 1, 128), BF16, FP8, 64, {}),
        ((32, 1, 192), BF16, BF16, 64, {DECODE: "32 query heads of size 192 per KV head"}),
        (
            (71, 1, 64),
            BF16,
            FP8,
            64,
            {DECODE: "per KV head", PREFILL: "with a float8 KV cache"},
        ),
        ((32, 8, 72), BF16, BF16, 64, {DECODE: "a head size of 72", PREFILL: "a head size of 72"}),
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
        model: Any = SimpleNamespace(config=config, dtype=dtype, device=torch.device("cpu"))
        caplog.clear()
        with caplog.at_level(logging.INFO, "emberline.engine"):
            log_portable_attention(model, KVShape(config.layers, config.kv_heads, head_dim, 64, dtype))
        return caplog.messages

    assert log(BF16, 128) == []
    start = "Attention uses portable kernels: model=llama layers=all"
    assert log(BF16, 72) == [f"{start} phases=decode,prefill reason=a head size of 72"]
    assert log(F32, 128) == [f"{start} phases=decode,prefill reason=activations of float32"]


def test_every_variant_of_decode_is_compiled_in_tests() -> None:
    for head_dim in HEAD_DIMS:
        for row_heads in range(1, worklist.max_row_heads(head_dim) + 1):
            for several, is_plain in ((False, False), (False, True), (True, False), (True, True)):
                variant = decode._choose_variant(head_dim, 2, row_heads, several, is_plain)
                assert str(variant) in decode.VARIANTS and variant.row_heads >= row_heads
                assert variant.several or not several
