"""Loads a model on the CPU in a process of its own, and measures its memory or writes its logits.

    python -m emberline.bench.gguf_child '{"model": .., "threads": .., "dtype": .., "sequences": .., "out": ..}'

It prints by how many bytes loading the model makes the process's memory grow, and the size of the weights in bytes.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kv.cache import KVCache, KVShape
from emberline.models.decoder import DecoderModel
from emberline.models.forward import ForwardBatch
from emberline.models.loader import load_checkpoint

BLOCK_TOKENS = 16


def read_resident_bytes() -> int:
    """Return the anonymous and file pages of this process that are in memory."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) * 1024


def compute_logits(model: DecoderModel, tokens: list[int]) -> torch.Tensor:
    """Return the logits [tokens, vocabulary] of a sequence. The KV cache is in float32."""
    config, count = model.config, len(tokens)
    blocks = -(-count // BLOCK_TOKENS)
    cache = KVCache(KVShape(config.layers, config.kv_heads, config.head_dim, BLOCK_TOKENS, torch.float32), blocks)
    metadata = ops.AttentionMetadata(
        positions=torch.arange(count, dtype=torch.int32),
        slots=torch.arange(count),
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context=torch.zeros(1, dtype=torch.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
    )
    batch = ForwardBatch(torch.tensor(tokens), metadata, torch.arange(count), keys=cache.keys, values=cache.values)
    return model.forward(batch)


def main(settings: dict[str, Any]) -> None:
    ops.start_backend(threads=settings["threads"])
    torch.set_num_threads(1)
    ops.pack_linear(torch.zeros(64, 64))  # what the first use of the kernels allocates is not part of the weights
    before = read_resident_bytes()
    model = load_checkpoint(Checkpoint.open(Path(settings["model"])), settings["dtype"])
    gc.collect()
    after = read_resident_bytes()
    if "out" in settings:
        np.savez(settings["out"], *(compute_logits(model, tokens).numpy() for tokens in settings["sequences"]))
    print(json.dumps({"resident_bytes": after - before, "weight_bytes": model.weight_bytes}))


if __name__ == "__main__":
    main(json.loads(sys.argv[-1]))
