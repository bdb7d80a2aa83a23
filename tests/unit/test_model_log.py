"""The server's log says in which dtype a model runs, when its weights were rounded, and what its KV cache holds."""

from __future__ import annotations

import logging

import pytest

from emberline.core.numerics import Numerics
from emberline.engine.messages import LoadedModelInfo
from emberline.worker.main import _log_models


def info(stored: str, used: str) -> LoadedModelInfo:
    return LoadedModelInfo(
        max_context=64, vocab_size=10, eos=[2], kv_tokens=64, block_size=16, weight_bytes=1, kv_bytes=1, kernels="test",
        layout="", max_running=1, seconds={}, numerics=Numerics("", used, "plain", used, "cpu"), stored_dtype=stored,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stored", "used", "is_rounded"),
    [
        ("float16", "bfloat16", True),
        ("float16", "float16", False),
        ("float16", "float32", False),
        ("bfloat16", "bfloat16", False),
    ],
)
def test_rounded_weights_are_logged(stored: str, used: str, is_rounded: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "emberline.server")
    _log_models({"m": info(stored, used)})
    assert ("Weights rounded: model=m from=float16 to=bfloat16" in caplog.text) is is_rounded
    assert f"Model loaded: model=m dtype={used} " in caplog.text


def test_the_kv_cache_of_groups_of_layers_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "emberline.server")
    loaded = info("bfloat16", "bfloat16")
    loaded.kv_groups, loaded.kv_contexts = 6, 12.345
    _log_models({"m": loaded})
    assert "context_tokens=64 kv_tokens=64 kv_groups=6 full_contexts=12.3 " in caplog.text


def test_cut_context_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "emberline.server")
    cut = info("bfloat16", "bfloat16")
    cut.full_context = 10485760
    _log_models({"m": cut})
    assert "Default context cut: model=m model_context_tokens=10485760 (hint: --max-context" in caplog.text
    caplog.clear()
    _log_models({"m": info("bfloat16", "bfloat16")})
    assert "Default context cut" not in caplog.text


def test_dequantised_weights_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "emberline.server")
    _log_models({"m": info("mxfp4", "bfloat16")})
    assert "Weights dequantised: model=m from=mxfp4 kept_as=bfloat16" in caplog.text and "weights_mb=" in caplog.text
