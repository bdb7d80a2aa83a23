"""SuffixIndex: guesses follow the longest match, never cross texts, and equal those of a slow search."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.kernels.cpu.library import find_library
from emberline.kernels.cpu.suffix_index import END_OF_TEXT, SuffixIndex


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = find_library()
    assert found is not None
    return found


def make_index(library: ctypes.CDLL, tokens: list[int], capacity: int = 0) -> SuffixIndex:
    index = SuffixIndex(library, capacity)
    index.append(tokens)
    return index


def test_copies_what_followed_the_longest_match(library: ctypes.CDLL) -> None:
    assert make_index(library, [1, 2, 3, 4, 1, 2]).propose(3)[0] == [3, 4, 1]
    assert make_index(library, [9, 1, 2, 3, 7, 7, 8, 1, 2, 4, 9, 1, 2]).propose(2)[0] == [3, 7]
    assert make_index(library, [1, 2, 3, 4]).propose(4) == ([], [])
    assert make_index(library, []).propose(4) == ([], [])
    assert make_index(library, [5]).propose(4) == ([], [])


def test_copy_goes_on_at_the_end_of_the_text(library: ctypes.CDLL) -> None:
    assert make_index(library, [7, 1, 2, 1, 2]).propose(5)[0] == [1, 2, 1, 2, 1]


def test_frequent_continuation_wins_and_gets_its_share(library: ctypes.CDLL) -> None:
    text = [1, 2, 5, 0, 1, 2, 6, 0, 1, 2, 5, 0, 3, 1, 2]
    tokens, confidence = make_index(library, text).propose(1)
    assert tokens == [5]
    assert 0.2 < confidence[0] < 0.5


def test_guesses_from_another_text_end_with_it(library: ctypes.CDLL) -> None:
    shared = make_index(library, [1, 2, 3, END_OF_TEXT, 4, 1, 9, END_OF_TEXT])
    own = make_index(library, [8, 1, 2])
    assert own.propose(5)[0] == []
    assert own.propose(5, shared)[0] == [3]
    assert make_index(library, [3, 4]).propose(5, shared)[0] == []  # the match would cross the end of a text


def test_full_index_keeps_the_newer_half(library: ctypes.CDLL) -> None:
    shared = SuffixIndex(library, 100)
    shared.append([1, 2, 3, END_OF_TEXT])
    assert make_index(library, [1, 2]).propose(1, shared)[0] == [3]
    shared.append(list(range(1000, 1090)))
    shared.append([4, 5, 6, 7, 8, 9, END_OF_TEXT])
    assert make_index(library, [1, 2]).propose(1, shared)[0] == []
    assert make_index(library, [4, 5]).propose(1, shared)[0] == [6]


@settings(max_examples=300, deadline=None)
@given(text=st.lists(st.integers(0, 3), max_size=60), limit=st.integers(1, 8), cut=st.integers(0, 60))
def test_first_guess_equals_a_slow_search(library: ctypes.CDLL, text: list[int], limit: int, cut: int) -> None:
    index = make_index(library, text[:cut])
    index.append(text[cut:])
    tokens, confidence = index.propose(limit)
    weights: dict[int, int] = {}
    matches = [(length, text[at]) for at in range(2, len(text)) if (length := count_matching(text, at)) >= 2]
    longest = max((length for length, _ in matches), default=0)
    for length, token in matches:
        if 2 * length >= longest:
            weights[token] = weights.get(token, 0) + length
    if tokens:
        assert weights[tokens[0]] == max(weights.values())
        assert 0 < len(tokens) <= limit and len(confidence) == len(tokens)
        assert all(0 < share <= 1 for share in confidence)
    elif weights:  # only a guess of low probability is left out
        assert max(weights.values()) / sum(weights.values()) < 0.11


def count_matching(text: list[int], at: int) -> int:
    """Return how many tokens before position `at` equal the last tokens of the text, at most 32."""
    length = 0
    while length < min(at, 32) and text[at - 1 - length] == text[-1 - length]:
        length += 1
    return length
