"""Training of drafters on a GPU: the target's states equal those on a CPU, and a run gives a readable drafter."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="needs what LLM needs"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import bytelevel

    directory = tmp_path_factory.mktemp("model")
    sizes = tiny.GPU_SIZES | {"vocab_size": bytelevel.VOCAB_SIZE, "eos_token_id": bytelevel.EOS}
    bytelevel.tokenizer_file(tiny.write(directory, tiny.config("llama", **sizes), dtype=torch.bfloat16))
    return directory


def test_states_and_logits_equal_those_on_a_cpu(model: Path) -> None:
    from emberline.drafter.target import TargetStates
    from emberline.engine.llm import LLM
    from emberline.models.loader import load_decoder

    random = np.random.default_rng(0)
    sequences = [random.integers(0, 256, size).astype(np.int32) for size in (5, 300, 1, 129, 64, 700)]
    spans = [range(len(each) // 2, len(each)) for each in sequences]
    layers = (0, 1, 2)
    (on_cpu,) = TargetStates(load_decoder(model, "float32"), layers, 768).compute(sequences, spans)
    with LLM(model, device="cuda", weights="plain", max_context=768, kv_memory=1 << 28) as llm:
        target = TargetStates(llm.engine.runner.model, layers, 768)
        (on_gpu,) = target.compute(sequences, spans)
    for ours, expected in zip(on_gpu, on_cpu, strict=True):
        error = (ours.float().cpu() - expected).norm() / expected.norm()
        assert error < 0.05, error


def test_training_on_a_gpu(model: Path, tmp_path: Path) -> None:
    from emberline.cli.__main__ import main
    from emberline.drafter.checkpoint import read_head

    options = ["--tokens=20000", "--round-prompts=256", "--max-answer=96", "--draft-vocab=128", "--epochs=2"]
    assert main(["drafter", "train", str(model), "--out", str(tmp_path), "--device=cuda", *options]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["tokens"] >= 20000 and report["steps"] > 2
    head, _ = read_head(tmp_path)
    assert all(bool(torch.isfinite(each).all()) for each in head.state_dict().values())
