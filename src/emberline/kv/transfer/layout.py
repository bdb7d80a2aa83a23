"""Layout: how keys and values lie in a cache. Two caches pair if only the size of their blocks differs."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import Any

from emberline.kv.transfer.errors import Incompatible


@dataclass(frozen=True, slots=True)
class Layout:
    """In memory, each part is [layers, blocks, heads, tokens, width]. A cache whose tokens hold all heads side by side
    has one head, as wide as all of them. One whose keys are `turned` has them as [layers, blocks, heads, numbers,
    tokens, bytes of a number]."""

    model: str  # what the numbers mean, as in the root of block hashes
    layers: int
    parts: int  # keys and values: 2
    heads: int
    tokens: int  # in a block
    width: int  # bytes of one head of one token
    dtype: str
    order: str = sys.byteorder
    turned: int = 0  # bytes of a number of the first part, if that is turned

    @property
    def plane_bytes(self) -> int:
        """One part of one layer of a block: what lies in one place."""
        return self.heads * self.tokens * self.width

    @property
    def layer_bytes(self) -> int:
        return self.parts * self.plane_bytes

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_bytes

    def strips(self, part: int) -> tuple[int, int]:
        """A plane is so many strips of tokens, in which each token has so many bytes."""
        width = self.turned if part == 0 and self.turned else self.width
        return self.heads * self.width // width, width

    @property
    def digest(self) -> str:
        """Equal digests pair, if one block size divides the other."""
        parts = [f"{name}={value}" for name, value in asdict(self).items() if name != "tokens"]
        return blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()

    def check_pair(self, other: Layout) -> None:
        if bool(self.turned) != bool(other.turned):
            ours, theirs = ("across" if layout.turned else "along" for layout in (self, other))
            raise Incompatible(
                f"keys lie {ours} the tokens here, {theirs} them there",
                hint="a GPU's cache pairs with a GPU's, and a CPU's with a CPU's",
            )
        names = [field.name for field in fields(self) if field.name not in ("tokens", "model")]
        for name in (*names, "model"):  # which follows from some of the others, and tells nobody anything
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise Incompatible(f"the caches differ in {name}: {ours!r} here, {theirs!r} there")
        small, large = sorted((self.tokens, other.tokens))
        if large % small:
            raise Incompatible(
                f"blocks of {self.tokens} tokens here, of {other.tokens} there",
                hint="choose block sizes of which one divides the other",
            )

    def blocks_for(self, count: int, other: Layout) -> int:
        """How many of our blocks hold `count` of the other's."""
        return -(-count * other.tokens // self.tokens)

    @staticmethod
    def parsed(told: Any) -> Layout:
        try:
            layout = Layout(**told)
            numbers = (layout.layers, layout.parts, layout.heads, layout.tokens, layout.width)
            valid = all(type(number) is int and number > 0 for number in numbers)
            valid = valid and type(layout.turned) is int and layout.width % (layout.turned or layout.width) == 0
        except TypeError:
            valid = False
        if not valid or not all(type(text) is str for text in (layout.model, layout.dtype, layout.order)):
            raise Incompatible("the peer's layout is malformed", hint="run the same release on both sides")
        return layout
