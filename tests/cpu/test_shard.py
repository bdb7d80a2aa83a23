"""Shards of a model: sizes, the parts of tensors that ranks load, and what cannot be divided."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import tiny_deepseek
import tiny_delta
import tiny_experts
import torch

from emberline.bench.gpu import model as bench_model
from emberline.core.errors import InvalidRequest, ModelFileError, UnsupportedModel
from emberline.core.jsonfile import read_object
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.tensorfile import TensorInfo
from emberline.kernels.cuda import uw12
from emberline.kernels.uw12_ref import reference_pack, reference_unpack
from emberline.models.config import ModelConfig
from emberline.models.config_outline import outline_of, read_outline
from emberline.models.shard import Shard
from emberline.models.tensor_sharding import ShardingRules, shard_checkpoint
from emberline.models.tensor_slices import DimensionSlice, slice_tensor
from emberline.models.weight_matrices import list_weight_matrices

LLAMA_8B = ModelConfig.from_hf(bench_model.LLAMA_8B)
MATRICES = {  # n, k
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}
VOCABULARY = {"model.embed_tokens": (128256, 4096), "lm_head": (128256, 4096)}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
ALL = {f"model.layers.0.{name}": shape for name, shape in MATRICES.items()} | VOCABULARY


def shards(of: int) -> list[Shard]:
    return [Shard(rank, of) for rank in range(of)]


def find_slice(name: str, shape: tuple[int, ...], shard: Shard, config: ModelConfig = LLAMA_8B) -> DimensionSlice:
    (found,) = ShardingRules(config, shard).find(f"{name}.weight", len(shape))
    assert found.size == shape[found.dimension]
    return found


def list_indexes(found: DimensionSlice) -> list[int]:
    return [index for begin, end in found.ranges for index in range(begin, end)]


@pytest.mark.parametrize("of", [2, 4, 8])
def test_llama_8b_shards_cover_it_and_can_be_packed(of: int) -> None:
    for name, shape in ALL.items():
        slices = [find_slice(name, shape, shard) for shard in shards(of)]
        assert [i for found in slices for i in list_indexes(found)] == list(range(slices[0].size)), name
        for found in slices:
            assert uw12.supports(*[found.num_kept if i == found.dimension else size for i, size in enumerate(shape)])
    configs = [shard.shard_config(LLAMA_8B) for shard in shards(of)]
    assert sum(part.vocab_rows for part in configs) == LLAMA_8B.vocab == configs[0].vocab
    assert all((p.heads * of, p.kv_heads * of, p.ffn * of, p.hidden) == (32, 8, 14336, 4096) for p in configs)


def test_fewer_kv_heads_than_ranks() -> None:
    """Each rank has the KV head of its query heads."""
    config = ModelConfig.from_hf(tiny.config("llama", num_attention_heads=16, num_key_value_heads=2))
    for shard in shards(8):
        made = shard.shard_config(config)
        assert (made.heads, made.kv_heads) == (2, 1)
        found = find_slice("model.layers.0.self_attn.k_proj", (16, 48), shard, config)
        assert list_indexes(found) == list(range(8 * (shard.rank // 4), 8 * (shard.rank // 4) + 8))


@pytest.mark.parametrize("of", [2, 8])
@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.down_proj", "self_attn.k_proj"])
def test_products_of_packed_shards_equal_full_product(name: str, of: int) -> None:
    """With as many columns as Llama 8B and fewer rows, or the reverse."""
    torch.manual_seed(0)
    by_rows = name.endswith("k_proj")
    n, k = (1024, 128) if by_rows else (64, MATRICES[name][1])
    weight, x = (torch.randn(n, k) * 0.02).bfloat16(), torch.randn(3, k).double()
    sums, beside = torch.zeros(3, n).double(), []
    for shard in shards(of):
        ((begin, end),) = find_slice(f"model.layers.0.{name}", MATRICES[name], shard).ranges
        part = (weight[begin:end] if by_rows else weight[:, begin:end]).contiguous()
        made = reference_pack(part)
        assert made is not None and torch.equal(reference_unpack(made).view(torch.int16), part.view(torch.int16))
        product = (x if by_rows else x[:, begin:end]) @ reference_unpack(made).double().t()
        if by_rows:
            beside.append(product)
        else:
            sums += product
    assert torch.allclose(torch.cat(beside, 1) if beside else sums, x @ weight.double().t(), rtol=1e-12, atol=1e-12)


def test_contiguous_parts_are_shorter_tensors() -> None:
    """So nothing but the bytes of a rank is read. Other parts have byte ranges."""
    info = TensorInfo("BF16", (4, 6, 8), Path("x"), 1000, 384)
    rows = DimensionSlice(0, 4, ((1, 3),))
    part = slice_tensor("x", info, [rows])
    assert (part.shape, part.offset, part.nbytes, part.stored_slice) == ((2, 6, 8), 1000 + 96, 192, None)
    part = slice_tensor("x", info, [rows, DimensionSlice(2, 8, ((0, 2), (4, 6)))])
    assert (part.shape, part.offset, part.nbytes) == ((2, 6, 4), 1096, 192)
    assert part.stored_slice is not None and part.stored_slice.num_bytes == 2 * 6 * 4 * 2
    assert [*part.stored_slice.list_spans()][:3] == [(0, 4), (8, 12), (16, 20)]
    with pytest.raises(ModelFileError, match=r"'x' in x has the shape \(4, 6, 8\); config.json requires 5"):
        slice_tensor("x", info, [DimensionSlice(0, 5, ((0, 1),))])


def test_replicated_tensors() -> None:
    rules = ShardingRules(LLAMA_8B, Shard(1, 2))
    for name, dimensions in (("norm.weight", 1), ("layers.0.self_attn.q_norm.weight", 1), ("odd", 2)):
        assert rules.find(f"model.{name}", dimensions) == []
    for name in ("self_attn.o_proj.bias", "mlp.down_proj.bias"):
        assert rules.find(f"model.layers.0.{name}", 1) == []
    assert rules.find("model.layers.0.self_attn.q_proj.bias", 1) == [DimensionSlice(0, 4096, ((2048, 4096),))]
    assert rules.find("model.layers.32.self_attn.q_proj.weight", 2) == []  # for multi-token prediction


def test_whole_experts() -> None:
    """With two parts of experts among four ranks, two ranks divide the width of the same experts."""
    config = ModelConfig.from_hf(tiny.config("mixtral", **EXPERTS))
    made = [Shard(rank, 2, 2).shard_config(config).experts for rank in range(2)]
    assert [(e.numbers, e.count, e.ffn) for e in made if e is not None] == [(range(2), 4, 80), (range(2, 4), 4, 80)]
    wide = ModelConfig.from_hf(tiny_experts.config("olmoe", num_experts=6, num_attention_heads=8, head_dim=6))
    mixed = [Shard(rank, 4, 2) for rank in range(4)]
    assert [shard.experts(6) for shard in mixed] == [range(3), range(3), range(3, 6), range(3, 6)]
    assert [shard.expert_columns(80) for shard in mixed] == [range(40), range(40, 80)] * 2
    names = [f"model.layers.0.mlp.experts.{number}.up_proj.weight" for number in range(6)]
    assert [ShardingRules(wide, mixed[2]).has_part(name) for name in names] == [False] * 3 + [True] * 3
    assert ShardingRules(wide, mixed[2]).has_part("model.layers.0.mlp.gate.weight")


def test_models_that_cannot_be_sharded(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="must be from 0 to"):
        Shard(2, 2)
    with pytest.raises(InvalidRequest, match="4 ranks cannot be divided into 3 groups of experts"):
        Shard(0, 4, 3)
    mixtral = tiny.config("mixtral", num_local_experts=5, num_experts_per_tok=2)
    shared = tiny_experts.qwen2(shared_expert_intermediate_size=57)
    cases = {
        "32 attention heads": (LLAMA_8B, Shard(0, 3)),
        "6 KV heads": (ModelConfig.from_hf(tiny.config("llama", num_attention_heads=12, num_key_value_heads=6)), 4),
        "81 columns of the feed": (ModelConfig.from_hf(tiny.config("llama", intermediate_size=81)), 2),
        "81 columns of an expert": (ModelConfig.from_hf(tiny.config("mixtral", **EXPERTS, intermediate_size=81)), 2),
        "5 experts": (ModelConfig.from_hf(mixtral), Shard(0, 2, 2)),
        "57 columns of the shared": (ModelConfig.from_hf(shared), 2),
        "3 key heads of the rec": (ModelConfig.from_hf(tiny_delta.make_config("next-mixed")), 2),
        "a vocabulary of 3 tokens": (ModelConfig.from_hf(tiny.config("llama", vocab_size=3, **HEADS)), 4),
    }
    for what, (config, ranks) in cases.items():
        shard = ranks if isinstance(ranks, Shard) else Shard(0, ranks)
        with pytest.raises(UnsupportedModel, match=f"^{what}.* cannot be divided.* among {shard.world_size} ranks"):
            shard.shard_config(config)
    assert Shard().shard_config(LLAMA_8B) == LLAMA_8B


def test_damaged_shapes_are_refused(tmp_path: Path) -> None:
    """A tensor that has the size of a rank's part, and not of the whole, is not taken for the part."""
    tensors = tiny.tensors(tiny.CONFIGS["llama"])
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(40, 48)
    checkpoint = Checkpoint.open(tiny.write_tensors(tmp_path, tiny.CONFIGS["llama"], tensors))
    with pytest.raises(ModelFileError, match=r"up_proj.* has the shape"):
        shard_checkpoint(checkpoint, Shard(0, 2))


