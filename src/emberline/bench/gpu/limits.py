"""The shortest possible times of a model's steps on an H200, from measured bandwidth and arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from emberline.bench.gpu.shapes import shape_of
from emberline.bench.machine_limits import MachineLimits, TokenCost
from emberline.models.config import ModelConfig

H200 = MachineLimits({"read": 4390.0, "matmul": 758e3})  # GB/s of a reduction, GFLOP/s of an 8192^3 bf16 product
H200_FP8 = MachineLimits({"read": 4390.0, "matmul": 1530e3})  # cuBLAS with float8, 8192 x 28672 x 4096
PACKED_WEIGHT_BYTES = 12.03 / 8  # bytes per packed weight, from unweight-size.json
# Mean bytes per weight by the setting `weights`. The output head stays bf16. That is included for int4, and neglected
# for fp8, where its share is small.
WEIGHT_BYTES = {"packed": PACKED_WEIGHT_BYTES, "both": PACKED_WEIGHT_BYTES, "fp8": 1.0, "int4": 0.62}


def choose_limits(settings: Mapping[str, Any]) -> MachineLimits:
    return H200_FP8 if settings.get("weights") == "fp8" else H200


def compute_token_cost(settings: Mapping[str, Any]) -> TokenCost:
    total = TokenCost.from_config(ModelConfig.from_hf(shape_of(settings).hf_config))
    total = replace(total, width=WEIGHT_BYTES.get(str(settings.get("weights")), total.width))
    if "8" in str(settings.get("kv_dtype", "")):
        total = replace(total, kv_bytes=total.kv_bytes // 2)
    return total


def min_decode_step_ms(batch: int, context_tokens: float, cost: TokenCost, limits: MachineLimits = H200) -> float:
    """Return the shortest possible time of a decode step on this GPU, in milliseconds.

    It is the time to read all weights, keys and values once, or the time of the arithmetic, whichever is longer.
    """
    return 1e3 * batch / cost.max_decode_rate(limits, batch, round(context_tokens))


def min_prefill_ms(tokens: int, cost: TokenCost, limits: MachineLimits = H200) -> float:
    """Return the shortest possible time to compute a prompt on this GPU, in milliseconds.

    It is the time of the arithmetic in the linear layers and in causal attention.
    """
    return 1e3 * tokens / cost.max_prefill_rate(limits, tokens)
