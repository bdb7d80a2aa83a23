"""Code: a canonical prefix code over bytes with no code longer than a look-up, and the table that decodes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from emberline.core.errors import ModelFileError
from emberline.unweight.format import BITS, SYMBOLS, Bytes

DIGITS = re.compile(r"[1-9ab]([0-9ab]{0,254}[1-9ab])?")


@dataclass(frozen=True)
class Code:
    lengths: Bytes  # [256], 0: never occurs

    @staticmethod
    def fit(counts: NDArray[np.uint64]) -> Code:
        """The one that needs fewest bits for symbols that occur so often."""
        return Code(np.array(_limited(counts.tolist()), np.uint8))

    @staticmethod
    def parse(first: object, text: object) -> Code:
        """As the file has it: a hexadecimal digit for each symbol from `first` on."""
        if type(first) is not int or not isinstance(text, str) or not DIGITS.fullmatch(text):
            raise ModelFileError(f"{first!r} {str(text)[:40]!r} is not a code")
        if not 0 <= first <= 256 - len(text):
            raise ModelFileError(f"a code of {len(text)} symbols cannot begin at {first}")
        lengths = np.zeros(256, np.uint8)
        lengths[first : first + len(text)] = [int(digit, 16) for digit in text]
        used = lengths[lengths > 0].astype(np.int64)
        if int((1 << (BITS - used)).sum()) != 1 << BITS and used.tolist() != [1]:
            raise ModelFileError("a code is not complete: some bits would mean nothing, or two things")
        return Code(lengths)

    @property
    def first(self) -> int:
        return int(self.lengths.nonzero()[0][0])

    def __str__(self) -> str:
        used = self.lengths.nonzero()[0]
        return "".join(f"{length:x}" for length in self.lengths[used[0] : used[-1] + 1])

    def bits(self, counts: NDArray[np.uint64]) -> int:
        return int((counts * self.lengths).sum())

    @cached_property
    def codes(self) -> NDArray[np.uint32]:
        """[256]: the code, whose first bit is the lowest, | length << 16."""
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
    def single(self) -> Bytes:
        """[2048]: the symbol that the next 11 bits begin with."""
        out = np.zeros(1 << BITS, np.uint8)
        for symbol in self.lengths.nonzero()[0].tolist():
            length, code = int(self.lengths[symbol]), int(self.codes[symbol]) & 0xFFFF
            out[code :: 1 << length] = symbol
        if np.count_nonzero(self.lengths) == 1:  # the only incomplete code: both bits mean its one symbol
            out[:] = self.first
        return out

    @cached_property
    def table(self) -> NDArray[np.uint64]:
        """[2048]: bits taken | the symbols in them << 8 | how many << 56."""
        ahead, taken, number = np.arange(1 << BITS), np.zeros(1 << BITS, np.int64), np.zeros(1 << BITS, np.uint64)
        table = np.zeros(1 << BITS, np.uint64)
        for place in range(SYMBOLS):
            symbol = self.single[ahead >> taken]
            after = taken + self.lengths[symbol]
            fits = (after <= BITS) & (number == place)
            table[fits] |= symbol[fits].astype(np.uint64) << np.uint64(8 + 8 * place)
            taken[fits] = after[fits]
            number[fits] += np.uint64(1)
        return table | taken.astype(np.uint64) | number << np.uint64(56)


def entropy(counts: NDArray[np.uint64]) -> float:
    """Bits a symbol: what no code can go below."""
    share = counts[counts > 0] / max(1, int(counts.sum()))
    return float(-(share * np.log2(share)).sum()) + 0.0


def _limited(counts: list[int]) -> list[int]:
    """Package-merge: of all codes with lengths up to BITS, an optimal one."""
    leaves: list[tuple[int, tuple[int, ...]]] = sorted(
        (count, (symbol,)) for symbol, count in enumerate(counts) if count
    )
    lengths = [0] * len(counts)
    if len(leaves) == 1:
        lengths[leaves[0][1][0]] = 1
    if len(leaves) < 2:
        return lengths
    packages = leaves
    for _ in range(BITS - 1):
        pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(packages[::2], packages[1::2], strict=False)]
        packages = sorted(leaves + pairs, key=lambda item: item[0])
    for _, symbols in packages[: 2 * len(leaves) - 2]:
        for symbol in symbols:
            lengths[symbol] += 1
    return lengths
