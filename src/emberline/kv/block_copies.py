"""PendingCopies: the copies of KV blocks to and from host memory that the next step plan must make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from emberline.core.plan import BlockCopy
from emberline.kv.tiers.stack import TierStack


class PendingCopies:
    def __init__(self, tiers: TierStack | None) -> None:
        self._tiers = tiers
        # Blocks filled since the last plan, with their hashes and groups of layers. The next plan must save them,
        # because later plans may reuse the blocks.
        self._saves: list[tuple[int, bytes, int]] = []
        self._loads: list[BlockCopy] = []  # blocks fetched from tiers since the last plan

    @property
    def has_saves(self) -> bool:
        return bool(self._saves)

    def add_saves(self, blocks: Iterable[tuple[int, bytes, int]]) -> None:
        """Let the next plan save these blocks to host memory, if there are tiers.

        Each item is a block, its hash and its group of layers."""
        if self._tiers is not None:
            self._saves += blocks

    def add_load(self, copy: BlockCopy) -> None:
        self._loads.append(copy)

    def take_saves(self) -> list[BlockCopy]:
        """Return the block copies to host memory that the next step plan must make.

        Later plans may overwrite these blocks.
        """
        if self._tiers is None:
            return []
        unsaved, self._saves = self._saves, []
        buffers = [self._tiers.reserve_host_buffer(digest) for _, digest, _ in unsaved]
        return [
            BlockCopy(block, digest, buffer, group)
            for (block, digest, group), buffer in zip(unsaved, buffers, strict=True)
            if buffer is not None
        ]

    def take_loads(self) -> list[BlockCopy]:
        """Return the copies from host buffers into cache blocks that the next step plan must make."""
        loads, self._loads = self._loads, []
        return loads

    def finish(self, saves: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> None:
        """Release the host buffers of copies that a step plan made. The copies must be complete."""
        if self._tiers is not None:
            for copy in saves:
                self._tiers.finish_save(copy.digest)
            for copy in loads:
                self._tiers.release_fetched(copy.digest)

    def drop(self, blocks: Iterable[int]) -> None:
        """Drop pending copies to and from these blocks, because a pull overwrites the blocks while steps run."""
        dropped = set(blocks)
        self._saves = [unsaved for unsaved in self._saves if unsaved[0] not in dropped]
        self.finish((), [copy for copy in self._loads if copy.block in dropped])
        self._loads = [copy for copy in self._loads if copy.block not in dropped]
