"""Hashes of KV blocks. A hash identifies the content of a block in the scheduler, workers and router alike."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_VERSION = b"emberline-block-1"
DIGEST_BYTES = 16
NO_STATES = b"\0"  # follows the parent's hash in KV events, see `mark_without_states`


def root_hash(layout: str, salt: str = "") -> bytes:
    """Return the hash that takes the place of the parent for the first block of a sequence.

    Blocks with a different `layout` (model and cache format) or `salt` (tenant) never have equal hashes."""
    digest = blake2b(HASH_VERSION, digest_size=DIGEST_BYTES)
    for part in (layout.encode(), salt.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash of a full block. `parent`, the hash of the block before it, stands for all earlier tokens."""
    return blake2b(array("I", tokens).tobytes(), key=parent, digest_size=DIGEST_BYTES).digest()


def group_block_hash(digest: bytes, group: int) -> bytes:
    """Return the hash of the block that has the same tokens, but in group `group` of the layers.

    `digest`: the block's hash in the first group (0), which is also the hash of its tokens."""
    if group == 0:
        return digest
    return blake2b(group.to_bytes(4, "little"), key=digest, digest_size=DIGEST_BYTES, person=b"layer-group").digest()


def state_page_hash(digest: bytes, page: int) -> bytes:
    """Return the hash of one page of the snapshot of recurrent states after the block `digest`.

    Pages are defined in kv/state_pages.py."""
    return blake2b(page.to_bytes(4, "little"), key=digest, digest_size=DIGEST_BYTES, person=b"state-page").digest()


def mark_without_states(parent: bytes) -> bytes:
    """Return the parent's hash with a mark, which KV events list for a block without recurrent states.

    The worker holds the block, but not the recurrent states after it. A request therefore cannot reuse the cache up to
    this block, but only up to an earlier block with states."""
    return parent + NO_STATES


def read_listed_parent(digest: bytes, listed: bytes) -> tuple[bytes, bool]:
    """Return the hash of a block's parent from a KV event, and whether the block lacks recurrent states.

    `digest`: the hash of the block. `listed`: the parent in the KV event, which may have the mark that
    `mark_without_states` adds."""
    is_marked = len(listed) in (len(NO_STATES), len(digest) + len(NO_STATES)) and listed.endswith(NO_STATES)
    return (listed.removesuffix(NO_STATES), True) if is_marked else (listed, False)


def hash_last_full_block(root: bytes, tokens: Sequence[int], block_size: int) -> tuple[bytes, int] | None:
    """Return the hash of the last full block and the number of full blocks; None if no block is full."""
    digest = root
    for at in range(0, len(tokens) - block_size + 1, block_size):
        digest = block_hash(digest, tokens[at : at + block_size])
    return (digest, len(tokens) // block_size) if len(tokens) >= block_size else None
