"""RequestHasher: the hashes of a request's KV blocks, and which of them other requests may share."""

from __future__ import annotations

from emberline.core.request import Request
from emberline.tokens.blockhash import block_hash, root_hash


class RequestHasher:
    def __init__(self, layout: str, block_size: int, *, prefix_cache: bool) -> None:
        self._layout = layout
        self._block_size = block_size
        self._prefix_cache = prefix_cache

    def shareable_hashes(self, request: Request) -> list[bytes]:
        """Return the hashes of the request's leading blocks that may be taken from a cache.

        The block of the last known token is not included, because the engine must compute that token for its logits.
        """
        if not self.can_share_blocks(request) or request.params.prompt_logprobs is not None:
            return []  # prompt logprobs need logits, which cached blocks do not have
        full = (request.num_known - 1) // self._block_size  # the last token is always computed, for its logits
        return self.block_hashes(request, full)

    def can_share_blocks(self, request: Request) -> bool:
        """Return whether other requests may share the blocks of this request.

        Without a prefix cache, only the n choices of one request share blocks.
        """
        return self._prefix_cache or request.params.n > 1

    def block_hashes(self, request: Request, count: int) -> list[bytes]:
        """Return the hashes of the first `count` blocks. Each is computed once and kept in `request.block_hashes`."""
        hashes = request.block_hashes
        if len(hashes) < count:
            salt = request.salt if self._prefix_cache else f"{request.salt}/{request.submission_id}"
            parent = hashes[-1] if hashes else root_hash(self._layout, salt)
            for i in range(len(hashes), count):
                parent = block_hash(parent, request.tokens[i * self._block_size : (i + 1) * self._block_size])
                hashes.append(parent)
        return hashes[:count]
