"""VocabularyShard: the rows of the embedding and of the output head that one of several ranks has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.kernels import ops
from emberline.kernels.comm.communicator import Communicator
from emberline.kernels.work_limits import MAX_GATHERED_LOGITS, split_evenly
from emberline.models.outline import divide_vocabulary
from emberline.models.row_exchange import RowExchange
from emberline.models.weights import Weights


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    comm: Communicator
    tokens: range  # whose rows this rank has
    shard_size: int  # number of tokens of each rank but the last, which may have fewer
    vocab: int  # number of tokens of all ranks

    @staticmethod
    def from_weights(weights: Weights, vocab: int) -> VocabularyShard | None:
        """Return the part of the vocabulary of the rank that loads `weights`; None: the model is not divided.

        `vocab`: the number of tokens of all ranks."""
        if weights.comm is None:
            assert weights.shard.is_whole, "a rank needs a communicator"
            return None
        shard_size = divide_vocabulary(vocab, weights.shard.world_size)
        return VocabularyShard(weights.comm, weights.shard.vocabulary(vocab), shard_size, vocab)

    def embed(self, tokens: Tensor, table: Tensor | ops.PackedWeight, exchange: RowExchange | None = None) -> Tensor:
        """Return the embeddings of the tokens. `table`: the rows of the embedding that this rank has.

        With `exchange`, ranks have different tokens: `tokens` are those of all ranks, in the order of the ranks, and
        only the embeddings of this rank's tokens are returned."""
        others = (tokens < self.tokens.start) | (tokens >= self.tokens.stop)
        own = (tokens - self.tokens.start).masked_fill_(others, 0)
        rows = ops.embed(own, table).masked_fill_(others[:, None], 0)
        return self.comm.all_reduce(rows) if exchange is None else exchange.reduce_scatter(rows)

    def compute_logits(self, x: Tensor, head: ops.LinearLayer, out: Tensor | None) -> Tensor:
        """Return the logits of x over the whole vocabulary. `head`: the rows that this rank has.

        `out`: receives the result of a captured step (CUDA graph). Without it, the result is a new tensor, and the
        ranks exchange logits a few rows at a time."""
        if out is not None:
            return out.copy_(self._gather_logits(x, head))
        parts = list(split_evenly(len(x), MAX_GATHERED_LOGITS))
        if len(parts) == 1:
            return self._gather_logits(x, head).contiguous()
        logits = x.new_empty(len(x), self.vocab, dtype=torch.float32)
        for part in parts:
            logits[part] = self._gather_logits(x[part], head)
        return logits

    def _gather_logits(self, x: Tensor, head: ops.LinearLayer) -> Tensor:
        own = ops.linear(x, head, float32_output=True)
        if self.shard_size > len(self.tokens):
            own = F.pad(own, (0, self.shard_size - len(self.tokens)))
        return self.comm.all_gather(own)[:, : self.vocab]
