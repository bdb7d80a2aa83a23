"""Detokenizer: for any grouping of tokens, pieces add up to the same text and stop strings end it at the same place."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import sample_tokenizers as made
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.errors import UnsupportedModel
from emberline.tokens.detokenizer import Detokenizer
from emberline.tokens.tokenizer import Tokenizer

# SmolLM2's vocabulary lacks 21 bytes, among them six control characters and the leads of planes 4 to 15.
LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF)
TEXT = st.text(LETTERS, max_size=40)


@pytest.fixture(scope="module")
def all_three(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    folder = tmp_path_factory.mktemp("made")
    own = [made.load(folder / "b", made.byte_level()), made.load(folder / "p", made.pieces())]
    return [*own, Tokenizer.load(made.smollm2())]


def cut(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Split `ids` into groups of these sizes, then single ones."""
    out, at = [], 0
    for size in sizes:
        out.append(list(ids[at : at + size]))
        at += size
    return [*out, *([i] for i in ids[at:])]


SIZES = st.lists(st.integers(0, 5), max_size=8)


@settings(max_examples=200, deadline=None)
@given(text=TEXT, sizes=SIZES, skip=st.booleans())
def test_pieces_of_text_add_up(all_three: list[Tokenizer], text: str, sizes: list[int], skip: bool) -> None:
    for tokenizer in all_three:
        ids = tokenizer.encode(text)
        detokenizer = Detokenizer(tokenizer, skip_special=skip)
        pieces = [detokenizer.push(run) for run in cut(ids, sizes)]
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 268), max_size=30), sizes=SIZES)
def test_pieces_of_any_ids_add_up(all_three: list[Tokenizer], ids: list[int], sizes: list[int]) -> None:
    """Includes invalid UTF-8, special tokens and ids outside the vocabulary."""
    for tokenizer in all_three:
        detokenizer = Detokenizer(tokenizer)
        text = "".join(detokenizer.push(run) for run in cut(ids, sizes)) + detokenizer.flush()
        assert text == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abcé ", max_size=30),
    stop=st.lists(st.text("abcé ", min_size=1, max_size=4), min_size=1, max_size=4),
    sizes=SIZES,
    include=st.booleans(),
)
def test_stop_strings_are_found_across_token_boundaries(
    all_three: list[Tokenizer], text: str, stop: list[str], sizes: list[int], include: bool
) -> None:
    for tokenizer in all_three:
        ids = tokenizer.encode(text, add_special=False)
        whole = tokenizer.decode(ids)
        ends = [e for e in range(1, len(whole) + 1) if whole[:e].endswith(tuple(stop))]
        expected, found = whole, None
        if ends:  # by definition: the stop string that ends first counts, and of those the longest
            found = max((s for s in stop if whole[: ends[0]].endswith(s)), key=len)
            expected = whole[: ends[0] if include else ends[0] - len(found)]
        detokenizer = Detokenizer(tokenizer, stop=tuple(stop), include_stop=include)
        shown = ""
        for run in cut(ids, sizes):
            shown += detokenizer.push(run)
            assert expected.startswith(shown)
        assert shown + detokenizer.flush() == expected
        assert detokenizer.matched_stop == found


@pytest.fixture
def tokenizer(all_three: list[Tokenizer]) -> Tokenizer:
    return all_three[0]


def test_possible_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, stop=("END",))
    letters = {c: tokenizer.encode(c) for c in "xEND"}
    assert [detokenizer.push(letters[c]) for c in "xEN"] == ["x", "", ""]
    assert detokenizer.push(letters["x"]) == "ENx"
    assert [detokenizer.push(letters[c]) for c in "END"] == ["", "", ""]
    assert detokenizer.matched_stop == "END"
    assert detokenizer.push(letters["x"]) == detokenizer.flush() == ""


def test_tokens_after_the_stop_are_ignored(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, stop=("b",))
    assert detokenizer.push(tokenizer.encode("abcd")) == "a"
    assert len(detokenizer.offsets) == 2


@pytest.mark.parametrize("sizes", [[], [2], [3], [7]])
def test_stop_strings_are_ignored_before_min_tokens(tokenizer: Tokenizer, sizes: list[int]) -> None:
    ids = [i for c in "abcabxab" for i in tokenizer.encode(c)]
    detokenizer = Detokenizer(tokenizer, stop=("ab",), min_tokens=4)
    # The second one begins within min_tokens.
    assert "".join(detokenizer.push(run) for run in cut(ids, sizes)) == "abcabx"
    assert detokenizer.matched_stop == "ab" and len(detokenizer.offsets) == 8
    early = Detokenizer(tokenizer, stop=("ab",), min_tokens=4)
    assert [early.push([i]) for i in ids[:4]] == [*"abca"]  # nothing is held back
    assert early.flush() == ""


def test_only_whole_characters_are_emitted(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂x")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in ids] == ["", "", "🙂", "x"]
    assert detokenizer.offsets == [0, 0, 0, 1]
    half = Detokenizer(tokenizer)
    assert half.push(ids[:2]) == ""
    assert half.flush() == "\ufffd"


def test_offsets_count_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é the<|end|>é")
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(ids)
    assert [tokenizer.token_text(i) for i in ids] == ["é", " the", "<|end|>", "é"]
    assert detokenizer.offsets == [0, 1, 5, 5]


def test_first_space_of_sentencepiece_is_dropped(all_three: list[Tokenizer]) -> None:
    pieces = all_three[1]
    ids = pieces.encode("the", add_special=False)
    assert Detokenizer(pieces).push(ids) == "the"
    assert Detokenizer(pieces, continues_prompt=True).push(ids) == " the"


def test_opaque_vocabularies_are_rejected(tmp_path_factory: pytest.TempPathFactory) -> None:
    inner = made.byte_level()
    from tokenizers import decoders

    inner.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel):
        Detokenizer(made.load(tmp_path_factory.mktemp("o"), inner))
