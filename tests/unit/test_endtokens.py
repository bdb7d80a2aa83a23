"""end_tokens: end tokens are collected from all files of a model; damaged files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sample_tokenizers as made

from emberline.core.errors import ModelFileError
from emberline.hub.checkpoint import Checkpoint
from emberline.models.endtokens import collect_end_tokens
from emberline.models.registry import ARCHITECTURES

VOCAB = 300


def end_ids(folder: Path, config: Any = None, generation: Any = None, tokenizer: Any = None) -> tuple[int, ...]:
    ids = [{} if given is None else {"eos_token_id": given} for given in (config, generation)]
    return collect_end_tokens(Checkpoint(folder, *ids, {"eos_token": tokenizer}, {}), VOCAB)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model directory whose tokenizer has 0 as <|end|> and 1 as <|user|>."""
    made.byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_end_tokens_of_all_three_files(folder: Path) -> None:
    assert end_ids(folder) == ()
    assert end_ids(folder, 7, [5, 7, 6], {"content": "<|end|>"}) == (7, 5, 6, 0)
    assert end_ids(folder, None, 1, "<|user|>") == (1,)
    assert end_ids(folder, 7, None, "no such token") == (7,)


def test_turn_ends_of_a_family(folder: Path) -> None:
    checkpoint = Checkpoint(folder, {"eos_token_id": 7}, {}, {}, {})
    assert collect_end_tokens(checkpoint, VOCAB, ("<|user|>", "<end_of_turn>")) == (7, 1)
    ends = {name: arch.turn_end_tokens for name, arch in ARCHITECTURES.items() if arch.turn_end_tokens}
    assert ends["gemma2"] == ends["gemma3_text"] == ("<end_of_turn>",)
    assert ends["cohere"] == ends["cohere2"] == ("<|END_OF_TURN_TOKEN|>",)


def test_ids_outside_the_vocabulary_are_dropped(folder: Path) -> None:
    assert end_ids(folder, [VOCAB - 1, VOCAB], 1 << 40, "<|end|>") == (VOCAB - 1, 0)


def test_any_json_formatting(folder: Path) -> None:
    file = folder / "tokenizer.json"
    for indent in (None, 2):
        file.write_text(json.dumps(json.loads(file.read_text()), indent=indent))
        assert end_ids(folder, tokenizer="<|end|>") == (0,)


def test_without_a_tokenizer(tmp_path: Path) -> None:
    assert end_ids(tmp_path, 7, None, "<|end|>") == (7,)


@pytest.mark.parametrize("added", ["[", '[{"id": "0", "content": "<|end|>"}]', '[{"id": -1, "content": "<|end|>"}]'])
def test_damaged_tokenizer_is_an_error(tmp_path: Path, added: str) -> None:
    (tmp_path / "tokenizer.json").write_text(f'{{"added_tokens": {added}')
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        end_ids(tmp_path, tokenizer="<|end|>")


def test_smollm2() -> None:
    checkpoint = Checkpoint.open(made.smollm2())
    assert collect_end_tokens(checkpoint, 49152) == (2,)
    assert collect_end_tokens(Checkpoint(checkpoint.directory, {}, {}, checkpoint.tokenizer_config, {}), 49152) == (2,)
