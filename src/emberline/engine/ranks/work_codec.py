"""WorkEncoder, WorkDecoder: the work of a step as MessagePack, for ranks that decoded all earlier steps.

A step mostly continues the requests of the step before it, so only what changed is encoded: new tokens, and new blocks
at the ends of the block tables. Fields that only draft models and KV transfers use are not encoded, since an engine on
several ranks has neither. Both sides work by columns, because a loop over 256 items in Python costs more than all the
rest. This module does not import torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, compress
from operator import ne

import msgspec

from emberline.core.plan import StateWork, WorkItem

NEW_REQUEST = -1  # as the source of an item: the step before had no item of its request


class RareFields(msgspec.Struct, array_like=True):
    """Fields of a work item that have their default in most steps of most models."""

    prompt_logprobs: bool = False
    num_draft: int = 0
    state: StateWork | None = None
    # For each group of layers with a window: the number of released blocks, and the blocks after them.
    windows: Sequence[tuple[int, Sequence[int]]] = ()


class EncodedWork(msgspec.Struct, array_like=True):
    """The work items of a step by columns. Numbers in bytes are 32-bit integers, which are decoded faster."""

    starts: bytes
    tokens: bytes  # of all items
    counts: list[int] | None  # by item: its number of tokens; None: each has one
    samples: list[bool] | bool  # one value: that of all items
    new_blocks: dict[int, Sequence[int]]  # by item: blocks at the end of its table
    sources: list[int] | None  # by item: its index in the step before, or NEW_REQUEST; None: nothing changed
    homes: dict[int, int]  # by item, if its request is new: the rank that has its blocks, if that is not 0
    rare: dict[int, RareFields]  # by item, where a field has no default
    cleared: Sequence[int]  # blocks that are filled with zeros before the step


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(EncodedWork)


class WorkEncoder:
    def __init__(self) -> None:
        self._ids: list[str] = []
        self._preemptions: list[int] = []
        self._num_blocks: list[int] = []

    def encode(self, work: Sequence[WorkItem], cleared: Sequence[int] = ()) -> bytes:
        """Return the work of the next step. `cleared`: blocks to fill with zeros first."""
        sources = self._continue_requests(work)
        tokens = list(chain.from_iterable([w.tokens for w in work]))
        samples: list[bool] = [w.samples for w in work]
        counts, known = [len(w.blocks) for w in work], self._num_blocks
        new_blocks = {i: work[i].blocks[known[i] :] for i in compress(range(len(work)), map(ne, counts, known))}
        self._num_blocks = counts
        return _ENCODER.encode(
            EncodedWork(
                array("i", [w.start for w in work]).tobytes(),
                array("i", tokens).tobytes(),
                None if len(tokens) == len(work) else [len(w.tokens) for w in work],
                all(samples) or (any(samples) and samples),
                new_blocks,
                sources,
                {i: work[i].home for i, source in enumerate(sources or ()) if source == NEW_REQUEST and work[i].home},
                _collect_rare_fields(work),
                cleared,
            )
        )

    def _continue_requests(self, work: Sequence[WorkItem]) -> list[int] | None:
        """Set the known state of each item's request, and return the items' sources."""
        ids, preemptions = [w.id for w in work], [w.preemptions for w in work]
        if ids == self._ids and preemptions == self._preemptions:
            return None
        before = zip(self._ids, self._preemptions, self._num_blocks, strict=True)
        known = {(name, count): (index, blocks) for index, (name, count, blocks) in enumerate(before)}
        # A preemption replaces all blocks of a request.
        found = [known.get(each, (NEW_REQUEST, 0)) for each in zip(ids, preemptions, strict=True)]
        self._ids, self._preemptions = ids, preemptions
        self._num_blocks = [blocks for _, blocks in found]
        return [index for index, _ in found]


class WorkDecoder:
    def __init__(self) -> None:
        self._items: list[WorkItem] = []
        self._rare_items: list[WorkItem] = []  # those with rare fields
        self._samples: list[bool] | bool | None = None  # of the step before, if it had the same items

    def decode(self, message: bytes) -> tuple[list[WorkItem], Sequence[int]]:
        """Return the work of the next step, and the blocks to fill with zeros first.

        The items are valid until the next call, which changes them. Their ids are empty."""
        step = _DECODER.decode(message)
        if step.sources is not None:
            self._items = [
                WorkItem("", 0, (), [], samples=True) if source == NEW_REQUEST else self._items[source]
                for source in step.sources
            ]
            self._samples = None
        items = self._items
        for index, home in step.homes.items():
            items[index].home = home
        for item, start, tokens in zip(items, _read_integers(step.starts), _split_tokens(step), strict=True):
            item.start, item.tokens = start, tokens
        if step.samples != self._samples:
            self._samples = step.samples
            flags = step.samples if isinstance(step.samples, list) else [step.samples] * len(items)
            for item, flag in zip(items, flags, strict=True):
                item.samples = flag
        for index, blocks in step.new_blocks.items():
            table = items[index].blocks
            assert isinstance(table, list)
            table += blocks
        self._set_rare_fields(step.rare)
        return items, step.cleared

    def _set_rare_fields(self, rare: dict[int, RareFields]) -> None:
        for item in self._rare_items:
            item.prompt_logprobs, item.num_draft, item.state, item.window_blocks = False, 0, None, ()
        self._rare_items = [self._items[index] for index in rare]
        for item, fields in zip(self._rare_items, rare.values(), strict=True):
            item.prompt_logprobs, item.num_draft, item.state = fields.prompt_logprobs, fields.num_draft, fields.state
            item.window_blocks = [[*[0] * released, *blocks] for released, blocks in fields.windows]


def _collect_rare_fields(work: Sequence[WorkItem]) -> dict[int, RareFields]:
    """Return the rare fields of items that have some, by index."""
    scored, drafts = [w.prompt_logprobs for w in work], [w.num_draft for w in work]
    states, windows = [w.state for w in work], [w.window_blocks for w in work]
    if not (any(scored) or any(drafts) or any(states) or any(windows)):
        return {}
    return {
        index: RareFields(score, draft, state, [_trim_released_blocks(table) for table in tables])
        for index, (score, draft, state, tables) in enumerate(zip(scored, drafts, states, windows, strict=True))
        if score or draft or state is not None or tables
    }


def _split_tokens(step: EncodedWork) -> Iterable[Sequence[int]]:
    """Return the tokens of each item."""
    tokens = _read_integers(step.tokens)
    if step.counts is None:
        return zip(tokens, strict=True)
    ends = accumulate(step.counts)
    return [tokens[end - count : end] for end, count in zip(ends, step.counts, strict=True)]


def _read_integers(column: bytes) -> list[int]:
    return memoryview(column).cast("i").tolist()


def _trim_released_blocks(table: Sequence[int]) -> tuple[int, Sequence[int]]:
    """Return the number of zeros at the start of a block table, and the rest of it."""
    released = next((index for index, block in enumerate(table) if block), len(table))
    return released, table[released:]
