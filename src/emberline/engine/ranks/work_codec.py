"""WorkEncoder, WorkDecoder: the work of a step as MessagePack, for ranks that decoded all earlier steps.

A step mostly continues requests of an earlier one, so only what changed is encoded: new tokens, and new blocks at the
ends of the block tables. With several stages, steps of different requests alternate, so requests are remembered over
as many steps as there are stages. Fields that only KV transfers use are not encoded. Both sides handle a field of all
items at once, because a loop over 256 items in Python costs more than all other work here. This module does not import
torch.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from emberline.core.plan import StateWork, WorkItem
from emberline.engine.step_columns import StepColumns


class RareFields(msgspec.Struct, array_like=True):
    """Fields of a work item that have their default in most steps of most models."""

    prompt_logprobs: bool = False
    num_draft: int = 0
    state: StateWork | None = None
    # For each group of layers with a window: the number of released blocks, and the blocks after them.
    windows: Sequence[tuple[int, Sequence[int]]] = ()
    num_propose: int = 0
    max_shift: int = 0


class EncodedWork(msgspec.Struct, array_like=True):
    """The work items of a step, field by field.

    `numbers` and `slots` are 32-bit integers as bytes, because these are decoded faster than lists."""

    num_items: int
    # The start of each item, then the tokens of all items, then the token count of each item unless all have one token.
    numbers: bytes
    samples: bytes | bool  # by item; one value if it is equal for all items
    new_blocks: dict[int, Sequence[int]]  # by item: blocks at the end of its table
    # By item: the slot of its request; ~slot: a request begins there. None: as in the oldest remembered step.
    slots: bytes | None
    homes: dict[int, int]  # by item, if its request is new: the rank that has its blocks, if that is not 0
    rare: dict[int, RareFields]  # by item, if one of these fields does not have its default
    cleared: Sequence[int]  # blocks that are filled with zeros before the step
    captured_layers: Sequence[int] = ()  # layers whose inputs a draft model reads


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(EncodedWork)


@dataclass(frozen=True, slots=True)
class _EncodedRequests:
    """The requests of a step that was encoded."""

    ids: list[str]
    preemptions: list[int]
    slots: NDArray[np.int32]


ENDED = -1  # stands in place of a request's number of preemptions when the request has ended


class WorkEncoder:
    def __init__(self, num_plans: int = 1) -> None:
        """`num_plans`: the number of steps over which requests are remembered. It must be the same in the decoders."""
        self._num_plans = num_plans
        self._steps: deque[_EncodedRequests] = deque()  # the last `num_plans` steps
        self._slots: dict[str, int] = {}  # by id, of the requests in `_steps`
        self._free_slots: list[int] = []
        self._preemptions: list[int] = []  # by slot
        self._num_blocks = np.zeros(0, np.int32)  # by slot: length of the block table that the decoders know

    def forget(self, ids: Sequence[str]) -> None:
        """Note that these requests have ended. A later request with the same id, even in the next step, is another."""
        ended = self._slots.keys() & ids if self._slots and ids else ()
        for name in ended:
            self._preemptions[self._slots[name]] = ENDED
        if ended:
            self._steps = deque(
                step if ended.isdisjoint(step.ids) else replace(step, preemptions=[]) for step in self._steps
            )

    def encode(
        self, work: Sequence[WorkItem], cleared: Sequence[int] = (), captured_layers: Sequence[int] = ()
    ) -> bytes:
        """Return the work of the next step. `cleared`: blocks to fill with zeros first.

        `captured_layers`: layers whose inputs the leader's draft model reads."""
        slots, changed = self._continue_requests([w.id for w in work], [w.preemptions for w in work])
        numbers = [w.start for w in work]
        numbers += [token for w in work for token in w.tokens]
        if len(numbers) != 2 * len(work):
            numbers += [len(w.tokens) for w in work]
        samples = [w.samples for w in work]
        begun = [] if changed is None else np.flatnonzero(changed < 0).tolist()
        counts = np.fromiter([len(w.blocks) for w in work], np.int32, len(work))
        known, self._num_blocks[slots] = self._num_blocks[slots], counts
        return _ENCODER.encode(
            EncodedWork(
                len(work),
                array("i", numbers).tobytes(),
                all(samples) or (any(samples) and bytes(samples)),
                {i: work[i].blocks[known[i] :] for i in np.flatnonzero(counts != known).tolist()},
                None if changed is None else changed.tobytes(),
                {i: work[i].dp_rank for i in begun if work[i].dp_rank},
                _collect_rare_fields(work),
                cleared,
                captured_layers,
            )
        )

    def _continue_requests(
        self, ids: list[str], preemptions: list[int]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32] | None]:
        """Return each item's slot (its request's index in encoder and decoders), and `EncodedWork.slots`.

        `EncodedWork.slots` is None if the oldest of the last `_num_plans` steps had the same requests. Otherwise it has
        ~slot instead of slot for a request for which the decoders must begin with an empty block table."""
        oldest = self._steps.popleft() if len(self._steps) == self._num_plans else None
        if oldest is not None and ids == oldest.ids and preemptions == oldest.preemptions:
            self._steps.append(oldest)
            return oldest.slots, None
        places = [self._continue_request(*each) for each in zip(ids, preemptions, strict=True)]
        changed = np.array(places, np.int32)
        slots = np.where(changed < 0, ~changed, changed)
        self._steps.append(_EncodedRequests(ids, preemptions, slots))
        if oldest is not None:
            for name in set(oldest.ids).difference(*(step.ids for step in self._steps)):
                self._free_slots.append(self._slots.pop(name))
        return slots, changed

    def _continue_request(self, name: str, preemptions: int) -> int:
        """Return the slot of a request, or ~slot if the decoders must begin with an empty block table.

        They must if the request is new, or was preempted, which replaces all its blocks."""
        slot = self._slots.get(name)
        if slot is not None and self._preemptions[slot] == preemptions:
            return slot
        if slot is None:
            slot = self._slots[name] = self._free_slots.pop() if self._free_slots else len(self._preemptions)
        if slot == len(self._preemptions):
            self._preemptions.append(0)
            if slot == len(self._num_blocks):
                self._num_blocks = np.concatenate([self._num_blocks, np.zeros(slot + 16, np.int32)])
        self._preemptions[slot], self._num_blocks[slot] = preemptions, 0
        return ~slot


