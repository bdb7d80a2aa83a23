"""Shards of Llama 8B's matrices, each packed by itself: products equal those of plain rows, and sum to the whole's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_settings import needs_hopper_kernels
from linear_cases import assert_close, heavy, poisoned, random
from torch import Tensor

from emberline.bench.gpu import model as bench_model
from emberline.kernels.cuda import wide
from emberline.kernels.cuda.linear import BF16Weight, linear
from emberline.kernels.cuda.uw12 import UW12Weight, pack
from emberline.models.config import ModelConfig
from emberline.models.shard import Shard
from emberline.models.tensor_sharding import ShardingRules

pytestmark = needs_hopper_kernels

F32 = torch.float32
LLAMA_8B = ModelConfig.from_hf(bench_model.LLAMA_8B)
SHAPES = {"q_proj": (4096, 4096), "o_proj": (4096, 4096), "gate_proj": (14336, 4096), "down_proj": (4096, 14336)}


def cut_slices(kind: str, shard: Shard) -> tuple[slice, slice]:
    module = "self_attn" if kind in ("q_proj", "o_proj") else "mlp"
    (cut,) = ShardingRules(LLAMA_8B, shard).find(f"model.layers.0.{module}.{kind}.weight", 2)
    part = slice(*cut.ranges[0])
    return (part, slice(None)) if cut.dimension == 0 else (slice(None), part)


def product(x: Tensor, w: BF16Weight | UW12Weight) -> Tensor:
    ours = linear if len(x) <= 32 else wide.linear
    return ours(x, w, out=poisoned(len(x), w.n, dtype=F32), pdl=False)


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("kind", SHAPES)
def test_products_of_shards(kind: str, shards: int) -> None:
    torch.manual_seed(0)
    n, k = SHAPES[kind]
    whole = heavy(n, k)
    for m in (1, 16, 64, 128):
        x = random(m, k)
        parts = []
        for rank in range(shards):
            rows, columns = cut_slices(kind, Shard(rank, shards))
            part = whole[rows, columns].contiguous()
            made = pack(part)
            assert made is not None
            mine = x[:, columns].contiguous()
            parts.append(product(mine, made))
            plain = product(mine, BF16Weight(part))
            same = torch.equal(parts[-1].view(torch.int32), plain.view(torch.int32))
            assert same or m > 32, (m, rank)  # above 32 rows, a plan for packed weights may split k elsewhere
            assert_close(parts[-1], F.linear(mine, part), mine.double() @ part.double().t())
        together = torch.cat(parts, 1) if kind in ("q_proj", "gate_proj") else torch.stack(parts).sum(0)
        assert_close(together, F.linear(x, whole), x.double() @ whole.double().t())
