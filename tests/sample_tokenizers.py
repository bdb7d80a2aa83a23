"""Tokenizers for the tests: small byte-level and SentencePiece-style ones, and that of SmolLM2."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from emberline.core.errors import DownloadError
from emberline.hub.source import resolve_model
from emberline.tokens import tokenizer as ours


def load(folder: Path, inner: Tokenizer) -> ours.Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    return ours.Tokenizer.load(folder)


def byte_level() -> Tokenizer:
    """All 256 bytes, a few merges (one of them inside a two-byte character and one across characters), two specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ã", "©"), ("Ġ", "Ã"), ("Ð", "¿"), ("Ñ", "Ģ"), ("ð", "Ł")]
    tokens = ["<|end|>", "<|user|>", *alphabet, *(a + b for a, b in merges)]
    inner = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|user|>", special=True)])
    inner.add_tokens([AddedToken("<tool é>", normalized=False)])
    return inner


def pieces() -> Tokenizer:
    """SentencePiece style: ▁ for spaces, byte fallback, a space before the text, bos added."""
    words = ["▁", "t", "h", "e", "a", "▁t", "he", "▁the", "é", "▁▁"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    vocab = {t: i for i, t in enumerate(tokens)}
    inner = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    inner.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return inner


def smollm2() -> Path:
    try:
        return resolve_model("smollm2", show_progress=False)
    except DownloadError as e:
        pytest.skip(f"SmolLM2 is not in the cache and cannot be downloaded: {e}")
