"""A trained head drafts the same tokens in the engine as in the unrolled passes of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from emberline.drafter.checkpoint import read_head, write_head
from emberline.drafter.head import TrainableHead
from emberline.drafter.head_config import HeadConfig
from emberline.drafter.target import TargetStates
from emberline.drafter.vocabulary import DraftVocabulary
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.models.forward import ForwardBatch
from emberline.models.loader import load_decoder
from emberline.models.weights import Weights

eagle3: Any = pytest.importorskip("emberline.models.eagle3")  # the head as the engine runs it
PASSES, BLOCK = 4, 16


def write_random_head(directory: Path, config: HeadConfig) -> None:
    torch.manual_seed(0)
    head = TrainableHead(config)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(1 + 0.2 * torch.randn_like(weight) if weight.dim() == 1 else 0.15 * torch.randn_like(weight))
    directory.mkdir()
    write_head(directory, head, DraftVocabulary(np.arange(0, 120, 3), 131))


def test_engine_drafts_as_in_training(tmp_path: Path) -> None:
    model = load_decoder(tiny.write(tmp_path / "model"), "float32")
    config = HeadConfig.for_model(model.config, 40)
    write_random_head(tmp_path / "head", config)
    checkpoint = Checkpoint.open(tmp_path / "head")
    engine_head = eagle3.load_eagle3_head(
        checkpoint, Weights(checkpoint, torch.float32), model.config, 64, model.embedding
    )
    head, vocabulary = read_head(tmp_path / "head")
    ids = np.random.default_rng(0).integers(0, 131, 20)
    target = TargetStates(model, config.layer_ids, 64)
    ((hidden, _),) = target.compute([ids], [range(1)])
    with torch.no_grad():
        outputs = head.unroll(hidden[None], target.embed(torch.from_numpy(ids))[None], PASSES)
    for root in range(3, 14):
        keys = torch.zeros(1, 8, config.kv_heads, BLOCK, config.head_dim)
        values = keys.clone()
        x, tokens, start = engine_head.combine(hidden[: root + 1].clone()), ids[1 : root + 2], 0
        for number in range(PASSES):
            drafted, x = engine_head.forward(make_batch(tokens, start, keys, values), x)
            expected = outputs[number][0, root]
            torch.testing.assert_close(x[0], expected, rtol=2e-4, atol=2e-4)
            assert int(drafted[0]) == vocabulary.ids[int(head.logits(expected).argmax())]
            start = root + number + 1
            tokens = ids[start + 1 : start + 2]


def make_batch(tokens: np.ndarray, start: int, keys: torch.Tensor, values: torch.Tensor) -> ForwardBatch:
    """Return a batch of one sequence, whose blocks are 1, 2, 3 and 4."""
    positions = torch.arange(start, start + len(tokens), dtype=torch.int32)
    return ForwardBatch(
        tokens=torch.from_numpy(tokens),
        attention=ops.AttentionMetadata(
            positions=positions,
            slots=positions.long() + BLOCK,
            query_start=torch.tensor([0, len(tokens)], dtype=torch.int32),
            context=torch.tensor([start], dtype=torch.int32),
            block_tables=torch.tensor([[1, 2, 3, 4]], dtype=torch.int32),
        ),
        logit_rows=torch.tensor([len(tokens) - 1]),
        keys=keys,
        values=values,
    )
