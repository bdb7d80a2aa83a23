"""StateSlots: which slot holds the recurrent states of each request, and which slots hold snapshots of states.

A layer with a recurrent state keeps no blocks, so the tokens of a cached prefix can be skipped only if the state after
them was kept. A snapshot is such a kept state: a copy made at the end of a block, and identified by the hash of that
block, which stands for the whole prefix. Every slot is free, holds the state of one running request, is about to
receive a snapshot (of a request, or from a tier), or holds a snapshot. Snapshots are evicted when a slot is needed, the
least recently used first.

This module does not import torch; runners copy the states as work items say."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_PLANNED = 2  # snapshots of a request in steps whose results are not known: one step is planned while another runs


@dataclass(frozen=True, slots=True)
class PlannedSnapshot:
    """A snapshot that a step makes, which can be used once the result of the step is known."""

    digest: bytes | None  # None: the last token of the prefix is not known yet
    slot: int
    num_tokens: int  # of the prefix
    replaces: bool  # whether the request's next snapshot with `replaces` replaces this one
    # Returns the position that the states reach in the step at least, and whether that is final. If they end before
    # `num_tokens`, the step makes no snapshot. None: they are sure to reach `num_tokens`.
    known_end: Callable[[], tuple[int, bool]] | None = None

    @property
    def is_reached(self) -> bool:
        return self.known_end is None or self.known_end()[0] >= self.num_tokens

    @property
    def is_missed(self) -> bool:
        return self.known_end is not None and not self.is_reached and self.known_end()[1]


class StateSlots:
    def __init__(self, total: int) -> None:
        self.total = total
        # Called with the hash and the slot of each snapshot that no later one of its request will replace.
        self.on_keep: Callable[[bytes, int], None] = lambda digest, slot: None
        self._free = list(range(total - 1, -1, -1))
        self._held: dict[str, int] = {}  # by request
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # slots by hash, the least recently used first
        self._loads: dict[str, bytes] = {}  # by request: snapshot that its next step starts from, kept until then
        self._planned: dict[str, list[PlannedSnapshot]] = {}  # by request, the oldest first
        self._arriving: dict[str, tuple[bytes, int]] = {}  # by request: snapshot from a tier, hash and slot
        self._newest: dict[str, bytes] = {}  # by request: the snapshot that its next one replaces
        self._changed: set[bytes] | None = None  # hashes of snapshots that were added or removed, if that is tracked

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def longest_prefix(self, hashes: Sequence[bytes]) -> int:
        """Return the number of blocks of the longest prefix that has a snapshot; 0 if none has one.

        `hashes`: the chain of block hashes whose prefixes are tried."""
        return next((count for count in range(len(hashes), 0, -1) if hashes[count - 1] in self._snapshots), 0)

    def track_changes(self) -> None:
        """Start recording which snapshots are added and removed."""
        self._changed = set()

    def take_changes(self) -> set[bytes]:
        """Return the hashes of the snapshots that were added or removed since the last call."""
        if not self._changed:
            return set()
        changed, self._changed = self._changed, set()
        return changed

    def has_snapshot(self, digest: bytes) -> bool:
        return digest in self._snapshots

    @property
    def can_admit(self) -> bool:
        return bool(self._free) or any(digest not in self._loads.values() for digest in self._snapshots)

    def admit(self, request_id: str, digest: bytes | None) -> None:
        """Give a slot to a request, which starts from the snapshot `digest` or, if that is None, at its first token."""
        assert request_id not in self._held
        if digest is not None:
            self._start_from(request_id, digest)
        slot = self._allocate()
        if slot is None:  # the snapshot itself is the only slot left
            assert digest is not None, "the caller checks `can_admit`"
            del self._loads[request_id]
            slot = self._remove(digest)
        self._held[request_id] = slot

    def begin_load(self, request_id: str, digest: bytes) -> int:
        """Return the slot to which the snapshot `digest` is copied from a tier, for a request that starts from it.

        The snapshot gets a slot of its own, so that other requests can use it too. If no slot is available, it is
        copied to the request's slot."""
        assert request_id not in self._loads and request_id not in self._arriving
        if (slot := self._allocate()) is None:
            return self._held[request_id]
        self._arriving[request_id] = digest, slot
        return slot

    def loading_slot(self, request_id: str) -> int:
        """Return the slot that `begin_load` returned for this request."""
        return self._arriving[request_id][1] if request_id in self._arriving else self._held[request_id]

    def commit_load(self, request_id: str) -> None:
        """Make a snapshot, which was loaded for a request into a slot of its own, usable for all requests.

        The next step of this request then starts from the snapshot. Nothing happens if none was loaded for it."""
        if (arrived := self._arriving.pop(request_id, None)) is None:
            return
        digest, slot = arrived
        if digest in self._snapshots:  # another request made or loaded it since
            self._free.append(slot)
        else:
            self._add(digest, slot)
        self._start_from(request_id, digest)

    def slot_of(self, request_id: str) -> int:
        return self._held[request_id]

    def take_load(self, request_id: str) -> int | None:
        """Return the slot from which the request's next step must copy states to the request's own slot.

        Return None if the step need not copy states, or if an earlier call returned the slot."""
        digest = self._loads.pop(request_id, None)
        return None if digest is None else self._snapshots[digest]

    def plan_snapshot(
        self,
        request_id: str,
        digest: bytes | None,
        num_tokens: int,
        *,
        replaces: bool,
        known_end: Callable[[], tuple[int, bool]] | None = None,
    ) -> int | None:
        """Return the slot to which a step copies the states of the request, or None if it makes no snapshot.

        `digest`: None if it is only known when the snapshot is committed. `replaces`: the snapshot replaces the
        request's previous one that was made with `replaces`. `known_end`: returns the position that the states reach in
        the step at least, and whether that is final; None: they are sure to reach `num_tokens`."""
        if digest is not None and digest in self._snapshots:
            self._snapshots.move_to_end(digest)
            return None
        if len(self._planned.get(request_id, ())) >= MAX_PLANNED:
            return None
        if replaces and known_end is None and (previous := self._newest.pop(request_id, None)) is not None:
            self.forget_prefix(previous)
        if (slot := self._allocate()) is None:
            return None
        self._planned.setdefault(request_id, []).append(PlannedSnapshot(digest, slot, num_tokens, replaces, known_end))
        return slot

    def commit_snapshot(
        self, request_id: str, num_computed: int, find_digest: Callable[[int], bytes] | None = None
    ) -> None:
        """Make those planned snapshots of a request usable whose tokens are all computed.

        A snapshot whose step ended before the snapshot's position is dropped. `find_digest` returns the digest of a
        prefix with a given number of tokens. It is needed for snapshots that were planned without a digest."""
        kept = []
        for planned in self._planned.pop(request_id, []):
            if planned.is_missed:
                self._free.append(planned.slot)
            elif planned.num_tokens <= num_computed and planned.is_reached:
                self._commit(request_id, planned, find_digest)
            else:
                kept.append(planned)
        if kept:
            self._planned[request_id] = kept

    def _commit(self, request_id: str, planned: PlannedSnapshot, find_digest: Callable[[int], bytes] | None) -> None:
        digest = planned.digest
        if digest is None:
            assert find_digest is not None
            digest = find_digest(planned.num_tokens)
        if digest in self._snapshots:  # of another request with the same prefix
            self._free.append(planned.slot)
            return
        self._add(digest, planned.slot)
        if planned.replaces:
            if (previous := self._newest.pop(request_id, None)) is not None:  # both were planned before a result
                self.forget_prefix(previous)
            self._newest[request_id] = digest
        else:
            self.on_keep(digest, planned.slot)

    def free(self, request_id: str) -> None:
        """Free the slot of a request. Its snapshots stay, except for those that are not made yet."""
        self._free.append(self._held.pop(request_id))
        self._loads.pop(request_id, None)
        if (newest := self._newest.pop(request_id, None)) is not None and newest in self._snapshots:
            self.on_keep(newest, self._snapshots[newest])
        self._free += [planned.slot for planned in self._planned.pop(request_id, [])]
        if (arriving := self._arriving.pop(request_id, None)) is not None:
            self._free.append(arriving[1])

    def forget_prefix(self, digest: bytes) -> None:
        """Drop the snapshot of a prefix, if it exists and no request is about to start from it."""
        if digest in self._snapshots and digest not in self._loads.values():
            self._free.append(self._remove(digest))

    def check_invariants(self) -> None:
        """Assert that every slot is in exactly one state."""
        planned = [each.slot for snapshots in self._planned.values() for each in snapshots]
        planned += [slot for _, slot in self._arriving.values()]
        slots = [*self._free, *self._held.values(), *self._snapshots.values(), *planned]
        assert sorted(slots) == list(range(self.total)), "a slot is lost or used twice"
        named = self._loads.keys() | self._planned.keys() | self._newest.keys() | self._arriving.keys()
        assert named <= self._held.keys()
        assert set(self._loads.values()) <= self._snapshots.keys()

    def _start_from(self, request_id: str, digest: bytes) -> None:
        """Record that the next step of a request starts from a snapshot, which no later snapshot replaces any more."""
        self._snapshots.move_to_end(digest)
        self._loads[request_id] = digest
        if digest in self._newest.values():
            self._newest = {name: each for name, each in self._newest.items() if each != digest}
            self.on_keep(digest, self._snapshots[digest])

    def _allocate(self) -> int | None:
        if self._free:
            return self._free.pop()
        digest = next((digest for digest in self._snapshots if digest not in self._loads.values()), None)
        return None if digest is None else self._remove(digest)

    def _add(self, digest: bytes, slot: int) -> None:
        self._snapshots[digest] = slot
        if self._changed is not None:
            self._changed.add(digest)

    def _remove(self, digest: bytes) -> int:
        if self._changed is not None:
            self._changed.add(digest)
        return self._snapshots.pop(digest)