@dataclass(slots=True)  # not frozen, because a frozen one takes three times as long to make
class DecodedStep:
    """The work of a step. The items are valid until the next step is decoded, which changes them."""

    requests: list[WorkItem]  # without ids; `start`, `tokens` and `samples` are only in the columns
    columns: StepColumns
    cleared: Sequence[int]  # blocks to fill with zeros before the step
    captured_layers: tuple[int, ...] = ()  # layers whose inputs the leader's draft model reads

    def fill_items(self) -> list[WorkItem]:
        """Return the work items with all fields but their ids."""
        self.columns.fill_items(self.requests)
        return self.requests


class WorkDecoder:
    def __init__(self, num_plans: int = 1) -> None:
        """`num_plans`: the number of steps over which requests are remembered. It must be the same in the encoder."""
        self._steps: deque[list[WorkItem]] = deque([[] for _ in range(num_plans)], num_plans)
        self._by_slot: list[WorkItem] = []
        self._rare_items: list[WorkItem] = []  # those with rare fields
        self._ones = np.ones(0, np.int32)

    def decode(self, message: bytes) -> DecodedStep:
        """Return the work of the next step."""
        step = _DECODER.decode(message)
        items = self._steps[0] if step.slots is None else [self._find_item(i) for i in _read_integers(step.slots)]
        self._steps.append(items)
        for index, dp_rank in step.homes.items():
            items[index].dp_rank = dp_rank
        for index, blocks in step.new_blocks.items():
            table = items[index].blocks
            assert isinstance(table, list)
            table += blocks
        self._set_rare_fields(items, step.rare)
        return DecodedStep(items, self._decode_columns(step), step.cleared, tuple(step.captured_layers))

    def _decode_columns(self, step: EncodedWork) -> StepColumns:
        items, numbers = step.num_items, np.frombuffer(bytearray(step.numbers), np.int32)  # arrays must be writable
        tokens, counts = numbers[items:], self._ones
        if len(numbers) != 2 * items:
            tokens, counts = numbers[items:-items], numbers[-items:]
        elif len(counts) != items:
            counts = self._ones = np.ones(items, np.int32)
        if isinstance(step.samples, bytes):
            samples = np.frombuffer(step.samples, np.bool_)
        else:
            samples = counts.astype(np.bool_) if step.samples else np.zeros(items, np.bool_)
        return StepColumns(numbers[:items], counts, tokens, samples)

    def _find_item(self, slot: int) -> WorkItem:
        """Return the work item of a slot. Given ~slot, make a new item, for a request that begins in the slot."""
        if slot >= 0:
            return self._by_slot[slot]
        item = WorkItem("", 0, (), [], samples=False)
        self._by_slot[~slot : ~slot + 1] = [item]  # the slot may be the next after all others
        return item

    def _set_rare_fields(self, items: Sequence[WorkItem], rare: dict[int, RareFields]) -> None:
        for item in self._rare_items:
            item.prompt_logprobs, item.num_draft, item.state, item.window_blocks = False, 0, None, ()
            item.num_propose = item.max_shift = 0
        self._rare_items = [items[index] for index in rare]
        for item, fields in zip(self._rare_items, rare.values(), strict=True):
            item.prompt_logprobs, item.num_draft, item.state = fields.prompt_logprobs, fields.num_draft, fields.state
            item.window_blocks = [[*[0] * released, *blocks] for released, blocks in fields.windows]
            item.num_propose, item.max_shift = fields.num_propose, fields.max_shift


def _collect_rare_fields(work: Sequence[WorkItem]) -> dict[int, RareFields]:
    """Return the RareFields of the items in which at least one of these fields is not at its default.

    The keys are the indexes of the items."""
    return {
        index: RareFields(
            w.prompt_logprobs,
            w.num_draft,
            w.state,
            [_trim_released_blocks(table) for table in w.window_blocks],
            w.num_propose,
            w.max_shift,
        )
        for index, w in enumerate(work)
        if w.num_draft or w.window_blocks or w.state is not None or w.prompt_logprobs or w.num_propose or w.max_shift
    }


def _read_integers(column: bytes) -> list[int]:
    return memoryview(column).cast("i").tolist()


def _trim_released_blocks(table: Sequence[int]) -> tuple[int, Sequence[int]]:
    """Return the number of zeros at the start of a block table, and the rest of it."""
    released = next((index for index, block in enumerate(table) if block), len(table))
    return released, table[released:]
