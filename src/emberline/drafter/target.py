"""TargetStates: the target model's hidden states and logits for given sequences, with which a head is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from emberline.engine.kv_shape import make_kv_shape
from emberline.engine.model_support import reject_states
from emberline.kernels import ops
from emberline.kv.cache import KVCache
from emberline.models.decoder import DecoderModel
from emberline.models.forward import ForwardBatch, HiddenCapture

FORWARD_TOKENS = 8192  # tokens computed in one forward pass of the target
CPU_BLOCK_SIZE, GPU_BLOCK_SIZE = 16, 64  # tokens of a KV block


class TargetStates:
    def __init__(self, model: DecoderModel, layer_ids: tuple[int, ...], max_length: int) -> None:
        """Allocate a KV cache for forward passes over sequences of up to `max_length` tokens.

        `layer_ids`: the layers whose inputs are returned as hidden states."""
        config = model.config
        reject_states(config, "emberline drafter", "train a drafter for a model without recurrent layers")
        self.model, self.layer_ids = model, layer_ids
        self.device = model.device
        # On a CPU activations are float32, whatever the dtype of the weights.
        self._state_dtype = model.dtype if self.device.type == "cuda" else torch.float32
        self._block = GPU_BLOCK_SIZE if self.device.type == "cuda" else CPU_BLOCK_SIZE
        self._forward_tokens = max(FORWARD_TOKENS, max_length)
        # Every sequence starts a block, so up to one block per sequence is partly unused.
        blocks = 2 * -(-self._forward_tokens // self._block)
        shape = make_kv_shape(config, self._block, model.dtype)
        self._cache = KVCache(shape, blocks, str(self.device))
        heads = config.heads, config.kv_heads, config.head_dim
        options = ops.PlannerOptions(portable=config.parts.needs_portable_attention)
        planner = ops.LatentPlanner if config.parts.attention.latent else ops.AttentionPlanner
        self._planner = planner(heads, self._cache.keys, model.dtype, blocks, options)

    def compute(self, sequences: Sequence[np.ndarray], logit_spans: Sequence[range]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield hidden states [T, 3 hidden] and float32 logits [S, vocab], for as many sequences as fit a forward pass.

        The sequences are processed in order, until all are done. `logit_spans`: the positions of each sequence whose
        logits are returned. Hidden states are returned for all positions."""
        for begin, end in self._split_by_size(sequences):
            yield self._run(sequences[begin:end], logit_spans[begin:end])

    def embed(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return ops.embed(tokens, self.model.embedding)

    def output_rows(self, ids: Tensor) -> Tensor:
        """Return the rows of the target's LM head for these token ids."""
        with torch.no_grad():
            return ops.embed(ids, self.model.head.weight)

    def _split_by_size(self, sequences: Sequence[np.ndarray]) -> Iterator[tuple[int, int]]:
        """Yield ranges of sequences that fit into the cache and into the tokens of one forward pass."""
        begin = tokens = blocks = 0
        for end, ids in enumerate(sequences):
            need = -(-len(ids) // self._block)
            if end > begin and (tokens + len(ids) > self._forward_tokens or blocks + need > self._cache.num_blocks):
                yield begin, end
                begin, tokens, blocks = end, 0, 0
            tokens, blocks = tokens + len(ids), blocks + need
        if sequences:
            yield begin, len(sequences)

    def _run(self, sequences: Sequence[np.ndarray], logit_spans: Sequence[range]) -> tuple[Tensor, Tensor]:
        config = self.model.config
        captured = tuple(sorted(set(self.layer_ids)))
        total = sum(map(len, sequences))
        with torch.no_grad():
            out = torch.empty(total, len(captured) * config.hidden, dtype=self._state_dtype, device=self.device)
            batch = self._make_batch(sequences, logit_spans, HiddenCapture(captured, out))
            logits = self.model.forward(batch)
            if captured == self.layer_ids:
                return out, logits
            by_layer = out.view(total, len(captured), config.hidden)
            order = [captured.index(layer) for layer in self.layer_ids]
            return by_layer[:, order].flatten(1), logits

    def _make_batch(
        self, sequences: Sequence[np.ndarray], logit_spans: Sequence[range], capture: HiddenCapture
    ) -> ForwardBatch:
        counts = np.array([len(ids) for ids in sequences], np.int32)
        need = -(-counts // self._block)
        first_block = np.cumsum(need) - need
        tables = np.zeros((len(counts), int(need.max())), np.int32)
        for row, (first, count) in enumerate(zip(first_block, need, strict=True)):
            tables[row, :count] = np.arange(first, first + count)
        starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        positions = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], counts)
        slots = np.repeat(first_block.astype(np.int64) * self._block, counts) + positions
        context = np.zeros(len(counts), np.int32)
        rows = [np.arange(span.start, span.stop) + first for span, first in zip(logit_spans, starts, strict=False)]
        return ForwardBatch(
            tokens=self._to_device(np.concatenate(sequences).astype(np.int64)),
            attention=ops.AttentionMetadata(
                positions=self._to_device(positions),
                slots=self._to_device(slots),
                query_start=self._to_device(starts),
                context=self._to_device(context),
                block_tables=self._to_device(tables),
            ),
            logit_rows=self._to_device(np.concatenate(rows).astype(np.int64)),
            keys=self._cache.keys,
            values=self._cache.values,
            plan=self._planner.plan(context, counts, 0, self._to_device),
            capture=capture,
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        return copy_to_device(array, self.device)


def copy_to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a copy of the array on the device. The host does not wait until the device has finished earlier work."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.clone()
