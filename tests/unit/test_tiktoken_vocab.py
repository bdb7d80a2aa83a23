"""Checkpoints with a tiktoken.model get a tokenizer.json that encodes as tiktoken does."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.hub.source import resolve_model
from emberline.tokens.tokenizer import Tokenizer

WORDS = [b"he", b"ll", b"hell", b"o ", b"hello", b" w", b" wo", b"or", b"ld", b"\xe4\xb8", b"\xe4\xb8\xad", b"zzzz"]
SPECIAL = {"[BOS]": 268, "<|im_end|>": 270}


def write(directory: Path, **changes: Any) -> Path:
    """Write a vocabulary of all bytes and a few words, of which the last is not merged from others."""
    tokens = [bytes([byte]) for byte in range(256)] + WORDS
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (directory / "tiktoken.model").write_text("".join(lines))
    added = {str(id_): {"content": text, "special": True} for text, id_ in SPECIAL.items()}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added, **changes}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text("{}")
    return directory


def encode(piece: bytes) -> list[int]:
    """Merge the pair with the lowest rank, as tiktoken does; a piece that is a token is one."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(WORDS)}
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        pairs = [(ranks.get(a + b, 9999), at) for at, (a, b) in enumerate(pairwise(parts))]
        if not pairs or min(pairs)[0] == 9999:
            return [ranks[part] for part in parts]
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_tokens_equal_those_of_tiktoken(tmp_path: Path) -> None:
    source = tmp_path / "kimi"
    source.mkdir()
    found = resolve_model(str(write(source)), tmp_path / "cache")
    assert found != source and (found / "config.json").resolve() == (source / "config.json").resolve()
    tokenizer = Tokenizer.load(found)
    pieces = [b"hello", b" world", b"\xe4\xb8\xad\xe6\x96\x87", b"helloz", b" ", b"123", b"4", b"\n\n", b"zzzz"]
    text = b"".join(pieces).decode()
    assert tokenizer.encode(text) == [token for piece in pieces for token in encode(piece)]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("[BOS]hello<|im_end|>") == [268, 260, 270] and tokenizer.special_ids == {268, 269, 270}
    assert resolve_model(str(source), tmp_path / "cache") == found, "made once"
    (source / "more.json").write_text("{}")
    assert (resolve_model(str(source), tmp_path / "cache") / "more.json").exists()


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"tokenizer_class": "QWenTokenizer"}, UnsupportedModel, "tokenizer_class 'QWenTokenizer'"),
        ({"added_tokens_decoder": None}, ModelFileError, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"3": {"content": "[BOS]"}}}, ModelFileError, "ids from 268"),
        ({"added_tokens_decoder": {"99999999999": {"content": "[BOS]"}}}, ModelFileError, "ids from 268 to 4194303"),
        (
            {"added_tokens_decoder": {"269": {"content": "<|reserved_token_268|>"}}},
            ModelFileError,
            "two ids for one token",
        ),
    ],
)
def test_other_tokenizers_are_refused(
    changes: dict[str, Any], error: type[Exception], word: str, tmp_path: Path
) -> None:
    write(tmp_path, **changes)
    with pytest.raises(error, match=word):
        resolve_model(str(tmp_path), tmp_path / "cache")


@pytest.mark.parametrize("line", ["YQ==", "YQ== x", "&& 1", "YQ== 7"])
def test_damaged_ranks_are_refused(line: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "tiktoken.model").write_text(f"IQ== 0\n{line}\n")
    with pytest.raises(ModelFileError, match=r"tiktoken\.model"):
        resolve_model(str(tmp_path), tmp_path / "cache")
