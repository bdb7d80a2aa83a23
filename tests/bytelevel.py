"""A tokenizer of 256 bytes and a few specials, for tests that need a real one and no download."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ["<|end|>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]"]
EOS, SPECIAL = 256, 257
VOCAB_SIZE = 256 + len(SPECIALS)


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def build() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return tokenizer


def encode(text: str) -> list[int]:
    ids: list[int] = build().encode(text, add_special_tokens=False).ids
    return ids


def tokenizer_file(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    build().save(str(path))
    return path
