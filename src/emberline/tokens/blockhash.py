"""block_hash: the one identity of a block of tokens in its context. Scheduler, tiers, workers and router all use it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

VERSION = b"emberline-block-1"
SIZE = 16


def root_hash(layout: str, salt: str = "") -> bytes:
    """Where chains begin: `layout` names model and cache form, so that unlike caches never meet; `salt` the tenant."""
    digest = blake2b(VERSION, digest_size=SIZE)
    for part in (layout.encode(), salt.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of one full block: its own tokens and, through `parent`, all that came before."""
    return blake2b(array("I", tokens).tobytes(), key=parent, digest_size=SIZE).digest()


def last_full(root: bytes, tokens: Sequence[int], size: int) -> tuple[bytes, int] | None:
    """The hash of the last full block, and how many there are; None: there is none."""
    digest = root
    for at in range(0, len(tokens) - size + 1, size):
        digest = block_hash(digest, tokens[at : at + size])
    return (digest, len(tokens) // size) if len(tokens) >= size else None
