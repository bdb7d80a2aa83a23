"""EmbeddingModel: names, and texts that are longer than the model's context."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path
from typing import Any

import pytest
from bytelevel import byte_level

from emberline.api.call import CommonFields, EmbeddingCall
from emberline.core.errors import ContextLengthExceeded, ModelNotFound
from emberline.worker.embedding_model import EmbeddingModel


class RecordingProcess:
    def __init__(self) -> None:
        self.inputs: list[list[int]] = []

    def embed(self, inputs: list[list[int]]) -> list[array[float]]:
        self.inputs = inputs
        return [array("f", [1.0, 0.0]) for _ in inputs]


@pytest.fixture
def model(tmp_path: Path) -> EmbeddingModel:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"hidden_size": 2, "max_position_embeddings": 4}')
    made = EmbeddingModel("e", tmp_path, 1)
    made._process = RecordingProcess()  # type: ignore[assignment]
    return made


def embed(model: EmbeddingModel, *texts: str, name: str = "e", **fields: Any) -> list[list[int]]:
    asyncio.run(model.embed(EmbeddingCall(CommonFields(name), texts, **fields)))
    process: Any = model._process
    return process.inputs


def test_long_text_is_an_error_unless_it_may_be_cut(model: EmbeddingModel) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"input\[1\] has 6 tokens"):
        embed(model, "ab", "abcdef")
    short, cut = embed(model, "ab", "abcdef", truncates=True)
    whole = embed(model, "abc", "f")
    assert short == embed(model, "ab")[0]
    assert cut == [*whole[0], *whole[1]]  # the last token ends the text, as BERT's [SEP] does


def test_tag_latest_is_accepted(model: EmbeddingModel) -> None:
    assert embed(model, "a", name="e:latest") == embed(model, "a", name="")
    with pytest.raises(ModelNotFound):
        embed(model, "a", name="other")
