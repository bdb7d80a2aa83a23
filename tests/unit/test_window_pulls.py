"""Blocks of layers with a window, from one engine's cache to another's: every token finds its keys there."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_helpers import blank, small
from window_memory import SIZE, STEP, Memory, evict_idle_blocks, make_request

from emberline.core.clock import ManualClock
from emberline.core.handoff import PrefillResult
from emberline.core.request import Request
from emberline.kv.manager import KVManager
from emberline.kv.pulls import PullManager
from emberline.kv.transfer.errors import PeerLost
from emberline.kv.transfer.progress import PullProgress
from emberline.kv.transfer.ticket import Peer, Ticket, compute_ticket_subject

LAYOUT = small(tokens=SIZE)


@dataclass
class FakeClient:
    """Copies what the sender published, up to the block at which it fails."""

    source: Memory
    published: list[int] = field(default_factory=list)
    target: Memory | None = None
    fails_at: int | None = None
    completes: bool = True
    region = blank(LAYOUT, 2)

    def pull(
        self, ticket: Ticket, target_blocks: Sequence[int], deadline: float, *, progress: PullProgress, first_block: int
    ) -> PullProgress:
        assert self.target is not None and len(target_blocks) == len(self.published)
        for i in range(first_block, len(self.published)):
            progress.raise_if_cancelled()
            if i == self.fails_at:
                raise PeerLost("the sender is gone")
            for at in range(SIZE):
                self.target.content[target_blocks[i], at] = self.source.content[self.published[i], at]
        progress.confirmed_blocks, progress.complete = len(self.published), self.completes
        progress.ticket = replace(ticket, complete=True, note=str(PrefillResult((1,), False, 0, 0.0)))
        return progress

    def renew(self, ticket: Ticket, deadline: float) -> None: ...

    def acknowledge(self, ticket: Ticket, deadline: float) -> None: ...

    def release(self, ticket: Ticket, deadline: float) -> None: ...


def compute_and_publish(memory: Memory, request: Request, rng: random.Random) -> list[int]:
    """Compute the request in chunks and return the blocks that were published, which stay pinned."""
    kv, published = memory.kv, list[int]()
    assert kv.admit(request)
    while True:
        blocks = kv.publishable_blocks(request, len(published))
        kv.retained.pin(blocks)
        published += blocks
        if request.num_computed == request.num_known:
            kv.free_request(request)
            return published
        assert memory.compute(request, rng.randint(1, min(STEP, request.num_known - request.num_computed)))


class OncePerRequestManager(KVManager):
    """A manager with more to do at each admission, as the one of recurrent states has."""

    num_admissions = 0

    def admit(self, request: Request, reserved_blocks: int = 0) -> bool:
        is_admitted = super().admit(request, reserved_blocks)
        self.num_admissions += is_admitted
        return is_admitted


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    windows=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    length=st.integers(SIZE, 45) | st.sampled_from(range(SIZE, 45, SIZE)),
    num_cached=st.integers(0, 45),
    outcome=st.sampled_from(["arrives", "arrives without a token", "fails", "is aborted", "has no thread"]),
)
def test_every_token_finds_its_keys_after_a_pull(
    seed: int, windows: list[int], length: int, num_cached: int, outcome: str
) -> None:
    """`num_cached`: leading tokens that the receiver computed before, of which it may have evicted some blocks."""
    rng, tables = random.Random(seed), (0, *windows)
    prompt = [rng.randrange(3) for _ in range(length)]
    source = Memory(KVManager(90, SIZE, "t", windows=windows, max_step_tokens=STEP), tables)
    if rng.random() < 0.5:
        source.kv.retained.unpin(compute_and_publish(source, make_request("before", prompt), rng))
        evict_idle_blocks(source.kv, tables, rng.randrange(20))
    client = FakeClient(source, compute_and_publish(source, make_request("sent", prompt), rng))
    source.kv.check_invariants()
    if outcome == "fails":
        client.fails_at = rng.randrange(len(client.published))
    client.completes = outcome == "arrives"
    pulls, work = PullManager(client, clock=ManualClock()), list[Callable[[], None]]()
    pulls._start_thread = work.append if outcome != "has no thread" else fail_to_start
    kv = OncePerRequestManager(60, SIZE, "t", windows=windows, max_step_tokens=STEP, pulls=pulls)
    client.target = memory = Memory(kv, tables)
    if num_cached:
        kv.retained.unpin(compute_and_publish(memory, make_request("part", prompt[:num_cached]), rng))
        evict_idle_blocks(kv, tables, rng.randrange(12))
    request = make_request("r", prompt)
    ticket = Ticket(Peer("p", "i", LAYOUT, {}), "id", (), (), False, 10.0)
    request.source = replace(ticket, subject=compute_ticket_subject(LAYOUT, "", prompt)).as_dict()
    kv.keep_source_lease_alive(request)
    work.clear()  # no lease needs to be renewed
    kv.num_admissions = 0
    assert kv.admit(request) and kv.num_admissions == 1
    kv.check_invariants()
    is_pulled = kv.is_loading(request)
    assert is_pulled or outcome == "has no thread" or request.num_computed // SIZE == length // SIZE
    if is_pulled and outcome == "is aborted":
        kv.free_request(request)
        evict_idle_blocks(kv, tables, 0)  # takes none of the blocks to which the pull may still write
        kv.check_invariants()
        work.pop()()
        kv.retained.release_ended()
        assert kv.num_free_blocks + kv.num_cached_blocks == 60 and kv.retained.num_quarantined == 0
        assert kv.admit(request)
    elif is_pulled:
        assert kv.update_loaded_prefix(request) and kv.is_loading(request)
        work.pop()()
        if not kv.update_loaded_prefix(request):
            assert outcome == "fails"
            kv.free_request(request)
            assert kv.admit(request)
        elif outcome == "arrives":
            assert request.num_computed == length // SIZE * SIZE
            request.tokens.append(1)
        else:
            assert request.num_computed == min(length // SIZE * SIZE, length - 1)
    request.tokens += [2, 1]
    assert not kv.is_loading(request)
    while request.num_computed < request.num_known:
        assert memory.compute(request, rng.randint(1, min(STEP, request.num_known - request.num_computed)))
        kv.check_invariants()
    kv.free_request(request)
    source.kv.retained.unpin(client.published)
    source.kv.check_invariants()
    assert kv.num_free_blocks + kv.num_cached_blocks == 60
    assert source.kv.num_free_blocks + source.kv.num_cached_blocks == 90


def fail_to_start(work: Callable[[], None]) -> None:
    raise RuntimeError("no more threads")
