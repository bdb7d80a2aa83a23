"""Tokenizer: round trips, the exact bytes of tokens, special ids, and invalid files."""

from __future__ import annotations

from pathlib import Path

import pytest
import sample_tokenizers as made
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from emberline.core.errors import InvalidRequest, ModelFileError, UnsupportedModel
from emberline.tokens.tokenizer import Alphabet, Tokenizer

# SmolLM2's vocabulary lacks 21 bytes, among them six control characters and the leads of planes 4 to 15.
LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF)
TEXT = st.text(LETTERS, max_size=40)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.load(made.smollm2())


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return made.load(tmp_path_factory.mktemp("bytes"), made.byte_level())


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return made.load(tmp_path_factory.mktemp("pieces"), made.pieces())


def test_smollm2_known_ids(smollm2: Tokenizer) -> None:
    assert smollm2.alphabet is Alphabet.BYTE_LEVEL
    assert smollm2.vocab_size == 49152
    assert smollm2.special_ids == set(range(17))
    assert smollm2.encode("Hello 42\n<|im_end|>") == [19556, 216, 36, 34, 198, 2]
    assert smollm2.token_text(19556) == "Hello"


@settings(max_examples=200, deadline=None)
@given(text=TEXT)
def test_smollm2_round_trip(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    assert smollm2.decode(ids, skip_special=False) == text
    assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()


@settings(max_examples=200, deadline=None)
@given(text=TEXT)
def test_round_trips(byte_level: Tokenizer, pieces: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text), skip_special=False) == text
    plain = text.replace("▁", "")  # SentencePiece cannot distinguish it from a space
    ids = pieces.encode(plain, add_special=False)
    if plain and not any(special in plain for special in ("<s>", "</s>", "<unk>")):
        assert pieces.decode(ids) == plain
        assert b"".join(map(pieces.token_bytes, ids)) == b" " + plain.encode()


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 265), max_size=30))
def test_decode_agrees_with_the_library(byte_level: Tokenizer, ids: list[int]) -> None:
    for skip in (True, False):
        assert byte_level.decode(ids, skip) == byte_level._inner.decode(ids, skip_special_tokens=skip)


def test_bytes_of_tokens(byte_level: Tokenizer, pieces: Tokenizer) -> None:
    def spell(tokenizer: Tokenizer, token: str) -> bytes:
        id_ = tokenizer.token_id(token)
        assert id_ is not None
        return tokenizer.token_bytes(id_)

    assert spell(byte_level, "Ġthe") == b" the"
    assert spell(byte_level, "ðŁ") == b"\xf0\x9f"
    assert spell(byte_level, "<|end|>") == b"<|end|>"
    assert spell(byte_level, "<tool é>") == "<tool é>".encode()
    assert spell(pieces, "▁the") == b" the"
    assert spell(pieces, "<0xFF>") == b"\xff"
    assert byte_level.token_bytes(10**6) == byte_level.token_bytes(-1) == byte_level.token_bytes(2**40) == b""


def test_special_tokens(byte_level: Tokenizer, pieces: Tokenizer) -> None:
    ids = byte_level.encode("the<|end|><tool é>")
    assert byte_level.decode(ids) == "the<tool é>"
    assert byte_level.decode(ids, skip_special=False) == "the<|end|><tool é>"
    assert pieces.encode("a")[0] == 1
    assert pieces.encode("a", add_special=False)[0] != 1


def test_encode_batch(byte_level: Tokenizer) -> None:
    texts = ["the", "", "é the"]
    assert byte_level.encode_batch(texts) == [byte_level.encode(t) for t in texts]


def test_truncation_in_the_file_is_ignored(tmp_path: Path) -> None:
    inner = made.byte_level()
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    assert len(made.load(tmp_path, inner).encode("xyzwv")) == 5


def test_half_a_surrogate_pair_is_rejected(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        byte_level.encode("a\ud800b")


def test_invalid_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    for content in ("", "{}", "[]", '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ModelFileError):
            Tokenizer.load(tmp_path)


def test_panic_of_the_library_is_an_invalid_request() -> None:
    """The pattern backtracks more often than the library allows, which then panics."""
    inner = made.byte_level()
    split = pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer = Tokenizer(inner)
    with pytest.raises(InvalidRequest, match=r"cannot be converted to tokens.*retry-limit") as caught:
        tokenizer.encode("a" * 50 + "!")
    assert caught.value.hint and tokenizer.encode("a!")
