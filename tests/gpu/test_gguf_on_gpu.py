"""A GGUF file on a GPU: the logits of its dequantised values on a CPU, and an engine that serves it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import plain_gguf
import pytest
import torch
from gpu_settings import gpu_config
from test_families_on_gpu import check_logits, compute_logits, load_on

from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.gpu import boot
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.source import resolve_model
from emberline.kernels import ops
from emberline.models.loader import load_decoder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(autouse=True)
def restored_backend() -> Iterator[None]:
    yield
    ops.start_backend()


def make_model(directory: Path, quant: str) -> Path:
    plain_gguf.write_gguf(directory / "m.gguf", quant)
    return resolve_model(str(directory / "m.gguf"), directory / "cache")


@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0"])
def test_logits_equal_those_of_the_cpu(quant: str, tmp_path: Path) -> None:
    directory = make_model(tmp_path, quant)
    ops.start_backend(native=False)
    theirs = compute_logits(load_decoder(directory, "float32"), len(plain_gguf.TOKENS))
    ours = compute_logits(load_on("cuda", Checkpoint.open(directory), torch.bfloat16), len(plain_gguf.TOKENS))
    check_logits(ours, theirs, 0.02)


@pytest.mark.parametrize(("quant", "weights"), [("Q4_0", "auto"), ("Q8_0", "packed")])
def test_an_engine_serves_the_file(quant: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot, "CAPTURE_BUDGET_S", 0.2)
    settings = gpu_config(weights=weights, max_running=4, max_batch_tokens=256, kv_memory=64 << 20, max_context=512)
    engine = boot.boot_from_checkpoint(make_model(tmp_path, quant), settings).engine
    engine.add(Submission("a", list(range(40)), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)))
    tokens: list[int] = []
    while not engine.idle:
        tokens += [token for output in engine.step() for token in output.tokens]
    assert len(tokens) == 8
