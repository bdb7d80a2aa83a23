"""VocabularyPart: the rows of the embedding and of the output head that one of several ranks has."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from emberline.kernels import ops
from emberline.kernels.comm.communicator import Communicator
from emberline.models.outline import divide_vocabulary
from emberline.models.row_exchange import RowExchange
from emberline.models.weights import Weights


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    comm: Communicator
    tokens: range  # of this rank
    part_size: int  # tokens of each rank but the last, which may have fewer
    vocab: int  # tokens of all ranks

    @staticmethod
    def of(weights: Weights, vocab: int) -> VocabularyPart | None:
        """Return the part of a rank, or None for a model that is not divided."""
        if weights.comm is None:
            assert weights.shard.is_whole, "a rank needs a communicator"
            return None
        part_size = divide_vocabulary(vocab, weights.shard.world_size)
        return VocabularyPart(weights.comm, weights.shard.vocabulary(vocab), part_size, vocab)

    def embed(self, tokens: Tensor, table: Tensor | ops.PackedWeight, exchange: RowExchange | None = None) -> Tensor:
        """Return the rows of the whole embedding. `table`: the rows that this rank has.

        `exchange`: of ranks with different tokens. `tokens` are then those of all ranks, and only own rows returned."""
        others = (tokens < self.tokens.start) | (tokens >= self.tokens.stop)
        own = (tokens - self.tokens.start).masked_fill_(others, 0)
        rows = ops.embed(own, table).masked_fill_(others[:, None], 0)
        return self.comm.all_reduce(rows) if exchange is None else exchange.sum_own(rows)

    def compute_logits(self, x: Tensor, head: ops.LinearLayer, out: Tensor | None) -> Tensor:
        """Return the logits of all tokens. `head`: the rows that this rank has. `out`: what receives the result."""
        own = ops.linear(x, head, float32_output=True)
        padded = F.pad(own, (0, self.part_size - len(self.tokens)))
        logits = self.comm.all_gather(padded)[:, : self.vocab]
        return logits.contiguous() if out is None else out.copy_(logits)
