"""SuffixIndex: finds where the newest tokens of a text occurred before, in the same text or in others."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

END_OF_TEXT = -1  # appended between two texts: no match and no guess goes across it
MAX_PROPOSAL = 64  # tokens


class SuffixIndex:
    def __init__(self, library: ctypes.CDLL, capacity: int = 0) -> None:
        """`capacity`: maximum number of tokens; when it is reached, the older half is dropped. 0: no limit."""
        self._library = library
        self._handle = library.ember_suffix_new(capacity)
        # Results of `propose`, with their addresses, which take longer to find than a proposal.
        self._tokens, self._confidence = (ctypes.c_int32 * MAX_PROPOSAL)(), (ctypes.c_float * MAX_PROPOSAL)()
        self._addresses = ctypes.addressof(self._tokens), ctypes.addressof(self._confidence)

    def __del__(self) -> None:
        self._library.ember_suffix_free(self._handle)

    def append(self, tokens: Sequence[int]) -> None:
        values = array("i", tokens)
        address, count = values.buffer_info()
        self._library.ember_suffix_append(self._handle, address, count)

    def propose(self, limit: int, shared: SuffixIndex | None = None) -> tuple[list[int], list[float]]:
        """Return at most `limit` tokens with which this text may continue, and an estimated probability for each.

        The tokens are those that followed earlier occurrences of the newest tokens, in this index or in `shared`. A
        probability assumes that the proposed tokens before it are right."""
        handle = None if shared is None else shared._handle
        count = self._library.ember_suffix_propose(self._handle, handle, min(limit, MAX_PROPOSAL), *self._addresses)
        return self._tokens[:count], self._confidence[:count]
