"""A decoder with a shuffled paged cache, and the logits of transformers to compare it with."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emberline.engine.kv_shape import make_state_shape
from emberline.kernels import ops
from emberline.kv.cache import StateCache
from emberline.kv.layer_groups import LayerGroups
from emberline.models.decoder import DecoderModel
from emberline.models.forward import ForwardBatch

BLOCK, BLOCKS = 8, 40
BOUND = 2e-5  # relative to the largest logit


class Cache:
    """A paged cache whose blocks are allocated in random order, and the sequences in it."""

    def __init__(self, model: DecoderModel, tokens: list[list[int]], seed: int = 0) -> None:
        c = model.config
        self.model, self.tokens, self.done = model, tokens, [0] * len(tokens)
        self.groups = LayerGroups.with_states(c.layers, c.parts.attention.state_layers)
        self.keys = torch.full((self.groups.block_layers, BLOCKS, c.kv_heads, BLOCK, c.head_dim), float("nan"))
        shape = make_state_shape(c)
        self.states = None if shape is None else StateCache(shape, len(tokens) + 2)
        if self.states is not None:
            self.states.conv.fill_(float("nan"))
            self.states.matrices.fill_(float("nan"))
        self.values = self.keys.clone() if c.parts.attention.latent is None else self.keys[..., :0]
        free = random.Random(seed).sample(range(BLOCKS), BLOCKS)
        self.tables = [[free.pop() for _ in range(-(-len(ids) // BLOCK))] for ids in tokens]

    def step(self, counts: list[int], rows: list[int] | None = None) -> Tensor:
        """Compute counts[b] more tokens of each sequence b; return the logits of all of them, or of `rows`."""
        batch = [b for b, count in enumerate(counts) if count]
        spans = [(b, range(self.done[b], self.done[b] + counts[b])) for b in batch]
        places = [(b, p) for b, span in spans for p in span]
        most = max(len(self.tables[b]) for b in batch)
        starts = [0]
        for _, span in spans:
            starts.append(starts[-1] + len(span))
        f = ForwardBatch(
            tokens=torch.tensor([self.tokens[b][p] for b, p in places]),
            attention=ops.AttentionMetadata(
                positions=torch.tensor([p for _, p in places], dtype=torch.int32),
                slots=torch.tensor([self.tables[b][p // BLOCK] * BLOCK + p % BLOCK for b, p in places]),
                query_start=torch.tensor(starts, dtype=torch.int32),
                context=torch.tensor([self.done[b] for b in batch], dtype=torch.int32),
                block_tables=torch.tensor([(self.tables[b] + [0] * most)[:most] for b in batch], dtype=torch.int32),
            ),
            logit_rows=torch.tensor(range(len(places)) if rows is None else rows, dtype=torch.int64),
            keys=self.keys,
            values=self.values,
        )
        if self.states is not None:
            slots = torch.tensor([b + 1 for b in batch], dtype=torch.int32)
            f = replace(
                f,
                layer_positions=self.groups.layer_positions,
                conv_states=self.states.conv,
                matrix_states=self.states.matrices,
                state_slots=slots,
            )
        for b in batch:
            self.done[b] += counts[b]
        return self.model.forward(f)

    def run(self, seed: int) -> list[Tensor]:
        """Return all logits of every sequence, computed in random chunks and batches; some steps only decode."""
        chooser = random.Random(seed)
        out: list[list[Tensor]] = [[] for _ in self.tokens]
        while left := [len(ids) - done for ids, done in zip(self.tokens, self.done, strict=True)]:
            if not any(left):
                break
            largest = chooser.choice([1, 1, 5, 17])
            counts = [min(n, chooser.randint(0, largest)) for n in left]
            if any(counts):
                for parts, logits in zip(out, self.step(counts).split(counts), strict=True):
                    parts.append(logits)
        return [torch.cat(parts) for parts in out]


def prompts(*lengths: int, vocab: int = 131) -> list[list[int]]:
    chooser = random.Random(1)
    return [[chooser.randrange(vocab) for _ in range(length)] for length in lengths]


def oracle(directory: Path, tokens: list[list[int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    transformers = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0] for ids in tokens]


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == torch.float32
        error = float((a - b).abs().max() / b.abs().max())
        assert error < BOUND, error
