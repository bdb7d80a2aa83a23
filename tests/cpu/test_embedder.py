"""BertEmbedder compared with transformers' BertModel and manual pooling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from emberline.core.errors import ContextLengthExceeded, InvalidRequest, ModelFileError, UnsupportedModel
from emberline.engine.embedder import EmbedderProcess
from emberline.models import bert
from emberline.models.bert import BertEmbedder

transformers = pytest.importorskip("transformers")
TEXTS = [[1, 5, 9, 2], [1, 2], [1, *range(3, 40), 2], [1, 5, 9, 2], [1, 7, 7, 7, 2]]


@pytest.fixture(scope="module")
def model() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=64,
            initializer_range=0.3,
        )
        return transformers.BertModel(config).eval()


@pytest.fixture
def directory(model: Any, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path)
    return tmp_path


def oracle(model: Any, pooling: str) -> Tensor:
    with torch.inference_mode():
        states = [model(torch.tensor([ids])).last_hidden_state[0] for ids in TEXTS]
    return torch.nn.functional.normalize(torch.stack([s[0] if pooling == "cls" else s.mean(0) for s in states]))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("chunk", [1, 10, 4096])
def test_equals_transformers(
    model: Any, directory: Path, pooling: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bert, "MAX_CHUNK_TOKENS", chunk)
    mode = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}[pooling]
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({mode: True, "pooling_mode_max_tokens": False}))
    vectors = BertEmbedder.load(directory).embed(TEXTS)
    torch.testing.assert_close(vectors, oracle(model, pooling), atol=2e-6, rtol=1e-5)


def test_empty_input(directory: Path) -> None:
    assert BertEmbedder.load(directory).embed([]).shape == (0, 32)


def test_length_limit_is_the_smaller_one(directory: Path) -> None:
    assert BertEmbedder.load(directory).max_length == 64
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    embedder = BertEmbedder.load(directory)
    assert embedder.max_length == 20
    with pytest.raises(ContextLengthExceeded, match="21 tokens"):
        embedder.embed([[1] * 20, [1] * 21])


@pytest.mark.parametrize("ids", [[], [-1], [50]])
def test_invalid_token_ids(directory: Path, ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="input 1"):
        BertEmbedder.load(directory).embed([[1], ids])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model_type": "roberta"}, UnsupportedModel),
        ({"hidden_act": "relu"}, UnsupportedModel),
        ({"position_embedding_type": "relative_key"}, UnsupportedModel),
        ({"num_attention_heads": 5}, ModelFileError),
        ({"hidden_size": "32"}, ModelFileError),
        ({"num_hidden_layers": 4}, ModelFileError),
        ({"num_hidden_layers": 2}, ModelFileError),
        ({"intermediate_size": 49}, ModelFileError),
    ],
)
def test_unsupported_config(directory: Path, changes: dict[str, Any], error: type[Exception]) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(error):
        BertEmbedder.load(directory)


@pytest.mark.parametrize(
    ("pooling_config", "match"),
    [({"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"), ({"pooling_mode": "max"}, "max"), ({}, "none")],
)
def test_other_pooling_is_refused(directory: Path, pooling_config: dict[str, object], match: str) -> None:
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling_config))
    with pytest.raises(UnsupportedModel, match=match):
        BertEmbedder.load(directory)


def test_newer_pooling_field(directory: Path) -> None:
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 32, "pooling_mode": "cls"}')
    assert BertEmbedder.load(directory).pooling == "cls"


def test_unsupported_modules_are_refused(directory: Path) -> None:
    kinds = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Normalize"]
    (directory / "modules.json").write_text(json.dumps([{"type": kind} for kind in kinds]))
    assert BertEmbedder.load(directory).pooling == "mean"
    (directory / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(UnsupportedModel, match="Dense"):
        BertEmbedder.load(directory)
    (directory / "modules.json").write_text("{}")
    with pytest.raises(ModelFileError, match="list"):
        BertEmbedder.load(directory)


def test_embedding_process_reports_damaged_files(directory: Path) -> None:
    weights = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(weights[:-1])
    process = EmbedderProcess(directory, 1)
    try:
        for _ in range(2):
            with pytest.raises(ModelFileError, match="is damaged"):
                process.embed(TEXTS)
        (directory / "model.safetensors").write_bytes(weights)
        expected = BertEmbedder.load(directory).embed(TEXTS)
        assert torch.allclose(torch.tensor([list(vector) for vector in process.embed(TEXTS)]), expected, atol=1e-6)
    finally:
        process.stop()
