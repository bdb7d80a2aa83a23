"""build_forward_batch: turns the work items of a StepPlan into the model's input tensors, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from emberline.core.plan import WorkItem
from emberline.kernels.ops import AttentionMetadata
from emberline.kv.cache import KVCache
from emberline.models.forward import ForwardBatch


def build_forward_batch(work: Sequence[WorkItem], cache: KVCache) -> ForwardBatch:
    size = cache.shape.block_size
    counts = np.array([len(w.tokens) for w in work], np.int32)
    starts = np.array([w.start for w in work], np.int32)
    query_start = np.zeros(len(work) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    total = int(query_start[-1])

    tables = np.zeros((len(work), max(len(w.blocks) for w in work)), np.int32)
    for row, w in enumerate(work):
        tables[row, : len(w.blocks)] = w.blocks
    owner = np.repeat(np.arange(len(work)), counts)  # which request each token belongs to
    positions = np.arange(total, dtype=np.int32) - np.repeat(query_start[:-1] - starts, counts)
    slots = tables[owner, positions // size].astype(np.int64) * size + positions % size

    logit_rows = [
        np.arange(query_start[i] if w.prompt_logprobs else query_start[i + 1] - 1 - w.num_draft, query_start[i + 1])
        for i, w in enumerate(work)
        if w.samples or w.prompt_logprobs
    ]
    tokens = np.fromiter((t for w in work for t in w.tokens), np.int64, total)
    return ForwardBatch(
        tokens=torch.from_numpy(tokens),
        attention=AttentionMetadata(
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            query_start=torch.from_numpy(query_start),
            context=torch.from_numpy(starts),
            block_tables=torch.from_numpy(tables),
        ),
        logit_rows=torch.from_numpy(
            np.concatenate(logit_rows).astype(np.int64) if logit_rows else np.zeros(0, np.int64)
        ),
        keys=cache.keys,
        values=cache.values,
    )
