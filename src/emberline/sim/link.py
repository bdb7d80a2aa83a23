"""KVLink and SimPulls: the simulated network over which a worker copies KV blocks of another worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emberline.core.clock import Clock
from emberline.core.events import TransferStats
from emberline.core.handoff import BlockPull, PrefillResult
from emberline.core.request import Request


@dataclass(frozen=True, slots=True)
class KVLink:
    bytes_per_second: float = 25e9
    latency_s: float = 1e-3

    def transfer_seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class KVSource:
    """Blocks that another worker has computed for a request."""

    tokens: int  # leading tokens of the request whose keys and values are copied
    overlapped_tokens: int  # part of `tokens` that is copied while the other worker still computes the prompt
    is_prefill: bool = False  # the other worker is a prefill worker, which also samples the first token
    cached_tokens: int = 0  # prompt tokens that the other worker found in its cache
    # Time at which the other worker had computed all tokens, if it announced them before: the copy starts at this time,
    # even during a step of the answering worker. None: the copy starts when the request is admitted.
    ready_at: float | None = None

    def copy_end(self, link_free_at: float, now: float, seconds: float) -> float:
        """Return when a copy that takes `seconds` ends. The link is busy with other copies until `link_free_at`."""
        return max(link_free_at, now if self.ready_at is None else self.ready_at) + seconds

    def seconds(self, link: KVLink, kv_bytes_per_token: float, missing_tokens: int) -> float:
        """Return the seconds that the copy still takes if the cache lacks `missing_tokens` of the tokens."""
        return link.transfer_seconds(max(0, missing_tokens - self.overlapped_tokens) * kv_bytes_per_token)


def count_overlapped_tokens(
    num_prompt: int, num_cached: int, chunk: int, prefill_s: float, link: KVLink, kv_bytes_per_token: float
) -> int:
    """Return how many tokens of a prompt are copied while the prompt is being computed.

    Cached blocks are sent at once, and the blocks of each chunk when the chunk has been computed. So the last chunk is
    sent after the computation. The same is true of the blocks that the link cannot carry within `prefill_s`, the
    seconds of the computation."""
    computed = num_prompt - num_cached
    last_chunk = (computed - 1) % chunk + 1
    return min(num_prompt - last_chunk, int(prefill_s * link.bytes_per_second / kv_bytes_per_token))


@dataclass(slots=True)
class SimPull:
    """A copy of blocks that ends at a known time, with the attributes of `kv.pulls.Pull` that the KV manager reads."""

    covered_tokens: int
    available_tokens: int  # once it has ended
    ends_at: float
    prefill_result: PrefillResult | None
    summary: BlockPull | None = None
    indivisible_tokens: int | None = None


class SimPulls:
    """Simulates `kv.pulls.PullManager`: copies take the time that the link needs, and never fail.

    The copies to one worker share its link, one after the other."""

    def __init__(self, clock: Clock, link: KVLink, kv_bytes_per_token: float, block_size: int) -> None:
        self._clock = clock
        self._link = link
        self._kv_bytes_per_token = kv_bytes_per_token
        self._block_size = block_size
        self._link_free_at = 0.0
        # Sources by request id, each with the first token of the request's output.
        self._sources: dict[str, tuple[KVSource, int]] = {}
        self._open_pulls: list[SimPull] = []

    @property
    def next_end(self) -> float | None:
        """The time at which the next copy ends, or None if there is none."""
        return min((pull.ends_at for pull in self._open_pulls), default=None)

    def keep_lease_alive(self, request: Request) -> None:
        assert request.source is not None
        self._sources[request.id] = request.source["kv"], request.source["first_token"]

    def peer_block_tokens(self, request: Request) -> int:
        return self._block_size

    def covered_tokens(self, request: Request) -> int:
        return self._sources[request.id][0].tokens

    def start(self, request: Request, target_blocks: Sequence[int], whole: object = None) -> SimPull | None:
        source, first_token = self._sources.pop(request.id)
        request.source = None
        full = source.tokens // self._block_size * self._block_size
        if request.num_cached >= full:
            return None
        seconds = source.seconds(self._link, self._kv_bytes_per_token, full - request.num_cached)
        self._link_free_at = source.copy_end(self._link_free_at, self._clock.now(), seconds)
        result = None
        if source.is_prefill:
            result = PrefillResult((first_token,), False, source.cached_tokens, 0.0)
        pull = SimPull(source.tokens, full, self._link_free_at, result)
        self._open_pulls.append(pull)
        return pull

    def poll_available_tokens(self, pull: SimPull) -> tuple[int, bool]:
        has_ended = self._clock.now() >= pull.ends_at
        if has_ended:
            self._open_pulls.remove(pull)
        return (pull.available_tokens if has_ended else 0), has_ended

    def cancel(self, pull: SimPull) -> None:
        self._open_pulls.remove(pull)

    def drop_lease(self, request: Request) -> None:
        self._sources.pop(request.id, None)

    def record_hit_tokens(self, tokens: int) -> None:
        pass

    def wait_for_progress(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass

    def stats(self) -> TransferStats:
        return TransferStats()
