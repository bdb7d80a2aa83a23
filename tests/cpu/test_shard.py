"""Shards of a model cover it, are packed separately, and their products combine to those of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor

from emberline.bench.gpu import model as bench_model
from emberline.core.errors import InvalidRequest, UnsupportedModel
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kernels.cpu.library import find_library
from emberline.kernels.cuda import uw12
from emberline.kernels.uw12_ref import reference_pack, reference_unpack
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.device_weights import DeviceWeights
from emberline.models.shard import Shard
from emberline.models.tensor_names import IGNORABLE_TENSORS
from emberline.models.weights import Weights
from emberline.unweight import model as unweight
from emberline.unweight.codec import select_weight_codec

LLAMA_8B = ModelConfig.from_hf(bench_model.LLAMA_8B)
MATRICES = {  # n, k
    "q_proj": (4096, 4096),
    "k_proj": (1024, 4096),
    "v_proj": (1024, 4096),
    "o_proj": (4096, 4096),
    "gate_proj": (14336, 4096),
    "up_proj": (14336, 4096),
    "down_proj": (4096, 14336),
    "embed_tokens": (128256, 4096),
    "lm_head": (128256, 4096),
}
SMALL = tiny.config(
    "qwen2", hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    num_hidden_layers=2, vocab_size=300,
)  # fmt: skip


def shards(of: int) -> list[Shard]:
    return [Shard(rank, of) for rank in range(of)]


@pytest.mark.parametrize("of", [1, 2, 4, 8])
def test_llama_8b_shards_cover_it_and_can_be_packed(of: int) -> None:
    for kind, (n, k) in MATRICES.items():
        parts = [shard.tensor_slices(f"{kind}.weight", (n, k)) for shard in shards(of)]
        axis = 0 if parts[0][1] == slice(None) else 1
        assert [i for part in parts for i in range((n, k)[axis])[part[axis]]] == list(range((n, k)[axis])), kind
        assert all(uw12.supports(*s.shard_shape(f"{kind}.weight", (n, k))) for s in shards(of))
    configs = [shard.shard_config(LLAMA_8B) for shard in shards(of)]
    assert sum(part.vocab for part in configs) == LLAMA_8B.vocab
    assert all((p.heads * of, p.kv_heads * of, p.ffn * of, p.hidden) == (32, 8, 14336, 4096) for p in configs)


@pytest.mark.parametrize("of", [2, 8])
@pytest.mark.parametrize("kind", ["o_proj", "down_proj", "k_proj"])
def test_products_of_packed_shards_equal_full_product(kind: str, of: int) -> None:
    """With as many columns as Llama 8B and fewer rows, or the reverse."""
    torch.manual_seed(0)
    n, k = (1024, 128) if kind == "k_proj" else (64, MATRICES[kind][1])
    weight, x = (torch.randn(n, k) * 0.02).bfloat16(), torch.randn(3, k).double()
    sums, beside = torch.zeros(3, n).double(), []
    for shard in shards(of):
        rows, columns = shard.tensor_slices(f"model.layers.0.{kind}.weight", (n, k))
        part = weight[rows, columns].contiguous()
        made = reference_pack(part)
        assert made is not None and torch.equal(reference_unpack(made).view(torch.int16), part.view(torch.int16))
        product = x[:, columns] @ reference_unpack(made).double().t()
        if kind == "k_proj":
            beside.append(product)
        else:
            sums += product
    assert torch.allclose(torch.cat(beside, 1) if beside else sums, x @ weight.double().t(), rtol=1e-12, atol=1e-12)


def pack_checkpoint(source: Path, target: Path) -> Path:
    unweight.pack_model(source, target, select_weight_codec(find_library()), lambda _: None)
    return target


def load_shard(weights: Weights, shard: Shard) -> DecoderModel:
    config = shard.shard_config(ModelConfig.from_hf(weights.checkpoint.config))
    decoder = DecoderModel.load(config, weights, 64, "")
    weights.finish(IGNORABLE_TENSORS)
    return decoder


def rows_of(table: Tensor | ops.PackedWeight) -> Tensor:
    assert isinstance(table, Tensor)
    return table


@pytest.mark.parametrize("files", ["plain", "packed"])
def test_model_loaded_in_shards(files: str, tmp_path: Path) -> None:
    tiny.write(tmp_path / "plain", SMALL, dtype=torch.bfloat16)
    directory = tmp_path / "plain" if files == "plain" else pack_checkpoint(tmp_path / "plain", tmp_path / "packed")
    open_ = Checkpoint.open
    whole = load_shard(Weights(open_(directory), torch.float32), Shard())
    parts = [load_shard(Weights(open_(directory), torch.float32, shard=shard), shard) for shard in shards(2)]
    again = [DeviceWeights(open_(directory), torch.float32, "cpu", shard=shard) for shard in shards(2)]
    tables = [
        rows_of(weights.load_embedding_table("model.embed_tokens.weight", p.config.vocab, 128))
        for weights, p in zip(again, parts, strict=True)
    ]
    o = [w.load_matrix("model.layers.1.self_attn.o_proj.weight", 128, 64) for w in again]
    bias = [w.load_vector("model.layers.1.self_attn.k_proj.bias", 32) for w in again]
    for weights in again:
        weights.finish(".*")
    assert torch.equal(torch.cat(tables), rows_of(whole.embedding))
    assert torch.equal(torch.cat([rows_of(part.embedding) for part in parts]), rows_of(whole.embedding))
    x = torch.randn(5, 128)
    for i, layer in enumerate(whole.layers):
        halves = [part.layers[i] for part in parts]
        qkv = [ops.linear(x, half.attention.qkv).split([64, 32, 32], 1) for half in halves]
        beside = torch.cat([torch.cat(both, 1) for both in zip(*qkv, strict=True)], 1)
        assert torch.equal(beside, ops.linear(x, layer.attention.qkv))
        added = sum(
            ops.linear(x[:, 64 * j : 64 * (j + 1)].contiguous(), half.attention.o) for j, half in enumerate(halves)
        )
        assert torch.allclose(torch.as_tensor(added), ops.linear(x, layer.attention.o), atol=1e-5)
        fed = sum(half.ffn(x.clone(), None) - x for half in halves)
        assert torch.allclose(torch.as_tensor(fed), layer.ffn(x.clone(), None) - x, atol=1e-5)
    assert torch.equal(torch.cat([ops.linear(x, part.head) for part in parts], 1), ops.linear(x, whole.head))
    theirs = whole.layers[1].attention
    assert torch.allclose(x @ torch.cat(o, 1).t(), ops.linear(x, theirs.o), atol=1e-5)
    assert theirs.qkv.bias is not None and torch.equal(torch.cat(bias), theirs.qkv.bias[128:192])


def test_replicated_tensors() -> None:
    names = "model.norm.weight", "model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.o_proj.bias", "odd"
    assert all(Shard(1, 2).shard_shape(name, (64,)) == (64,) for name in names)
    assert Shard(1, 2).tensor_slices("model.layers.0.self_attn.q_proj.weight", ()) == ()  # a damaged file
    assert Shard(1, 2).shard_shape("model.layers.0.self_attn.q_proj.bias", (64,)) == (32,)


def test_models_that_cannot_be_sharded() -> None:
    with pytest.raises(InvalidRequest, match="must be from 0 to"):
        Shard(2, 2)
    for of, what in ((16, "8 key heads"), (3, "32 attention heads")):
        with pytest.raises(UnsupportedModel, match=f"{what} cannot be divided into {of} equal parts"):
            Shard(0, of).shard_config(LLAMA_8B)
    biased = ModelConfig.from_hf({**tiny.CONFIGS["llama-biased"], "num_attention_heads": 6, "num_key_value_heads": 2})
    assert Shard().shard_config(biased) == biased
    with pytest.raises(UnsupportedModel, match="biases"):
        Shard(0, 2).shard_config(biased)
    with pytest.raises(UnsupportedModel, match="experts"):
        Shard(0, 2).shard_config(ModelConfig.from_hf(tiny.CONFIGS["mixtral"]))
