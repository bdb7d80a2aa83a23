"""KVLayout: how a KV cache stores keys and values in memory, and the check whether two caches can exchange blocks."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import Any

from emberline.kv.transfer.errors import IncompatibleCaches


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The memory layout of one cache. Two caches can exchange blocks if their layouts differ at most in `tokens`.

    One of the two block sizes (`tokens`) must then divide the other. If some layers have an attention window, they must
    be equal: only the blocks within the window are sent, and their limits depend on the block size.

    The keys are an array [layers, blocks, heads, tokens, width], and so are the values. A cache that stores all heads
    of a token together counts as having one wide head. Transposed keys (`turned`) are stored as [layers, blocks, heads,
    elements, tokens, bytes of an element], where `width` is elements times bytes of an element.
    """

    model: str  # fingerprint of the model, as in the root of block hashes
    layers: int
    parts: int  # keys and values: 2; keys that contain the values: 1
    heads: int
    tokens: int  # tokens per block
    width: int  # bytes of one head of one token
    dtype: str
    order: str = sys.byteorder
    turned: int = 0  # bytes of an element of the keys if they are transposed, otherwise 0
    groups: str = ""  # name of the groups of layers (LayerGroups); empty: all layers are in each block

    @property
    def plane_bytes(self) -> int:
        """The bytes of the keys, or of the values, of one layer of a block. They are contiguous in memory."""
        return self.heads * self.tokens * self.width

    @property
    def layer_bytes(self) -> int:
        return self.parts * self.plane_bytes

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return all fields. `groups` is left out if it is empty, because earlier releases do not know this field."""
        return {name: value for name, value in asdict(self).items() if name != "groups" or value}

    def count_token_strips(self, kv_index: int) -> tuple[int, int]:
        """Return the number of strips of a block's keys or values in one layer, and their bytes per token.

        A strip holds the same element, or the same head, of consecutive tokens. `kv_index` is 0 for keys and 1 for
        values.
        """
        width = self.turned if kv_index == 0 and self.turned else self.width
        return self.heads * self.width // width, width

    @property
    def layout_hash(self) -> str:
        """The hash of all fields except `tokens`.

        Two caches with the same hash are compatible if one block size divides the other.
        """
        parts = [f"{name}={value}" for name, value in self.as_dict().items() if name != "tokens"]
        return blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()

    def check_compatible(self, other: KVLayout) -> None:
        """Raise IncompatibleCaches if blocks cannot be transferred between caches of these two layouts."""
        if bool(self.turned) != bool(other.turned):
            ours, theirs = ("transposed" if layout.turned else "not transposed" for layout in (self, other))
            raise IncompatibleCaches(
                f"the KV caches store keys differently: {ours} here, {theirs} at the peer",
                hint="transfer between two GPU workers, or between two CPU workers",
            )
        names = [field.name for field in fields(self) if field.name not in ("tokens", "model", "groups")]
        # The groups first, since they change other fields; the model last, whose fingerprint says less than the others.
        for name in ("groups", *names, "model"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise IncompatibleCaches(f"the KV caches differ in {name}: {ours!r} here, {theirs!r} at the peer")
        if self.groups and self.tokens != other.tokens:
            raise IncompatibleCaches(
                f"the KV block sizes differ: {self.tokens} tokens here, {other.tokens} at the peer; a model with "
                f"several groups of layers ({self.groups}) needs equal ones",
                hint="start both workers with the same --block-size",
            )
        small, large = sorted((self.tokens, other.tokens))
        if large % small:
            raise IncompatibleCaches(
                f"the KV block sizes do not match: {self.tokens} tokens here, {other.tokens} at the peer",
                hint="choose block sizes of which one divides the other",
            )

    def num_blocks_for(self, num_other_blocks: int, other_layout: KVLayout) -> int:
        """Return how many blocks of this layout hold the tokens of `num_other_blocks` blocks of `other_layout`."""
        return -(-num_other_blocks * other_layout.tokens // self.tokens)

    @staticmethod
    def parse(data: Any) -> KVLayout:
        try:
            layout = KVLayout(**data)
            numbers = (layout.layers, layout.parts, layout.heads, layout.tokens, layout.width)
            valid = all(type(number) is int and number > 0 for number in numbers)
            valid = valid and type(layout.turned) is int and layout.width % (layout.turned or layout.width) == 0
        except TypeError:
            valid = False
        texts = (layout.model, layout.dtype, layout.order, layout.groups) if valid else ()
        if not valid or not all(type(text) is str for text in texts):
            raise IncompatibleCaches(
                "the peer's KV layout is malformed", hint="run the same Emberline release on both sides"
            )
        return layout
