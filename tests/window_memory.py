"""Memory: what each position of a KV cache with several groups of layers contains, as the requests wrote it."""

from __future__ import annotations

from dataclasses import dataclass, field

from emberline.core.params import SamplingParams
from emberline.core.request import Priority, Request
from emberline.kv.layer_groups import LayerGroups
from emberline.kv.manager import KVManager

SIZE, STEP = 4, 12
Content = tuple[int, tuple[int, ...]]  # group of layers, and the tokens up to this position


@dataclass
class Memory:
    """Requests that compute tokens in the blocks of a KVManager, and what each position of a block contains."""

    kv: KVManager
    windows: tuple[int, ...]
    content: dict[tuple[int, int], Content] = field(default_factory=dict)
    open: dict[str, Request] = field(default_factory=dict)
    saved: dict[bytes, list[Content | None]] = field(default_factory=dict)  # what each block in tiers contains

    def copy_blocks(self) -> None:
        """Make the pending copies, as a step plan does before it computes anything."""
        saves, loads = self.kv.copies.take_saves(), self.kv.copies.take_loads()
        for copy in saves:
            content = [self.content.get((copy.block, at)) for at in range(SIZE)]
            assert self.saved.setdefault(copy.digest, content) == content, "two contents have the same hash"
        for copy in loads:
            for at, loaded in enumerate(self.saved[copy.digest]):
                assert loaded is not None
                self.content[copy.block, at] = loaded
        self.kv.copies.finish(saves, loads)

    def compute(self, request: Request, count: int) -> bool:
        start = request.num_computed
        if not self.kv.extend_block_table(request, start + count):
            return False
        self.copy_blocks()
        tables = [self.kv.block_table(request), *self.kv.window_tables(request)]
        for group, table in enumerate(tables):
            for at in range(start, start + count):
                self.content[table[at // SIZE], at % SIZE] = group, tuple(request.tokens[: at + 1])
        for group, table in enumerate(tables):
            for at in range(start, start + count):
                window = self.windows[group] or at + 1
                for key in range(max(0, at - window + 1), at + 1):
                    expected = group, tuple(request.tokens[: key + 1])
                    assert self.content[table[key // SIZE], key % SIZE] == expected, (group, at, key)
        request.num_computed = request.num_planned = start + count
        self.kv.index_full_blocks(request)
        return True


def evict_idle_blocks(kv: KVManager, windows: tuple[int, ...], spared: int) -> None:
    """Let a request that computes nothing take the available blocks, but for `spared` blocks of its first table."""
    available = kv.num_free_blocks + kv.num_cached_blocks
    longest = LayerGroups(1, windows, ()).max_tokens(available, SIZE, STEP) - spared * SIZE
    if longest > 0 and kv.admit(request := make_request("evicts", [9] * longest)):
        kv.free_request(request)


def make_request(name: str, tokens: list[int]) -> Request:
    return Request(
        id=name, submission_id=name, index=0, prompt_len=len(tokens), tokens=list(tokens), params=SamplingParams(),
        seed=0, max_len=10_000, priority=Priority.INTERACTIVE, salt="", arrival=0.0, deadline=1e9,
    )  # fmt: skip