def test_latents_in_blocks_of_rows_are_replicated() -> None:
    """As those of DeepSeek-V3: ranks cannot divide blocks of 128 rows with one scale."""
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config = {**tiny.BASE, **tiny_deepseek.MLA, **tiny_deepseek.LITE_SIZES, **tiny_deepseek.DEEPSEEK["v3"]}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 1536}
    config |= {"intermediate_size": 128, "architectures": ["DeepseekV3ForCausalLM"]}
    for quantised, parts in ((False, 8), (True, 1)):
        made = Shard(0, 8).shard_config(
            ModelConfig.from_hf(config | ({"quantization_config": fp8} if quantised else {}))
        )
        assert made.parts.attention.latent is not None and made.parts.attention.latent.down_parts == parts
        outline = read_outline(config).divide(8, row_unit=128 if quantised else 1)
        assert outline.latent == made.parts.attention.latent


@pytest.mark.parametrize(("file", "ranks"), [("llama-4-scout-17b-16e.json", 2), ("kimi-k2.5.json", 8)])
def test_plans_of_large_models_have_the_parts_of_ranks(file: str, ranks: int) -> None:
    config = read_object(Path(__file__).parents[2] / "benchmarks" / "configs" / file)
    part = Shard(0, ranks).shard_config(ModelConfig.from_hf(config))
    assert list_weight_matrices(outline_of(part)) == list_weight_matrices(read_outline(config).divide(ranks))
