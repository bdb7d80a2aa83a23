"""KVManager: gives requests their blocks, shares equal prefixes between them, and takes the blocks back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from emberline.core.clock import Clock, SystemClock
from emberline.core.request import Request
from emberline.kv.pool import BlockPool
from emberline.kv.prefix import PrefixIndex
from emberline.kv.residency import Residency
from emberline.tokens.blockhash import block_hash, root_hash


class KVManager:
    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        layout: str,
        *,
        prefix_cache: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.queries = 0  # tokens looked up at admissions
        self.hits = 0  # of these, found
        self._layout = layout
        self._prefix = PrefixIndex()
        self.residency = Residency(total_blocks, clock or SystemClock())
        self._pool = BlockPool(total_blocks, self._prefix.forget, self.residency)
        self._tables: dict[str, list[int]] = {}
        self._indexed: dict[str, int] = {}  # how many of a request's leading blocks are in the index

    @property
    def total(self) -> int:
        return self._pool.total

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        return self._pool.num_idle

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def table(self, request: Request) -> Sequence[int]:
        return self._tables[request.id]

    def admit(self, request: Request, reserve: int = 0) -> bool:
        """Blocks for all that is known of a request, or nothing. Sets `computed` and `cached` to the shared prefix."""
        assert request.id not in self._tables
        shared = self._match(request)
        wanted = self.blocks_for(request.known) - len(shared)
        idle = sum(1 for block in shared if self._pool.holders(block) == 0)
        if wanted + reserve > self._pool.available - idle:
            return False
        for block in shared:
            self._pool.hold(block)
        self._tables[request.id] = shared + [self._pool.take() for _ in range(wanted)]
        self._indexed[request.id] = len(shared)
        request.computed = request.planned = request.cached = len(shared) * self.block_size
        self.queries += request.known
        self.hits += request.cached
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        """Makes room for the request's first `tokens` tokens, if the pool has it."""
        table = self._tables[request.id]
        wanted = self.blocks_for(tokens) - len(table)
        if wanted <= 0:
            return True
        if wanted > self._pool.available:
            return False
        table.extend(self._pool.take() for _ in range(wanted))
        return True

    def commit(self, request: Request) -> None:
        """Blocks that are now full of computed tokens become known to others."""
        full, indexed = request.computed // self.block_size, self._indexed[request.id]
        if full <= indexed:
            return
        hashes, table = self._hashes(request, full), self._tables[request.id]
        for i in range(indexed, full):
            self._prefix.insert(hashes[i], table[i])
        self._indexed[request.id] = full

    def free(self, request: Request) -> None:
        """Takes the request's blocks back; last block first, so that prefixes outlive what follows them."""
        for block in reversed(self._tables.pop(request.id)):
            self._pool.release(block, keep=block in self._prefix)
        del self._indexed[request.id]

    def private_blocks(self, request: Request) -> int:
        """How many blocks freeing this request would give back."""
        return sum(1 for block in self._tables[request.id] if self._pool.holders(block) == 1)

    def check(self) -> None:
        """Conservation: every block is free, idle or used, and held exactly as often as tables list it."""
        self._pool.check()
        held = Counter(block for table in self._tables.values() for block in table)
        assert all(self._pool.holders(block) == held[block] for block in range(self._pool.total))
        assert self._pool.num_free + self._pool.num_idle + len(held) == self._pool.total

    def _match(self, request: Request) -> list[int]:
        if request.params.prompt_logprobs is not None:
            return []  # what comes from the cache has no logits
        full = (request.known - 1) // self.block_size  # the last token is always computed: it has the logits
        return self._prefix.longest(self._hashes(request, full))

    def _hashes(self, request: Request, full: int) -> list[bytes]:
        hashes = request.hashes
        if len(hashes) < full:
            # Without a prefix cache only the n completions of one submission share blocks.
            salt = request.salt if self.prefix_cache else f"{request.salt}/{request.parent}"
            parent = hashes[-1] if hashes else root_hash(self._layout, salt)
            for i in range(len(hashes), full):
                parent = block_hash(parent, request.tokens[i * self.block_size : (i + 1) * self.block_size])
                hashes.append(parent)
        return hashes[:full]
