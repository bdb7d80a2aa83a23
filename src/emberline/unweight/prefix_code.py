"""PrefixCode: a canonical Huffman code over byte symbols, with limited length, and decoding tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from emberline.core.errors import ModelFileError
from emberline.unweight.format import MAX_CODE_BITS, MAX_LOOKUP_SYMBOLS, Bytes

LENGTH_DIGITS = re.compile(r"[1-9ab]([0-9ab]{0,254}[1-9ab])?")


@dataclass(frozen=True)
class PrefixCode:
    lengths: Bytes  # [256] code length in bits; 0 for symbols that never occur

    @staticmethod
    def from_counts(counts: NDArray[np.uint64]) -> PrefixCode:
        """Return the code that needs the fewest bits for symbols that occur this often."""
        return PrefixCode(np.array(_optimal_lengths(counts.tolist()), np.uint8))

    @staticmethod
    def parse(first: object, length_digits: object) -> PrefixCode:
        """Return the code that a packed file stores. Raises ModelFileError if it is invalid.

        `length_digits`: a hexadecimal digit for each symbol from `first` on, the length of the symbol's code."""
        if type(first) is not int or not isinstance(length_digits, str) or not LENGTH_DIGITS.fullmatch(length_digits):
            raise ModelFileError(
                f"invalid prefix code in a packed file: first={first!r} lengths={str(length_digits)[:40]!r}"
            )
        if not 0 <= first <= 256 - len(length_digits):
            raise ModelFileError(f"a prefix code of {len(length_digits)} symbols cannot begin at symbol {first}")
        lengths = np.zeros(256, np.uint8)
        lengths[first : first + len(length_digits)] = [int(digit, 16) for digit in length_digits]
        used = lengths[lengths > 0].astype(np.int64)
        if int((1 << (MAX_CODE_BITS - used)).sum()) != 1 << MAX_CODE_BITS and used.tolist() != [1]:
            raise ModelFileError("a prefix code is invalid: some bit sequences have no symbol, or more than one")
        return PrefixCode(lengths)

    @property
    def first_coded_symbol(self) -> int:
        return int(self.lengths.nonzero()[0][0])

    def __str__(self) -> str:
        used = self.lengths.nonzero()[0]
        return "".join(f"{length:x}" for length in self.lengths[used[0] : used[-1] + 1])

    def total_bits(self, counts: NDArray[np.uint64]) -> int:
        return int((counts * self.lengths).sum())

    @cached_property
    def codes(self) -> NDArray[np.uint32]:
        """The code of each of the 256 symbols, as code | length << 16. The first bit of a code is the lowest."""
        out = np.zeros(256, np.uint32)
        code = length = 0
        for symbol in np.lexsort((np.arange(256), self.lengths)).tolist():
            if own := int(self.lengths[symbol]):
                code <<= own - length
                length = own
                out[symbol] = int(f"{code:0{own}b}"[::-1], 2) | own << 16
                code += 1
        return out

    @cached_property
    def first_symbol_table(self) -> Bytes:
        """Lookup table: for each value of the next 11 bits, the first symbol that they decode to."""
        out = np.zeros(1 << MAX_CODE_BITS, np.uint8)
        for symbol in self.lengths.nonzero()[0].tolist():
            length, code = int(self.lengths[symbol]), int(self.codes[symbol]) & 0xFFFF
            out[code :: 1 << length] = symbol
        if np.count_nonzero(self.lengths) == 1:  # the only incomplete code: 0 and 1 both decode to its one symbol
            out[:] = self.first_coded_symbol
        return out

    @cached_property
    def decode_table(self) -> NDArray[np.uint64]:
        """Lookup table: for each value of the next 11 bits, all complete symbols that they decode to.

        An entry is: number of bits used | symbols << 8 | number of symbols << 56.
        """
        ahead, taken, number = (
            np.arange(1 << MAX_CODE_BITS),
            np.zeros(1 << MAX_CODE_BITS, np.int64),
            np.zeros(1 << MAX_CODE_BITS, np.uint64),
        )
        table = np.zeros(1 << MAX_CODE_BITS, np.uint64)
        for position in range(MAX_LOOKUP_SYMBOLS):
            symbol = self.first_symbol_table[ahead >> taken]
            after = taken + self.lengths[symbol]
            fits = (after <= MAX_CODE_BITS) & (number == position)
            table[fits] |= symbol[fits].astype(np.uint64) << np.uint64(8 + 8 * position)
            taken[fits] = after[fits]
            number[fits] += np.uint64(1)
        return table | taken.astype(np.uint64) | number << np.uint64(56)


def entropy_bits(counts: NDArray[np.uint64]) -> float:
    """Return the entropy of symbols that occur this often, in bits per symbol: the limit of any code."""
    share = counts[counts > 0] / max(1, int(counts.sum()))
    return float(-(share * np.log2(share)).sum()) + 0.0


def _optimal_lengths(counts: list[int]) -> list[int]:
    """Return optimal code lengths of at most MAX_CODE_BITS, by the package-merge algorithm."""
    leaves: list[tuple[int, tuple[int, ...]]] = sorted(
        (count, (symbol,)) for symbol, count in enumerate(counts) if count
    )
    lengths = [0] * len(counts)
    if len(leaves) == 1:
        lengths[leaves[0][1][0]] = 1
    if len(leaves) < 2:
        return lengths
    packages = leaves
    for _ in range(MAX_CODE_BITS - 1):
        pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(packages[::2], packages[1::2], strict=False)]
        packages = sorted(leaves + pairs, key=lambda item: item[0])
    for _, symbols in packages[: 2 * len(leaves) - 2]:
        for symbol in symbols:
            lengths[symbol] += 1
    return lengths
